"""``paceline train medusa``: heads on a frozen target, or together with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import expand
from paceline.cli.train_heads import HeadOptions, RunningOptions, run_heads, values_of
from paceline.cli.training import TextOptions

if TYPE_CHECKING:
    from paceline.train.heads import HeadTrainer

_HEADS = "Heads"
_JOINT = "Medusa-2"


def _number(text: str, panel: str, least: float = 1) -> Any:
    return typer.Option(min=least, help=text, rich_help_panel=panel)


@dataclass(frozen=True)
class MedusaOptions:
    """Fields of MedusaTrainConfig."""

    heads: Annotated[int, _number("Heads: tokens drafted ahead.", _HEADS)] = 4
    layers: Annotated[int, _number("Residual blocks of each.", _HEADS, 0)] = 1
    shared_head: Annotated[
        bool,
        typer.Option(
            "--shared-head/--own-heads",
            help="Use the target's vocabulary layer instead of one per head: far smaller.",
            rich_help_panel=_HEADS,
        ),
    ] = False
    head_decay: Annotated[float, _number("Weight of each further head.", _HEADS, 0)] = 0.8
    nodes: Annotated[int, _number("Nodes of the tree that is measured.", _HEADS)] = 8
    joint: Annotated[
        bool,
        typer.Option(
            "--joint",
            help="Medusa-2: train the target too, and write it to OUT/model. Its text changes.",
            rich_help_panel=_JOINT,
        ),
    ] = False
    joint_after: Annotated[int, _number("Steps in which heads train alone.", _JOINT, 0)] = 200
    joint_weight: Annotated[
        float, _number("Weight of the heads' loss beside the target's.", _JOINT, 0)
    ] = 0.2
    target_lr: Annotated[
        float, _number("Rates of the target, as a share of the heads'.", _JOINT, 0)
    ] = 0.1


@expand
def medusa(
    run: HeadOptions, text: TextOptions, head: MedusaOptions, running: RunningOptions
) -> None:
    """Train Medusa heads: several tokens ahead from the target's last hidden state.

    Run the same command again to resume from OUT/checkpoint.pt.
    """

    def new_trainer() -> HeadTrainer:
        from paceline.train.medusa import MedusaTrainConfig, MedusaTrainer

        config = MedusaTrainConfig(**values_of(run, text, head))
        return MedusaTrainer(config, running.out, running.device, running.compiled)

    what = "Medusa-2 heads" if head.joint else "Medusa heads"
    run_heads(new_trainer, running, what, "medusa")
