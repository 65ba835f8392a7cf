"""How a training is shown, stopped and gone on with."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.stages import say, stage

if TYPE_CHECKING:
    from paceline.train.acceptance import AcceptanceCounts
    from paceline.train.trainer import Progress, Trainer


class Interrupts:
    """Ctrl-C between steps, where weights and optimizer agree; a second one stops at once."""

    def __init__(self) -> None:
        self.pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt("interrupted; the last saved checkpoint stands")
        self.pending = True
        print("stopping after this step (Ctrl-C again: at once)", file=sys.stderr)


@contextmanager
def deferred_interrupts() -> Iterator[Interrupts]:
    """Note Ctrl-C instead of raising; the block asks ``pending`` when it can stop."""
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def shown_steps(trainer: Trainer) -> Iterator[Callable[[Progress], None]]:
    """A function that shows a step's report as a stage; measurements get lines that stay."""
    first, last = trainer.step, trainer.config.steps
    what = f"training from step {first}" if first else "training"
    mean = ""
    with stage(what, total=max(0, last - first), unit="steps") as doing:

        def show(progress: Progress) -> None:
            nonlocal mean
            if progress.acceptance:
                mean = f", {_mean(progress.acceptance.values())} tokens per target step"
            note = f"loss {progress.loss:.3f}, {progress.tokens_per_second:,.0f} tokens/s{mean}"
            doing.advance(1, note)
            if progress.acceptance or progress.validation:
                say(f"step {progress.step}: {_measured(progress)}")

        yield show


def _mean(parts: Iterable[AcceptanceCounts]) -> str:
    from paceline.train.acceptance import total

    return f"{total(parts).mean_accepted_length:.2f}"


def _measured(progress: Progress) -> str:
    """What was measured at a step, in one line."""
    found = progress.acceptance
    if found:
        parts = ", ".join(f"{name} {_mean([part])}" for name, part in found.items())
        return f"{_mean(found.values())} tokens per target step ({parts})"
    return "validation " + "  ".join(f"{n} {loss:.3f}" for n, loss in progress.validation.items())


def mean_length(entry: dict[str, Any]) -> float | None:
    """Mean accepted length of one measurement in a history."""
    from paceline.train.acceptance import total
    from paceline.train.card import counts_of

    parts = counts_of(entry).values()
    return total(parts).mean_accepted_length if parts else None


def train_to_end(trainer: Trainer, out: Path, eval_every: int, save_seconds: float) -> Path:
    """Train to the last step, or to Ctrl-C; returns the folder of the result."""
    if trainer.note:
        say(f"note: {trainer.note}")
    if trainer.step:
        say(f"resuming at step {trainer.step} of {trainer.config.steps}")
    with deferred_interrupts() as interrupts, shown_steps(trainer) as show:

        def on_progress(progress: Progress) -> None:
            show(progress)
            if interrupts.pending:
                trainer.save_checkpoint()
                raise KeyboardInterrupt(
                    f"interrupted at step {trainer.step}; checkpoint saved in {out}: "
                    "run the same command again to resume"
                )

        return trainer.run(on_progress, eval_every, save_seconds)
