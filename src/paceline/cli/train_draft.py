"""``paceline train draft``: a draft model distilled for a target."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli.options import DEFAULT_MODEL, expand, quiet_libraries, set_threads
from paceline.cli.output import print_json
from paceline.cli.progress import showing
from paceline.cli.train_heads import RunningOptions, values_of
from paceline.cli.training import TextOptions, train_to_end
from paceline.stages import stage

if TYPE_CHECKING:
    from paceline.train.draft import DraftConfig

_DATA = "Data"
_LOSS = "Loss"
_SHAPE = "Shape of a new draft"
_SCHEDULE = "Schedule"
_HELD_OUT = "Held-out acceptance"


def _number(text: str, panel: str, least: float = 1) -> Any:
    return typer.Option(min=least, help=text, rich_help_panel=panel)


def _share(text: str) -> Any:
    return typer.Option(min=0, max=1, help=text, rich_help_panel=_LOSS)


@dataclass(frozen=True)
class DraftOptions:
    """Fields of DraftConfig, which cannot be imported here: it would load torch for --help.

    ``target`` and ``draft`` are what the config calls teacher and init.
    """

    data: Annotated[
        list[str],
        typer.Option(
            metavar="FILE[=WEIGHT]",
            help="JSONL(.gz) with messages, conversations, turns, text or ids, and its share; "
            "repeatable. Best is what the target wrote itself (paceline train sample).",
            rich_help_panel=_DATA,
        ),
    ]
    target: Annotated[
        str, typer.Option(help="The model to draft for; it stays as it is.", rich_help_panel=_DATA)
    ] = DEFAULT_MODEL
    draft: Annotated[
        str | None,
        typer.Option(
            help="Start from this model, whose vocabulary must be the target's; without it, a new "
            "one of the shape below.",
            rich_help_panel=_DATA,
        ),
    ] = None
    valid: Annotated[
        list[str],
        typer.Option(
            metavar="FILE",
            help="Openings for the held-out acceptance; repeatable.",
            rich_help_panel=_DATA,
        ),
    ] = field(default_factory=list)
    loss: Annotated[
        str,
        typer.Option(
            help="kl: learns fast. tv: total variation, the chance of rejection itself; best to "
            "finish with. mixed: both.",
            rich_help_panel=_LOSS,
        ),
    ] = "kl"
    tv_weight: Annotated[float, _share("Share of total variation in the mixed loss.")] = 0.5
    argmax_weight: Annotated[
        float, _share("Share of the target's likeliest token: more serves greedy decoding.")
    ] = 0.0
    text_weight: Annotated[float, _share("Share of the text itself.")] = 0.0
    hidden_size: Annotated[int, _number("Width.", _SHAPE)] = 192
    layers: Annotated[int, _number("Depth.", _SHAPE)] = 2
    heads: Annotated[int, _number("Attention heads.", _SHAPE)] = 3
    kv_heads: Annotated[int, _number("Key and value heads.", _SHAPE)] = 3
    ffn_size: Annotated[int, _number("Width of the feed-forward part.", _SHAPE)] = 512
    max_positions: Annotated[int, _number("Longest context, and longest window.", _SHAPE)] = 1024
    seq_len: Annotated[int, _number("Tokens of a training window.", _SCHEDULE)] = 256
    long_every: Annotated[
        int, _number("Every so many steps, windows of --max-positions; 0: never.", _SCHEDULE, 0)
    ] = 10
    batch_tokens: Annotated[int, _number("Tokens a step.", _SCHEDULE)] = 8192
    micro_tokens: Annotated[int, _number("Tokens of one forward pass.", _SCHEDULE)] = 2048
    steps: Annotated[int, _number("Steps in all.", _SCHEDULE)] = 1500
    warmup: Annotated[int, _number("Steps of rising learning rate.", _SCHEDULE)] = 50
    lr: Annotated[
        float, typer.Option(help="Peak rate of Muon (matrices).", rich_help_panel=_SCHEDULE)
    ] = 0.005
    adam_lr: Annotated[
        float, typer.Option(help="Peak rate of AdamW (the rest).", rich_help_panel=_SCHEDULE)
    ] = 0.004
    weight_decay: Annotated[float, _number("Weight decay of matrices.", _SCHEDULE, 0)] = 0.05
    seed: Annotated[int, _number("Of weights and batches.", _SCHEDULE, 0)] = 0
    draft_length: Annotated[int, _number("Tokens of a draft.", _HELD_OUT)] = 4
    held_out: Annotated[int, _number("Openings of each --valid file.", _HELD_OUT)] = 8
    held_out_tokens: Annotated[int, _number("Tokens written from each.", _HELD_OUT, 2)] = 96

    def config(self, text: TextOptions) -> DraftConfig:
        from paceline.train.draft import DraftConfig

        values = values_of(self, text)
        values["teacher"], values["init"] = values.pop("target"), values.pop("draft")
        return DraftConfig.from_dict(values)


@expand
def draft(run: DraftOptions, text: TextOptions, running: RunningOptions) -> None:
    """Distil a draft model for a target; the result goes to OUT/model.

    Run the same command again to resume from OUT/checkpoint.pt.
    """
    console = Console(stderr=True)
    quiet_libraries()
    set_threads(running.threads)
    from paceline.train.acceptance import AcceptanceCounts, total
    from paceline.train.draft import DraftTrainer
    from paceline.train.draft_card import write_draft_card
    from paceline.train.parallel import together

    with showing(console):
        trainer = DraftTrainer(run.config(text), running.out, running.device, running.compiled)
        with together(trainer, running.processes, running.threads):
            folder = train_to_end(trainer, running.out, running.eval_every, running.save_seconds)
        with stage("writing the model card"):
            card = write_draft_card(trainer, shlex.join(["paceline", *sys.argv[1:]]))
    if not running.as_json:
        console.print(f"draft written to {folder}; use it with --draft {folder}")
        return
    last = trainer.history[-1] if trainer.history else {"loss": None, "acceptance": {}}
    parts = [AcceptanceCounts.from_dict(values) for values in last["acceptance"].values()]
    print_json(
        {
            "model": str(folder),
            "card": str(card),
            "steps": trainer.step,
            "parameters": trainer.model.num_parameters(),
            "loss": last["loss"],
            "mean_accepted_length": total(parts).mean_accepted_length if parts else None,
            "acceptance": last["acceptance"],
            "config": asdict(trainer.config),
        }
    )
