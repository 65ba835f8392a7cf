"""What the training commands have in common: how a run is shown, stopped and gone on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.interrupts import deferred_interrupts
from paceline.stages import say, stage

if TYPE_CHECKING:
    from paceline.train.draft import DraftTrainer
    from paceline.train.heads import HeadTrainer
    from paceline.train.lm import LMTrainer

    Trainer = HeadTrainer | DraftTrainer | LMTrainer

_DATA = "Data"


@dataclass(frozen=True)
class TextOptions:
    """What of the data is learnt: fields of every training config."""

    exclude_licenses: Annotated[
        list[str],
        typer.Option(
            "--exclude-license",
            help="Leave out records whose license contains this; repeatable.",
            rich_help_panel=_DATA,
        ),
    ] = field(default_factory=lambda: ["CC-BY-SA"])
    loss_on: Annotated[
        str,
        typer.Option(
            metavar="[assistant|all]",
            help="Of conversations, learn what the assistant says, or all.",
            rich_help_panel=_DATA,
        ),
    ] = "assistant"


@contextmanager
def shown_steps(trainer: Trainer) -> Iterator[Callable[[Any], None]]:
    """A function that shows a step's report as a stage; measurements get lines that stay."""
    first, last = trainer.step, trainer.config.steps
    what = f"training from step {first}" if first else "training"
    mean = ""
    with stage(what, total=max(0, last - first), unit="steps") as doing:

        def show(progress: Any) -> None:
            nonlocal mean
            acceptance, validation = progress.acceptance, getattr(progress, "validation", {})
            if acceptance:
                mean = f", {_mean(acceptance.values())} tokens per target step"
            note = f"loss {progress.loss:.3f}, {progress.tokens_per_second:,.0f} tokens/s{mean}"
            doing.advance(1, note)
            for line in _measured(progress.step, acceptance, validation):
                say(line)

        yield show


def _mean(parts: Any) -> str:
    from paceline.train.acceptance import total

    return f"{total(parts).mean_accepted_length:.2f}"


def _measured(step: int, acceptance: Any, validation: Any) -> Iterator[str]:
    """Lines on what was measured at a step."""
    if acceptance:
        parts = ", ".join(f"{name} {_mean([found])}" for name, found in acceptance.items())
        yield f"step {step}: {_mean(acceptance.values())} tokens per target step ({parts})"
    elif validation:
        losses = "  ".join(f"{name} {loss:.3f}" for name, loss in validation.items())
        yield f"step {step}: validation {losses}"


def train_to_end(trainer: Trainer, out: Path, eval_every: int, save_seconds: float) -> Path:
    """Train to the last step, or to Ctrl-C; returns the folder of the result."""
    if trainer.note:
        say(f"note: {trainer.note}")
    if trainer.step:
        say(f"resuming at step {trainer.step} of {trainer.config.steps}")
    with deferred_interrupts() as interrupts, shown_steps(trainer) as show:

        def on_progress(progress: Any) -> None:
            show(progress)
            if interrupts.pending:
                trainer.save_checkpoint()
                raise KeyboardInterrupt(
                    f"interrupted at step {trainer.step}; checkpoint saved in {out}: "
                    "run the same command again to resume"
                )

        return trainer.run(on_progress, eval_every, save_seconds)
