"""``paceline train lm``: a small language model from text, or a draft distilled from a target."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.cli.interrupts import deferred_interrupts
from paceline.cli.options import expand, quiet_libraries, set_threads
from paceline.cli.output import print_json
from paceline.cli.train_draft import draft
from paceline.cli.train_heads import eagle, eagle3
from paceline.cli.train_medusa import medusa
from paceline.files import LongRecord

if TYPE_CHECKING:
    from paceline.train.lm import LMConfig, LMTrainer
    from paceline.train.lm import Progress as Report

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
            help="JSONL(.gz) with a 'text' field, and its share; repeatable.",
            rich_help_panel=_DATA,
        ),
    ]
    valid: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="Validation data; repeatable.", rich_help_panel=_DATA),
    ] = field(default_factory=list)
    exclude_licenses: Annotated[
        list[str],
        typer.Option(
            "--exclude-license",
            help="Leave out records whose license contains this; repeatable.",
            rich_help_panel=_DATA,
        ),
    ] = field(default_factory=lambda: ["CC-BY-SA"])
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

    def config(self) -> LMConfig:
        from paceline.train.lm import LMConfig

        return LMConfig.from_dict({item.name: getattr(self, item.name) for item in fields(self)})


@contextmanager
def _progress_bar(trainer: LMTrainer, console: Console) -> Iterator[Callable[[Report], None]]:
    """A function that shows a step's report; validation losses get lines of their own."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(
            "train", total=trainer.config.steps, completed=trainer.step, loss="-", speed="-"
        )

        def show(report: Report) -> None:
            bar.update(
                task,
                completed=report.step,
                loss=f"{report.loss:.3f}",
                speed=f"{report.tokens_per_second:.0f}",
            )
            if report.validation:
                losses = "  ".join(f"{k} {v:.3f}" for k, v in report.validation.items())
                bar.console.print(f"step {report.step}: validation {losses}", highlight=False)

        yield show


@app.callback()
def group() -> None:
    """Train models for Paceline."""


@app.command("lm")
@expand
def lm(
    run: RunOptions,
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

    trainer = LMTrainer(run.config(), out, device, compiled)
    if trainer.note:
        console.print(f"note: {trainer.note}", highlight=False, soft_wrap=True)
    if trainer.step:
        console.print(f"resuming at step {trainer.step} of {trainer.config.steps}")
    with deferred_interrupts() as interrupts, _progress_bar(trainer, console) as show:

        def report(progress: Report) -> None:
            show(progress)
            if interrupts.pending:
                trainer.save_checkpoint()
                raise KeyboardInterrupt(
                    f"interrupted at step {trainer.step}; checkpoint saved in {out}: "
                    "run the same command again to resume"
                )

        folder = trainer.run(report, eval_every, save_seconds)
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


@app.command("sample")
def sample(
    model: Annotated[str, typer.Option(help="The model that writes.")],
    data: Annotated[
        list[str], typer.Option(metavar="FILE[=WEIGHT]", help="Records to open with; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="JSONL file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Records to write.")] = 1000,
    longest: Annotated[int, typer.Option(min=12, help="Longest opening, in tokens.")] = 96,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each.")] = 160,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end of a text.")
    ] = False,
    exclude_licenses: Annotated[
        list[str] | None,
        typer.Option("--exclude-license", help="Leave out such records; repeatable."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of choice and text.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Processor threads.", show_default=False)
    ] = None,
) -> None:
    """Let a model continue the beginnings of a corpus, as data to distil a draft on."""
    console = Console(stderr=True)
    quiet_libraries()
    set_threads(threads)
    from paceline import LLM, SamplingParams
    from paceline.train.data import Source
    from paceline.train.sample import continuations, openings

    sources = [Source.parse(spec) for spec in data]
    llm = LLM(model, device=device, max_batch_size=batch, seed=seed)
    excluded = ["CC-BY-SA"] if exclude_licenses is None else exclude_licenses
    starts = openings(sources, llm.tokenizer, count, seed, excluded, longest=longest)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        return [completion.token_ids for completion in llm.generate(list(prompts), params)]

    columns = (TextColumn("records"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    # Whole groups, so that the batch is full for most of the time and little is lost on Ctrl-C.
    with Progress(*columns, console=console) as bar, LongRecord(out, "the records") as lines:
        task = bar.add_task("sample", total=len(starts))
        for record in continuations(generate, llm.tokenizer, starts, 4 * batch):
            lines.add(json.dumps(record, ensure_ascii=False))
            bar.advance(task)
    console.print(f"{len(starts)} records written to {out}", highlight=False)
