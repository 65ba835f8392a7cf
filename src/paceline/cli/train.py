"""``paceline train``: drafts and heads, from their configurations."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import Command, expand, set_threads
from paceline.cli.output import WriteOptions, print_json
from paceline.cli.sample import sample
from paceline.core.stages import info, stage
from paceline.settings import setting
from paceline.train.configs import (
    DFlashTrainConfig,
    DraftConfig,
    DSparkTrainConfig,
    Eagle1TrainConfig,
    EagleTrainConfig,
    MedusaTrainConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from paceline.train.trainer import Progress, Trainer

app = typer.Typer(help="Train models for Paceline.", no_args_is_help=True)


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, or SIGTERM, between steps: the block asks whether it came. A second one stops at
    once."""
    came = False

    def interrupt(*_: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt("interrupted; the last saved checkpoint stands")
        came = True
        print("stopping after this step (Ctrl-C again: at once)", file=sys.stderr)

    before = {sent: signal.signal(sent, interrupt) for sent in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        for sent, handler in before.items():
            signal.signal(sent, handler)


def train_to_end(trainer: Trainer, running: RunningOptions) -> Path:
    """Train to the last step, or to Ctrl-C; returns the folder of the result."""
    from paceline.train.acceptance import total

    first, last = trainer.step, trainer.config.steps
    if trainer.note:
        info(f"note: {trainer.note}")
    if first:
        info(f"resuming at step {first} of {last}")
    mean = ""
    what = f"training from step {first}" if first else "training"
    steps = stage(what, max(0, last - first), "steps")
    with deferred_interrupts() as interrupted, steps as doing:

        def on_progress(progress: Progress) -> None:
            nonlocal mean
            if parts := progress.acceptance:
                length = total(parts.values()).mean_accepted_length
                mean = f"{length:.2f} tokens per target step"
                files = (f"{name} {part.mean_accepted_length:.2f}" for name, part in parts.items())
                info(f"step {progress.step}: {mean} ({', '.join(files)})")
            speed = f"{progress.tokens_per_second:,.0f} tokens/s"
            doing.advance(1, ", ".join(filter(None, (f"loss {progress.loss:.3f}", speed, mean))))
            if interrupted():
                trainer.save_checkpoint()
                raise KeyboardInterrupt(
                    f"interrupted at step {trainer.step}; checkpoint saved in {running.out}: "
                    "run the same command again to resume"
                )

        return trainer.run(on_progress, running.eval_every, running.save_seconds)


@dataclass(frozen=True)
class RunningOptions(WriteOptions):
    """How a run is carried out; nothing here changes its result, up to rounding."""

    out: Path = setting(MISSING, "Folder of the run; what was trained goes below it.")
    device: str = setting("auto", "auto, cpu, cuda ...")
    compiled: bool = setting(
        False, "torch.compile (needs a C++ compiler).", flags=("--compile/--no-compile",)
    )
    threads: int | None = setting(None, "Processor threads; 1 beside other work.", low=1, shown="")
    eval_every: int = setting(100, "Steps between measurements.", low=1)
    save_seconds: float = setting(300.0, "Between checkpoints.", low=0)


def train(config: TrainConfig, running: RunningOptions, program: str = "paceline") -> None:
    """Train to the end or to Ctrl-C, and write the result and its card, which says how ``program``
    was called."""
    set_threads(running.threads)
    from paceline.train.acceptance import total
    from paceline.train.card import counts_of, write_card

    module, _, name = config.trainer.partition(":")
    kind = getattr(import_module(module), name)
    trainer: Trainer = kind(config, running.out, running.device, running.compiled)
    folder = train_to_end(trainer, running)
    with stage("writing the model card"):
        card = write_card(trainer, shlex.join([program, *sys.argv[1:]]))
    if not running.as_json:
        use = "" if trainer.spec is None else f"; use it with --draft {trainer.spec}{folder}"
        info(f"{trainer.noun} written to {folder}{use}")
        return
    last = trainer.history[-1] if trainer.history else {"loss": None, "acceptance": {}}
    counts = counts_of(last).values()
    record: dict[str, Any] = {
        trainer.result: str(folder),
        "card": str(card),
        "steps": trainer.step,
        "parameters": sum(parameter.numel() for parameter in trainer.learner.parameters()),
        "loss": last["loss"],
        "mean_accepted_length": total(counts).mean_accepted_length if counts else None,
        "acceptance": last["acceptance"],
        "config": asdict(config),
    }
    print_json(record)


def _add(name: str, config: type[TrainConfig]) -> None:
    """Add ``paceline train NAME``."""

    def command(config: Any, running: Any) -> None:
        train(config, running)

    command.__annotations__ = {"config": config, "running": RunningOptions}
    command.__doc__ = (
        f"{getdoc(config)}\n\nRun the same command again to resume from OUT/checkpoint.pt."
    )
    app.command(name, cls=Command)(expand(command))


_add("draft", DraftConfig)
_add("eagle3", EagleTrainConfig)
_add("dflash", DFlashTrainConfig)
_add("dspark", DSparkTrainConfig)
_add("medusa", MedusaTrainConfig)
_add("eagle", Eagle1TrainConfig)
app.command("sample", cls=Command)(sample)
