"""``paceline train``: language models, drafts and heads, from their configurations."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from paceline.cli.options import expand, load_llm, set_threads
from paceline.cli.output import FORCE, print_json, quiet_libraries, replace_anything
from paceline.cli.progress import showing
from paceline.core.stages import info, stage
from paceline.files import LongRecord
from paceline.settings import LoadSettings, changed, setting
from paceline.train.configs import (
    AnswerConfig,
    DraftConfig,
    Eagle1TrainConfig,
    EagleTrainConfig,
    LMConfig,
    MedusaTrainConfig,
    PromptSelection,
    TrainConfig,
)

if TYPE_CHECKING:
    from paceline import LLM, SamplingParams
    from paceline.request.request import Request
    from paceline.train.acceptance import AcceptanceCounts
    from paceline.train.answers import WrittenAnswer
    from paceline.train.trainer import Progress, Trainer


class _Decoder:
    """The engine, fed with prompts while it decodes."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._params = llm, params
        self._open: list[Request] = []

    def add(self, number: int, token_ids: list[int]) -> None:
        requests = self._llm.prepare(token_ids, self._params, number, streams=False)
        self._llm.enqueue(requests)
        self._open.extend(requests)

    def step(self) -> list[WrittenAnswer]:
        from paceline.train.answers import WrittenAnswer

        self._llm.step()
        problems = []
        for request in self._open:
            if request.completion is not None:
                done = request.completion
                problems.append(
                    WrittenAnswer(request.number, list(done.token_ids), done.finish_reason)
                )
        if problems:
            self._llm.release([r for r in self._open if r.completion is not None])
            self._open = [r for r in self._open if r.completion is None]
        return problems


@dataclass(frozen=True)
class SampleOptions:
    """What writes what, from what."""

    model: str = setting(MISSING, "The model that writes.")
    data: tuple[str, ...] = setting(
        MISSING,
        "Conversations, whose last question is answered (messages, conversations, turns), or text, "
        "whose beginning is continued; repeatable.",
        panel="Prompts",
        metavar="FILE[=WEIGHT]",
    )
    out: Path = setting(MISSING, "JSONL file to write.")
    batch: int = setting(32, "Sequences at once.", low=1, panel="Engine")


@expand
def sample(
    run: SampleOptions, prompts: PromptSelection, answers: AnswerConfig, engine: LoadSettings
) -> None:
    """Let a model answer prompts or continue texts, as data to train its drafts on.

    Run the same command again to go on where it stopped: until all is written, the records lie in
    OUT.partial.
    """
    console, out = Console(stderr=True), run.out
    quiet_libraries()
    if out.is_file():
        refusal = f"{out} is there already; delete it to write it anew"
        console.print(refusal, highlight=False, soft_wrap=True)
        return
    from paceline import SamplingParams
    from paceline.train.answers import AnswerWriter, jobs_of
    from paceline.train.records import Source

    sources = [Source.parse(spec) for spec in run.data]
    params = SamplingParams(**asdict(answers))
    key = json.dumps({"model": run.model, "data": run.data, **asdict(prompts), **asdict(answers)})
    with showing(console), LongRecord(out, "the records", key) as lines:
        if lines.lines:
            info(f"going on after {lines.lines:,} records in {lines.partial}")
        seed = prompts.seed + lines.lines
        llm = load_llm(engine, run.model, None, max_batch_size=run.batch, seed=seed)
        longest = min(prompts.max_prompt, llm.max_model_len - 1)
        jobs = jobs_of(sources, llm.tokenizer, replace(prompts, max_prompt=longest))
        decoder = _Decoder(llm, params)
        writer = AnswerWriter(decoder, llm.tokenizer, longest, answers.temperature, lines.add)
        writer.write(jobs, run.batch, lines.kept())
        failed = f" ({writer.failed} answers failed)" if writer.failed else ""
        info(f"{lines.lines:,} records in {out}{failed}")


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
                info(f"step {progress.step}: {_measured(progress)}")

        yield show


def _mean(parts: Iterable[AcceptanceCounts]) -> str:
    from paceline.train.acceptance import total

    return f"{total(parts).mean_accepted_length:.2f}"


def _measured(progress: Progress) -> str:
    """What was measured at a step, in one line."""
    acceptance = progress.acceptance
    if acceptance:
        parts = ", ".join(f"{name} {_mean([part])}" for name, part in acceptance.items())
        return f"{_mean(acceptance.values())} tokens per target step ({parts})"
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
        info(f"note: {trainer.note}")
    if trainer.step:
        info(f"resuming at step {trainer.step} of {trainer.config.steps}")
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
    force: bool = setting(False, FORCE)
    as_json: bool = setting(False, "End with one JSON line.", flags=("--json",))


@dataclass(frozen=True)
class LongRunningOptions(RunningOptions):
    """Of a whole model, which learns more slowly than a draft."""

    eval_every: int = changed(RunningOptions, "eval_every", 250)


def _train(kind: Callable[..., Trainer], config: TrainConfig, running: RunningOptions) -> None:
    """Train to the end or to Ctrl-C, and write the result and its card."""
    console = Console(stderr=True)
    replace_anything(running.force)
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
