"""``paceline train``: language models, drafts and heads, from their configurations."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from paceline.cli.options import expand, quiet_libraries, set_threads
from paceline.cli.output import print_json
from paceline.cli.progress import showing
from paceline.cli.train_sample import sample
from paceline.cli.training import mean_length, train_to_end
from paceline.settings import changed, setting
from paceline.stages import stage
from paceline.train.configs import (
    DraftConfig,
    Eagle1TrainConfig,
    EagleTrainConfig,
    LMConfig,
    MedusaTrainConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer

_RESUMED = "Run the same command again to resume from OUT/checkpoint.pt."
app = typer.Typer(help="Train models for Paceline.", no_args_is_help=True)


@dataclass(frozen=True)
class RunningOptions:
    """How a run is carried out; nothing here changes its result, up to rounding."""

    out: Path = setting(MISSING, "Folder of the run; what was trained goes below it.")
    device: str = setting("auto", "auto, cpu, cuda ...")
    compiled: bool = setting(
        False, "torch.compile (needs a C++ compiler).", flags=("--compile/--no-compile",)
    )
    threads: int | None = setting(None, "Processor threads; 1 beside other work.", low=1, shown="")
    processes: int = setting(
        1,
        "On a processor: so many train together, --threads each. One a core is fastest; each "
        "holds the target.",
        low=1,
    )
    eval_every: int = setting(100, "Steps between measurements.", low=1)
    save_seconds: float = setting(300.0, "Between checkpoints.", low=0)
    as_json: bool = setting(False, "End with one JSON line.", flags=("--json",))


@dataclass(frozen=True)
class LongRunningOptions(RunningOptions):
    """Of a whole model, which learns more slowly than a draft."""

    eval_every: int = changed(RunningOptions, "eval_every", 250)


def _train(kind: Callable[..., Trainer], config: TrainConfig, running: RunningOptions) -> None:
    """Train to the end or to Ctrl-C, and write the result and its card."""
    console = Console(stderr=True)
    from paceline.train.card import write_card
    from paceline.train.parallel import together

    with showing(console):
        trainer = kind(config, running.out, running.device, running.compiled)
        with together(trainer, running.processes, running.threads):
            folder = train_to_end(trainer, running.out, running.eval_every, running.save_seconds)
        with stage("writing the model card"):
            card = write_card(trainer, shlex.join(["paceline", *sys.argv[1:]]))
    if not running.as_json:
        use = "" if trainer.spec is None else f"; use it with --draft {trainer.spec}{folder}"
        console.print(f"{trainer.noun} written to {folder}{use}", highlight=False)
        return
    last = trainer.history[-1] if trainer.history else {"loss": None, trainer.measured: {}}
    figures = {trainer.measured: last[trainer.measured]}
    if trainer.measured == "acceptance":
        figures = {"mean_accepted_length": mean_length(last), **figures}
    print_json(
        {
            trainer.result: str(folder),
            "card": str(card),
            "steps": trainer.step,
            "parameters": sum(parameter.numel() for parameter in trainer.learnt()),
            "loss": last["loss"],
            **figures,
            "config": asdict(trainer.config),
        }
    )


def _command(
    name: str,
    config: type[TrainConfig],
    trainer: str,
    doc: str,
    running: type[RunningOptions] = RunningOptions,
) -> None:
    """Add ``paceline train NAME``, with the settings of ``config`` as its options.

    ``trainer``: MODULE:CLASS, which loads torch and so is imported when it is run.
    """

    def command(run: Any, how: Any) -> None:
        quiet_libraries()
        set_threads(how.threads)
        module, kind = trainer.split(":")
        _train(getattr(import_module(f"paceline.train.{module}"), kind), run, how)

    command.__annotations__ = {"run": config, "how": running}
    command.__doc__ = f"{doc}\n\n{_RESUMED}"
    app.command(name)(expand(command))


@app.callback()
def group() -> None:
    """Train models for Paceline."""


_command(
    "lm",
    LMConfig,
    "lm:LMTrainer",
    "Train a small Llama-architecture model, or distil a draft (--teacher). The model goes to "
    "OUT/model.\n\nWhen other programs use the processor too, OMP_WAIT_POLICY=passive in the "
    "environment keeps waiting threads from spinning.",
    LongRunningOptions,
)
_command(
    "draft",
    DraftConfig,
    "draft:DraftTrainer",
    "Distil a draft model for a target; the result goes to OUT/model.",
)
_command(
    "eagle3",
    EagleTrainConfig,
    "eagle:EagleTrainer",
    "Train an EAGLE-3 head: three layers' features, unrolled as in drafting.",
)
_command(
    "medusa",
    MedusaTrainConfig,
    "medusa:MedusaTrainer",
    "Train Medusa heads: several tokens ahead from the target's last hidden state.",
)
_command(
    "eagle",
    Eagle1TrainConfig,
    "eagle:EagleTrainer",
    "Train an EAGLE head (also for EAGLE-2): continues the target's last features.",
)
app.command("sample")(sample)
