"""``paceline bench --suite``: the tables that the public benchmarks publish."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.measuring import PromptOptions, ReportOptions, partial_results
from paceline.cli.options import ModelOptions
from paceline.cli.progress import progress_bar
from paceline.errors import ConfigError, PromptError
from paceline.settings import under

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.cli.measuring import BenchOptions, Interruption
    from paceline.lab.bench.engines import Starter
    from paceline.lab.bench.methods import Method
    from paceline.lab.bench.result import BenchResult
    from paceline.lab.bench.runner import Sweep
    from paceline.llm import LLM

_prompts = under("Prompts")
_MAX_TOKENS = 1024  # Spec-Bench's own


@dataclass(frozen=True)
class SuiteOptions:
    """Which public benchmark is reproduced, if any."""

    suite: str | None = _prompts(
        None,
        "spec-bench, mt-bench, gsm8k or humaneval: decode PATH as that benchmark does, turn by "
        "turn to the end of each answer, and print its table.",
    )
    path: str | None = _prompts(None, "The suite's file of questions.", flags=("PATH",), shown="")

    def source(self, prompts: str | None) -> str:
        """The suite's file. Raises ConfigError."""
        if self.path is not None and prompts is not None:
            raise ConfigError(f"both {self.path} and --prompts {prompts}: name one file")
        chosen = self.path or prompts
        if chosen is None:
            raise ConfigError(
                f"--suite {self.suite} needs the file of its questions: "
                f"paceline bench --suite {self.suite} PATH"
            )
        return chosen

    def check_alone(self) -> None:
        """Without a suite there is nothing that a path could mean. Raises ConfigError."""
        if self.path is not None:
            raise ConfigError(
                f"what is {self.path}? Its prompts are measured with --prompts {self.path}, "
                "a public benchmark with --suite NAME"
            )


def _refuse_others(context: typer.Context, options: BenchOptions, suite: str) -> None:
    """Raises ConfigError for options that a suite does not have."""
    if options.concurrencies() != [1]:
        raise ConfigError(
            f"--suite {suite} has batch 1, as published; leave out --concurrency, "
            "or measure the file with --prompts"
        )
    if _given(context, "go_on") or _given(context, "state"):
        raise ConfigError("a suite is measured whole: leave out --continue and --state")
    if options.price is not None:
        raise ConfigError("--price is not for --suite: its tables have no costs; leave it out")


def run_suite(
    context: typer.Context,
    engine: ModelOptions,
    wanted: PromptOptions,
    options: BenchOptions,
    chosen: SuiteOptions,
    output: ReportOptions,
    methods: Sequence[Method],
    rule: str,
) -> None:
    """Measure, show the tables, and end as ``bench`` does. Raises PacelineError."""
    from paceline.lab.bench import conversations as talks
    from paceline.lab.bench.result import BenchResult
    from paceline.lab.bench.runner import HeatRecord
    from paceline.lab.bench.suite_tables import SuiteResult, suite_report, task_figures
    from paceline.lab.budget import Budget

    assert chosen.suite is not None, "the caller looked"
    suite, source = talks.suite_of(chosen.suite), chosen.source(wanted.prompts)
    _refuse_others(context, options, suite.name)
    how = _manner(context, options, rule)
    questions = talks.load_questions(suite, source, wanted.category, wanted.per_category)
    llm = replace(engine, max_batch_size=1, kv_cache_memory=None).open(None)
    kept, left_out = talks.fitting(questions, llm)
    if not kept:
        raise PromptError(
            f"all {len(left_out)} questions are too long: {llm.target.name} sees "
            f"{llm.max_model_len} tokens with the answer; name a model with a longer context"
        )
    starter, record, complete = starter_of(llm, engine, rule), HeatRecord(), False
    runs = how.rounds * len(how.temperatures) * len(kept) * len(methods)
    with (
        partial_results() as interrupted,
        progress_bar("warming up", runs) as advance,
    ):
        budget = Budget(_seconds(context))
        complete = talks.answer_all(llm, methods, starter.open, kept, how, record, advance, budget)
    if not record.heats:
        interrupted.finish()
        raise ConfigError("the time was up before all methods had answered a question; give more")
    tasks = list(dict.fromkeys(question.task for question in kept))
    header = {"tasks": tasks, "questions": len(kept), "batch": 1, "bonus_token_counted": True}
    settings = settings_of(engine, source, how, rule, **header)
    base = replace(
        BenchResult.of(methods, settings, llm, record, talks.asked_alike(record), rows=()),
        left_out=[question.name for question in left_out],
        interrupted=bool(interrupted),
        unequal=starter.unequal,
    )
    cut = sum(dialogue.cut for heat in record.heats for dialogue in talks.dialogues(heat).values())
    result = SuiteResult(suite, base, task_figures(suite, record), cut, complete)
    output.emit(result.record(), suite_report(result))
    finish(base, options.allow_idle, interrupted)


def finish(result: BenchResult, allow_idle: bool, interrupted: Interruption) -> None:
    """Say what makes the run a failure, and end as one; or as interrupted."""
    complaints = result.complaints(allow_idle)
    for line in complaints:
        print(f"error: {line}", file=sys.stderr)
    interrupted.finish()
    if complaints:
        raise typer.Exit(1)


def _manner(context: typer.Context, options: BenchOptions, rule: str) -> Sweep:
    """As published where the command line leaves it open: 1024 tokens, one round."""
    from paceline.lab.bench.runner import Settings, Sweep

    tokens = options.max_tokens if _given(context, "max_tokens") else _MAX_TOKENS
    rounds = options.rounds if _given(context, "rounds") else 1
    settings = Settings(tokens, ignore_eos=False, seed=options.seed_for(rule))
    return Sweep([1], options.temperatures(), rounds, settings)


def _given(context: typer.Context, option: str) -> bool:
    """Whether the command line has it, though it has a default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _seconds(context: typer.Context) -> float | None:
    """A suite is measured whole, however long that takes, unless a time was asked for."""
    return float(context.params["seconds"]) if _given(context, "seconds") else None


def starter_of(llm: LLM, engine: ModelOptions, rule: str) -> Starter:
    """What opens the methods over a loaded model."""
    from paceline.lab.bench.engines import Starter

    memory = engine.kv_cache_memory
    return Starter(llm, engine.model, rule=rule, lossy=engine.lossy, kv_cache_memory=memory)


def settings_of(
    engine: ModelOptions, source: str, sweep: Sweep, rule: str, **more: Any
) -> dict[str, Any]:
    """What was measured, and how, for the record; ``more`` is of one kind of benchmark."""
    return {
        "model": engine.model,
        "source": source,
        **more,
        "max_tokens": sweep.settings.max_tokens,
        "rounds": sweep.rounds,
        "concurrency": list(sweep.concurrencies),
        "temperature": list(sweep.temperatures),
        "ignore_eos": sweep.settings.ignore_eos,
        "seed": sweep.settings.seed,
        "rule": rule,
        "lossy": engine.lossy,
    }
