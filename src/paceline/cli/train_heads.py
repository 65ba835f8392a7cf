"""``paceline train eagle3`` and ``train eagle``: heads on a frozen target."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli.options import DEFAULT_MODEL, expand, quiet_libraries, set_threads
from paceline.cli.output import print_json
from paceline.cli.progress import showing
from paceline.cli.training import TextOptions, train_to_end
from paceline.stages import stage

if TYPE_CHECKING:
    from paceline.train.heads import HeadTrainer

_DATA = "Data"
_SHAPE = "Head"
_SCHEDULE = "Schedule"
_HELD_OUT = "Held-out acceptance"


def _number(text: str, panel: str, least: float = 1) -> Any:
    return typer.Option(min=least, help=text, rich_help_panel=panel)


@dataclass(frozen=True)
class HeadOptions:
    """The fields of HeadConfig, which cannot be imported here: it would load torch for --help."""

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
    valid: Annotated[
        list[str],
        typer.Option(
            metavar="FILE",
            help="Openings for the held-out acceptance; repeatable.",
            rich_help_panel=_DATA,
        ),
    ] = field(default_factory=list)
    cache_features: Annotated[
        bool,
        typer.Option(
            "--cache-features/--stream-features",
            help="Keep what the target says about each document on disk, for several passes.",
            rich_help_panel=_DATA,
        ),
    ] = False
    seq_len: Annotated[int, _number("Longest piece of a document, in tokens.", _SCHEDULE)] = 1024
    long_every: Annotated[
        int,
        _number(
            "Every so many steps, documents joined to --max-positions; 0: never.", _SCHEDULE, 0
        ),
    ] = 10
    max_positions: Annotated[int, _number("Longest of joined documents.", _SCHEDULE)] = 1024
    batch_tokens: Annotated[int, _number("Tokens a step.", _SCHEDULE)] = 4096
    micro_tokens: Annotated[int, _number("Tokens of one forward pass.", _SCHEDULE)] = 2048
    steps: Annotated[int, _number("Steps in all.", _SCHEDULE)] = 1000
    warmup: Annotated[int, _number("Steps of rising learning rate.", _SCHEDULE)] = 50
    lr: Annotated[
        float, typer.Option(help="Peak rate of Muon (matrices).", rich_help_panel=_SCHEDULE)
    ] = 0.005
    adam_lr: Annotated[
        float, typer.Option(help="Peak rate of AdamW (the rest).", rich_help_panel=_SCHEDULE)
    ] = 0.003
    weight_decay: Annotated[float, _number("Weight decay of matrices.", _SCHEDULE, 0)] = 0.05
    argmax_weight: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of the loss against the target's likeliest token; more serves greedy "
            "decoding, less sampling.",
            rich_help_panel=_SCHEDULE,
        ),
    ] = 0.3
    seed: Annotated[int, _number("Of weights and batches.", _SCHEDULE, 0)] = 0
    dtype: Annotated[
        str,
        typer.Option(
            help="bfloat16, float32 or auto; the optimizer's weights are float32 in any case.",
            rich_help_panel=_SCHEDULE,
        ),
    ] = "bfloat16"
    draft_length: Annotated[int, _number("Tokens of a draft.", _HELD_OUT)] = 4
    held_out: Annotated[int, _number("Openings of each --valid file.", _HELD_OUT)] = 8
    held_out_tokens: Annotated[int, _number("Tokens written from each.", _HELD_OUT, 2)] = 96


@dataclass(frozen=True)
class RunningOptions:
    """How a run is carried out; nothing here changes its result, up to rounding."""

    out: Annotated[Path, typer.Option(help="Folder of the run; what was trained goes below it.")]
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto"
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="torch.compile (needs a C++ compiler).")
    ] = False
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Processor threads; 1 beside other work.", show_default=False),
    ] = None
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            help="On a processor: so many train together, --threads each. One a core is fastest; "
            "each holds the target.",
        ),
    ] = 1
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between measurements.")] = 100
    save_seconds: Annotated[float, typer.Option(min=0, help="Between checkpoints.")] = 300.0
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False


def _size(text: str) -> Any:
    return _number(f"{text}; 0: the target's.", _SHAPE, 0)


@dataclass(frozen=True)
class Eagle3Options:
    """Fields of EagleTrainConfig for version 3."""

    init: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="Go on from this head, in its shape.", rich_help_panel=_SHAPE
        ),
    ] = ""
    ttt_steps: Annotated[
        int, _number("Drafting steps that training unrolls (training-time test).", _SHAPE)
    ] = 4
    step_decay: Annotated[float, _number("Weight of each further step.", _SHAPE, 0)] = 0.8
    feature_layers: Annotated[
        str,
        typer.Option(
            metavar="N,N,N",
            help="Target layers whose inputs are read; default: 2, half of them, all but 3.",
            rich_help_panel=_SHAPE,
        ),
    ] = ""
    draft_vocab_size: Annotated[
        int, _number("Most frequent tokens that it can draft; 0: all.", _SHAPE, 0)
    ] = 16000
    heads: Annotated[int, _size("Attention heads")] = 0
    kv_heads: Annotated[int, _size("Key and value heads")] = 0
    head_dim: Annotated[int, _size("Width of a head")] = 0
    ffn_size: Annotated[int, _size("Width of the feed-forward part")] = 0


@dataclass(frozen=True)
class EagleOptions:
    """Fields of EagleTrainConfig for version 1."""

    init: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="Go on from this head, in its shape.", rich_help_panel=_SHAPE
        ),
    ] = ""
    ttt_steps: Annotated[
        int, _number("Drafting steps that training unrolls; the paper has 1.", _SHAPE)
    ] = 1
    step_decay: Annotated[float, _number("Weight of each further step.", _SHAPE, 0)] = 0.8
    feature_weight: Annotated[float, _number("Weight of the feature loss.", _SHAPE, 0)] = 1.0
    token_weight: Annotated[float, _number("Weight of the token loss.", _SHAPE, 0)] = 0.1
    heads: Annotated[int, _size("Attention heads")] = 0
    kv_heads: Annotated[int, _size("Key and value heads")] = 0
    head_dim: Annotated[int, _size("Width of a head")] = 0
    ffn_size: Annotated[int, _size("Width of the feed-forward part")] = 0


def values_of(*options: Any) -> dict[str, Any]:
    """The fields of option groups as keyword arguments of a training config."""
    values = {key: value for group in options for key, value in vars(group).items()}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def parse_layers(text: str) -> tuple[int, ...]:
    """``2,6,11`` as numbers; nothing is ()."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(
            f"--feature-layers {text!r}: write numbers, as in 2,6,11"
        ) from None


def run_heads(
    new_trainer: Callable[[], HeadTrainer], running: RunningOptions, what: str, spec: str
) -> None:
    """Train to the end or to Ctrl-C, and write head and card.

    ``what`` names the kind of head in the card, ``spec`` is its word in ``--draft``.
    """
    console = Console(stderr=True)
    quiet_libraries()
    set_threads(running.threads)
    from paceline.train.acceptance import AcceptanceCounts, total
    from paceline.train.head_card import write_head_card
    from paceline.train.parallel import together

    with showing(console):
        trainer = new_trainer()
        with together(trainer, running.processes, running.threads):
            folder = train_to_end(trainer, running.out, running.eval_every, running.save_seconds)
        with stage("writing the model card"):
            command = shlex.join(["paceline", *sys.argv[1:]])
            card = write_head_card(trainer, what, spec, command)
    last = trainer.history[-1] if trainer.history else {"loss": None, "acceptance": {}}
    if not running.as_json:
        console.print(f"head written to {folder}; use it with --draft {spec}:{folder}")
        return
    parts = [AcceptanceCounts.from_dict(values) for values in last["acceptance"].values()]
    print_json(
        {
            "head": str(folder),
            "card": str(card),
            "steps": trainer.step,
            "parameters": sum(parameter.numel() for parameter in trainer.head.parameters()),
            "loss": last["loss"],
            "mean_accepted_length": total(parts).mean_accepted_length if parts else None,
            "acceptance": last["acceptance"],
            "config": asdict(trainer.config),
        }
    )


@expand
def eagle3(
    run: HeadOptions, text: TextOptions, head: Eagle3Options, running: RunningOptions
) -> None:
    """Train an EAGLE-3 head: three layers' features, unrolled as in drafting.

    Run the same command again to resume from OUT/checkpoint.pt.
    """
    values = values_of(run, text, head) | {"feature_layers": parse_layers(head.feature_layers)}
    _train_eagle(3, values, running)


@expand
def eagle(run: HeadOptions, text: TextOptions, head: EagleOptions, running: RunningOptions) -> None:
    """Train an EAGLE head (also for EAGLE-2): continues the target's last features.

    Run the same command again to resume from OUT/checkpoint.pt.
    """
    _train_eagle(1, values_of(run, text, head), running)


def _train_eagle(version: int, values: dict[str, Any], running: RunningOptions) -> None:
    def new_trainer() -> HeadTrainer:
        from paceline.train.eagle import EagleTrainConfig, EagleTrainer

        config = EagleTrainConfig(version=version, **values)
        return EagleTrainer(config, running.out, running.device, running.compiled)

    names = {1: ("An EAGLE head", "eagle2"), 3: ("An EAGLE-3 head", "eagle3")}
    run_heads(new_trainer, running, *names[version])
