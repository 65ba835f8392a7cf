"""``paceline train lm``: a small language model from text, or a draft distilled from a target."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli.options import expand, quiet_libraries, set_threads
from paceline.cli.output import print_json
from paceline.cli.progress import showing
from paceline.cli.train_draft import draft
from paceline.cli.train_heads import eagle, eagle3, values_of
from paceline.cli.train_medusa import medusa
from paceline.cli.train_sample import sample
from paceline.cli.training import TextOptions, train_to_end
from paceline.stages import stage

if TYPE_CHECKING:
    from paceline.train.lm import LMConfig

app = typer.Typer(help="Train models for Paceline.", no_args_is_help=True)

_DATA = "Data"
_SHAPE = "Model shape"
_SCHEDULE = "Schedule"


def _size(text: str, panel: str) -> Any:
    return typer.Option(min=1, help=text, rich_help_panel=panel)


@dataclass(frozen=True)
class RunOptions:
    """The fields of LMConfig, which cannot be imported here: it would load torch for --help."""

    data: Annotated[
        list[str],
        typer.Option(
            metavar="FILE[=WEIGHT]",
            help="JSONL(.gz) with messages, conversations, turns, text or ids, and its share; "
            "repeatable.",
            rich_help_panel=_DATA,
        ),
    ]
    valid: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="Validation data; repeatable.", rich_help_panel=_DATA),
    ] = field(default_factory=list)
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Use the tokenizer of this folder.", rich_help_panel=_DATA),
    ] = None
    teacher: Annotated[
        str | None,
        typer.Option(help="Distil from this model; use its tokenizer.", rich_help_panel=_DATA),
    ] = None
    init: Annotated[
        str | None,
        typer.Option(
            help="Start from the weights of this folder; its shape counts.", rich_help_panel=_DATA
        ),
    ] = None
    text_weight: Annotated[
        float,
        typer.Option(min=0, max=1, help="Plain loss share in distillation.", rich_help_panel=_DATA),
    ] = 0.1
    argmax_weight: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the teacher's likeliest token.", rich_help_panel=_DATA
        ),
    ] = 0.0
    vocab_size: Annotated[int, _size("Tokens of a new tokenizer.", _SHAPE)] = 4096
    hidden_size: Annotated[int, _size("Width.", _SHAPE)] = 256
    layers: Annotated[int, _size("Depth.", _SHAPE)] = 12
    heads: Annotated[int, _size("Attention heads.", _SHAPE)] = 4
    kv_heads: Annotated[int, _size("Key and value heads.", _SHAPE)] = 2
    ffn_size: Annotated[int, _size("Width of the feed-forward part.", _SHAPE)] = 768
    max_positions: Annotated[int, _size("Longest context.", _SHAPE)] = 1024
    seq_len: Annotated[int, _size("Tokens of a training window.", _SCHEDULE)] = 256
    long_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="Every so many steps, windows of --max-positions; 0 is never.",
            rich_help_panel=_SCHEDULE,
        ),
    ] = 10
    batch_tokens: Annotated[int, _size("Tokens a step.", _SCHEDULE)] = 8192
    micro_tokens: Annotated[int, _size("Tokens of one forward pass.", _SCHEDULE)] = 2048
    steps: Annotated[int, _size("Steps in all.", _SCHEDULE)] = 1500
    warmup: Annotated[int, _size("Steps of rising learning rate.", _SCHEDULE)] = 50
    lr: Annotated[
        float, typer.Option(help="Peak rate of Muon (matrices).", rich_help_panel=_SCHEDULE)
    ] = 0.005
    adam_lr: Annotated[
        float, typer.Option(help="Peak rate of AdamW (the rest).", rich_help_panel=_SCHEDULE)
    ] = 0.004
    weight_decay: Annotated[
        float, typer.Option(min=0, help="Weight decay of matrices.", rich_help_panel=_SCHEDULE)
    ] = 0.05
    seed: Annotated[
        int, typer.Option(min=0, help="Of weights and batches.", rich_help_panel=_SCHEDULE)
    ] = 0

    def config(self, text: TextOptions) -> LMConfig:
        from paceline.train.lm import LMConfig

        return LMConfig.from_dict(values_of(self, text))


@app.callback()
def group() -> None:
    """Train models for Paceline."""


@app.command("lm")
@expand
def lm(
    run: RunOptions,
    text: TextOptions,
    out: Annotated[Path, typer.Option(help="Folder of the run; the model goes to OUT/model.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="torch.compile (needs a C++ compiler).")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Processor threads; 1 beside other work.", show_default=False),
    ] = None,
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between validations.")] = 250,
    save_seconds: Annotated[float, typer.Option(min=0, help="Between checkpoints.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Train a small Llama-architecture model, or distil a draft (--teacher).

    Run the same command again to resume from OUT/checkpoint.pt. When other programs use the
    processor too, OMP_WAIT_POLICY=passive in the environment keeps waiting threads from spinning.
    """
    console = Console(stderr=True)
    quiet_libraries()
    set_threads(threads)
    from paceline.train.card import write_card
    from paceline.train.lm import LMTrainer

    with showing(console):
        trainer = LMTrainer(run.config(text), out, device, compiled)
        folder = train_to_end(trainer, out, eval_every, save_seconds)
        with stage("writing the model card"):
            card = write_card(trainer, shlex.join(["paceline", *sys.argv[1:]]))
    last = trainer.history[-1] if trainer.history else {"loss": None, "validation": {}}
    if as_json:
        print_json(
            {
                "model": str(folder),
                "card": str(card),
                "steps": trainer.step,
                "parameters": trainer.model.num_parameters(),
                "loss": last["loss"],
                "validation": last["validation"],
                "config": asdict(trainer.config),
            }
        )
    else:
        console.print(f"model written to {folder}", highlight=False)


app.command("draft")(draft)
app.command("eagle3")(eagle3)
app.command("medusa")(medusa)
app.command("eagle")(eagle)


app.command("sample")(sample)
