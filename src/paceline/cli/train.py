"""``paceline train``: trains draft models and heads; ``paceline train sample``: a model answers
prompts, as training data for its drafts. Each answer is written to the file at once, so an
interruption only loses the answers that were being generated. ``paceline datastore``: builds the
files that ``--draft datastore:FILE`` drafts from.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, replace
from importlib import import_module
from inspect import getdoc
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline import SamplingParams
from paceline.cli.options import Command, TargetName, expand, load_llm
from paceline.cli.output import WriteOptions, print_json
from paceline.core.libraries import set_threads
from paceline.core.stages import info, stage
from paceline.errors import DataError
from paceline.files import FileStamp, LongRecord, check_new
from paceline.settings import EngineSettings, LoadSettings, changed, setting
from paceline.train import configs
from paceline.train.configs import AnswerConfig, PromptSelection, TrainConfig
from paceline.train.records import Source

if TYPE_CHECKING:
    import numpy as np

    from paceline.model.tokenizer import Tokenizer
    from paceline.train.trainer import Progress, Trainer

_STOP_SIGNALS = signal.SIGINT, signal.SIGTERM


@expand
def sample(
    *,
    model: str = setting(MISSING, "Model that writes the answers."),
    data: tuple[str, ...] = setting(
        MISSING,
        "File of conversations, whose last question is answered, or of texts, which are continued.",
        panel="Prompts",
        metavar="FILE[=WEIGHT]",
    ),
    out: Path = setting(MISSING, "JSONL file to write."),
    max_batch_size: int = changed(EngineSettings, "max_batch_size", 32, shown=None),
    prompts: PromptSelection,
    answers: AnswerConfig,
    engine: LoadSettings,
) -> None:
    """Let a model answer prompts or continue texts, to train its drafts on the results.

    Run the same command again to resume after an interruption. Until everything is written, the
    records are in OUT.partial.
    """
    if out.is_file():
        info(f"{out} exists already; delete it to write it again")
        return
    from paceline.train.prompts import AnswerWriter, load_prompts

    sources = [Source.parse(spec) for spec in data]
    params = SamplingParams(**asdict(answers))
    files = [str(FileStamp.of(source.path)) for source in sources]
    asked = {"model": model, "data": data, "files": files}
    key = json.dumps({**asked, **asdict(prompts), **asdict(answers)})
    with LongRecord(out, "the records", key) as lines:
        if lines.lines:
            info(f"resuming after {lines.lines:,} records in {lines.partial}")
        seed = prompts.seed + lines.lines
        llm = load_llm(engine, model, None, max_batch_size=max_batch_size, seed=seed)
        longest = min(prompts.max_prompt_len, llm.max_model_len - 1)
        chosen = load_prompts(sources, llm.tokenizer, replace(prompts, max_prompt_len=longest))
        writer = AnswerWriter(llm, params, lines.add)
        writer.write(chosen, max_batch_size, lines.kept())
        failed = f" ({writer.failed} answers failed)" if writer.failed else ""
        info(f"{lines.lines:,} records in {out}{failed}")


app = typer.Typer(help="Train draft models and heads.", no_args_is_help=True)


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """In the block, Ctrl-C and SIGTERM only set a flag, which the yielded function returns. A
    second signal raises KeyboardInterrupt at once."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt("interrupted; the last saved checkpoint is kept")
        interrupted = True
        print("stopping after this step (press Ctrl-C again to stop at once)", file=sys.stderr)

    handlers = {number: signal.signal(number, interrupt) for number in _STOP_SIGNALS}
    try:
        yield lambda: interrupted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def train_to_end(trainer: Trainer, running: RunningOptions) -> Path:
    """Train to the last step; returns the result's folder. Ctrl-C saves a checkpoint and raises."""
    from paceline.train.acceptance import total

    first, last = trainer.step, trainer.config.steps
    if first:
        info(f"resuming at step {first} of {last}")
    acceptance = ""
    what = f"training from step {first}" if first else "training"
    steps = stage(what, max(0, last - first), "steps")
    with deferred_interrupts() as interrupted, steps as bar:

        def on_progress(progress: Progress) -> None:
            nonlocal acceptance
            if parts := progress.acceptance:
                length = total(parts.values()).mean_accepted_length
                acceptance = f"{length:.2f} tokens per target step"
                files = (f"{name} {part.mean_accepted_length:.2f}" for name, part in parts.items())
                info(f"step {progress.step}: {acceptance} ({', '.join(files)})")
            speed = f"{progress.tokens_per_second:,.0f} tokens/s"
            figures = f"loss {progress.loss:.3f}", speed, acceptance
            bar.advance(1, ", ".join(filter(None, figures)))
            if interrupted():
                trainer.save_checkpoint()
                raise KeyboardInterrupt(
                    f"interrupted at step {trainer.step}; checkpoint saved in {running.out}: run "
                    f"the same command again{', without --force,' * running.force} to resume"
                )

        return trainer.run(on_progress, running.eval_every, running.save_seconds)


@dataclass(frozen=True)
class RunningOptions(WriteOptions):
    """How a training runs. These options do not change its result, except for rounding."""

    out: Path = setting(MISSING, "Folder of the run; the trained model is written below it.")
    device: str = setting("auto", "Device to train on: auto, cpu, cuda ...")
    compiled: bool = setting(
        False, "Use torch.compile (needs a C++ compiler).", flags=("--compile/--no-compile",)
    )
    threads: int | None = setting(None, "CPU threads; use 1 beside other work.", low=1, shown="")
    eval_every: int = setting(100, "Steps between measurements of held-out acceptance.", low=1)
    save_seconds: float = setting(300.0, "Seconds between checkpoints.", low=0)


def train(config: TrainConfig, running: RunningOptions, program: str = "paceline") -> None:
    """Train, then write the result and its model card, which has the command line. ``program`` is
    its first word. Ctrl-C saves a checkpoint and raises KeyboardInterrupt."""
    set_threads(running.threads)
    from paceline.train.acceptance import total
    from paceline.train.trainer import counts_of, write_card

    module, _, name = config.trainer.partition(":")
    trainer_class = getattr(import_module(module), name)
    if running.force or not (running.out / "checkpoint.pt").exists():
        result = running.out / trainer_class.result
        check_new(result, f"the {trainer_class.noun}", running.force, folder=True)
    trainer: Trainer = trainer_class(
        config, running.out, running.device, running.compiled, running.force
    )
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
    """Add the command ``paceline train NAME``."""

    def command(config: Any, running: Any) -> None:
        train(config, running)

    command.__annotations__ = {"config": config, "running": RunningOptions}
    command.__doc__ = (
        f"{getdoc(config)}\n\nRun the same command again to resume from OUT/checkpoint.pt."
    )
    app.command(name, cls=Command)(expand(command))


_add("draft", configs.DraftConfig)
_add("eagle3", configs.EagleTrainConfig)
_add("dflash", configs.DFlashTrainConfig)
_add("dspark", configs.DSparkTrainConfig)
_add("medusa", configs.MedusaTrainConfig)
_add("eagle", configs.Eagle1TrainConfig)
app.command("sample", cls=Command)(sample)


# -- datastores ------------------------------------------------------------------------------------

datastore = typer.Typer(help="Datastores for drafting by retrieval.", no_args_is_help=True)
_TEXT_SUFFIXES = (".txt", ".text", ".md")


@datastore.callback()
def root() -> None:
    """Makes ``build`` a subcommand, although it is the only one."""


@datastore.command("build", cls=Command)
@expand
def build(
    target: TargetName,
    output: WriteOptions,
    files: tuple[Path, ...] = setting(
        MISSING, "JSONL(.gz) files in the format of `train`, or plain text files.", flags=("FILES",)
    ),
    out: Path = setting(MISSING, "File to write."),
    from_answers: bool = setting(
        False, "Take only the assistant's answers; the model's own (`train sample`) work best."
    ),
    min_count: int = setting(2, "Keep continuations that occur at least this often.", low=1),
    exclude_licenses: tuple[str, ...] = setting(
        (), "Leave out records whose license contains this text.", flags=("--exclude-license",)
    ),
) -> None:
    """Write a datastore of texts, in a model's tokens, for `--draft datastore:FILE`."""
    import numpy as np

    from paceline.draft.datastore import write_datastore
    from paceline.lab.bench.prompts import read_records
    from paceline.model.tokenizer import load_tokenizer

    check_new(out, "the datastore", output.force)
    tokenizer = load_tokenizer(target.model)
    texts: list[np.ndarray] = []
    for file in files:
        if file.suffix.lower() not in _TEXT_SUFFIXES:
            texts += _read_records(file, tokenizer, from_answers, exclude_licenses)
        elif from_answers:
            raise DataError(f"{file} is plain text, which has no answers; give JSONL records")
        else:
            for _, record in read_records(file):
                text = tokenizer.backend_tokenizer.encode(record["text"], add_special_tokens=False)
                texts.append(np.array(text.ids, np.int64))
    with stage("sorting contexts"):
        tokens, contexts = write_datastore(out, texts, tokenizer, min_count)
    size = out.stat().st_size
    if output.as_json:
        print_json({"file": str(out), "tokens": tokens, "contexts": contexts, "bytes": size})
        return
    info(f"{tokens:,} tokens, {contexts:,} contexts, {size / 1e6:,.1f} MB in {out}")
    info(f"use it with --draft datastore:{out} or --draft hybrid:suffix+ngram+datastore:{out}")


def _read_records(
    file: Path, tokenizer: Tokenizer, answers: bool, exclude_licenses: tuple[str, ...]
) -> Iterator[np.ndarray]:
    """The token ids of a file's records, or of their answers. Each answer includes the tokens
    before it that a lookup of its first token needs."""
    import numpy as np

    from paceline.draft.datastore import MATCH
    from paceline.train.data import encode_stream

    stream = encode_stream(file, tokenizer, exclude_licenses, "assistant" if answers else "all")
    kept = np.convolve(stream.loss_mask, np.ones(MATCH + 1))[MATCH:] > 0
    cuts = np.union1d(stream.starts, np.flatnonzero(np.diff(kept)) + 1)
    for start, end in pairwise([0, *cuts, len(kept)]):
        if kept[start:end].any():
            yield stream.ids[start:end]
