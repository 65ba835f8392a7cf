"""``paceline bench``, ``tune`` and ``profile``: how fast drafts are, and what takes the time."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from paceline.cli.options import ModelOptions, TargetName, expand, load_llm
from paceline.cli.output import NOT_ENOUGH, ReportOptions, RunOptions, measuring
from paceline.core.stages import info, stage
from paceline.errors import debugging
from paceline.files import check_new
from paceline.lab.bench import BenchOptions, PromptOptions
from paceline.lab.budget import Budget
from paceline.lab.tune import TuneOptions
from paceline.model.names import DEFAULT_DRAFT, default_drafts
from paceline.settings import EngineSettings, LoadSettings, changed, explicit, setting, under

if TYPE_CHECKING:
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.lab.bench.runner import JobResult, Method, Sweep

_PER_CATEGORY = 3
_MIN_BATCH = 8  # smallest batch size of the engines of profile


@dataclass(frozen=True)
class MeasuredModel(ModelOptions):
    """Model options without --max-batch-size: the concurrency determines the batch size."""

    max_batch_size: int | None = changed(
        EngineSettings, "max_batch_size", None, except_in=("command",)
    )


@dataclass(frozen=True)
class BenchedModel(MeasuredModel):
    """Model options in which --draft-length may have several values."""

    draft_length: int | str | tuple[int, ...] | None = changed(  # type: ignore[assignment]
        EngineSettings,
        "draft_length",
        None,
        help="Draft tokens per step; auto adapts the number while decoding. "
        "Several, such as 1,2,4,8, are compared.",
        kind="lengths",
        low=1,
    )


@dataclass(frozen=True)
class BenchRun(RunOptions):
    """The time budget, by default two minutes."""

    seconds: float = changed(RunOptions, "seconds", 120.0)
    details: bool = under("Output")(
        False, "Also print latencies, categories, acceptance by position and texts."
    )


@expand
def bench(engine: BenchedModel, source: PromptOptions, options: BenchOptions, run: BenchRun) -> int:
    """Compare plain decoding with drafts: speed, acceptance, text.

    Exits with 1 if a text on the native kernels differs from plain decoding's, with 3 if the time
    was too short to measure anything.
    """
    budget = Budget(run.seconds or None)
    with stage("starting"):
        methods, sweep, chosen, settings = _checked(engine, source, options)
        from paceline.lab.bench.engines import EngineFactory
        from paceline.lab.bench.pages import report_of
        from paceline.lab.bench.prompts import fit, tokens_needed
        from paceline.lab.bench.result import BenchResult
        from paceline.lab.bench.runner import spending_of

    # This LLM only shares its weights, so its cache is small; each method gets its own cache.
    llm = replace(engine, draft_length=None, max_batch_size=1, kv_cache_memory=None).open(None)
    fitting, left_out = fit(chosen, llm, sweep.max_tokens)
    prompts = [(prompt.category, ids) for prompt, ids in fitting]
    needed = tokens_needed(llm, (ids for _, ids in prompts), sweep.max_tokens)
    given = explicit(vars(engine) | {"draft_length": None}, "with_draft")
    factory = EngineFactory(llm, **given | {"max_model_len": needed})
    record: list[JobResult] = []
    runs = sweep.rounds * sweep.wanted(prompts) * len(methods)
    with measuring("measuring", budget, runs) as interrupted:
        sweep.run(prompts, methods, factory.create, record, interrupted.advance, budget)
    spending = spending_of(record, sweep, prompts, budget)
    if not record:
        if not interrupted.code:
            info(
                f"error: {budget.seconds:g} s were not enough to measure anything, because every "
                "method must be loaded and answer a prompt; give more --seconds or fewer methods"
            )
        return interrupted.code or NOT_ENOUGH
    with stage("comparing the texts"):
        result = replace(
            BenchResult.of(methods, settings, llm, record),
            left_out=left_out,
            interrupted=bool(interrupted.code),
            spending=spending,
        )
    run.emit(result.record(), report_of(result), run.details)
    failures = result.failures()
    for line in failures:
        info(f"error: {line}")
    return interrupted.code or int(bool(failures))


def _checked(
    engine: ModelOptions, source: PromptOptions, options: BenchOptions
) -> tuple[list[Method], Sweep, list[BenchPrompt], dict[str, Any]]:
    """Check the command line before a model is loaded; the settings returned go into the record of
    the result. Raises ConfigError and DataError."""
    from paceline.lab.bench.engines import parse_methods

    length, rule = engine.length_and_rule
    draft = engine.resolved_draft
    sweep = options.sweep(rule)
    others = default_drafts(engine.model)[1:] if draft == DEFAULT_DRAFT else ()
    usual = ["plain", *(["draft"] if draft is not None else []), *(others or ["ngram"])]
    methods = parse_methods(options.method or usual, draft, length)
    prompts = source.load(_PER_CATEGORY)
    settings = {
        "model": engine.model,
        **{name: getattr(engine, name) for name in ("dtype", "quantize", "draft_quantize")},
        "source": source.prompts or "the shipped set",
        "categories": list(dict.fromkeys(prompt.category for prompt in prompts)),
        "prompts": len(prompts),
        **vars(sweep),
        "rule": rule,
    }
    return methods, sweep, prompts, settings


_model = under("Model")
_TUNING_PROMPTS = 8


@dataclass(frozen=True)
class TargetOptions(LoadSettings, TargetName):
    """The target and the drafters to try."""

    draft: tuple[str, ...] = _model(
        (),
        "A drafter to try. It is written as for `generate`. Draft models and EAGLE heads are tried "
        "as chains and as trees. Drafters that need no training are tried as well.",
        shown="built-in ones",
    )
    draft_only: bool = _model(False, "Try only the drafters that --draft names.")


@dataclass(frozen=True)
class TuneRun(RunOptions):
    """The time budget and the output file. Raises WriteError if there is a file."""

    out: str = setting("tuned.toml", "File to write the settings to. Use it with --config.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_new(self.out, "the tuned settings", self.force)


@expand
def tune(target: TargetOptions, prompts: PromptOptions, options: TuneOptions, run: TuneRun) -> int:
    """Find the fastest drafter and settings; write them to a file.

    Exits with 3, and writes nothing, if the time was too short to confirm a result.
    """
    budget = Budget(run.seconds or None)
    chosen_prompts = prompts.load(_TUNING_PROMPTS)
    from paceline.lab.tune.candidates import at_hand
    from paceline.lab.tune.plan import TuningOutcome, num_tasks
    from paceline.lab.tune.plan import tune as search
    from paceline.lab.tune.present import report_of, tuned_settings, tuning_record

    options = replace(options, source=prompts.prompts or options.source)
    candidates = at_hand(target.model, target.draft, target.draft_only)
    # This LLM only shares its weights.
    alone = replace(target, kv_cache_memory=None)
    llm = load_llm(alone, target.model, "none", max_batch_size=1)
    outcome = TuningOutcome(options, target.model)
    tasks = num_tasks(candidates, options)
    with measuring("tuning", budget, tasks) as interrupted:
        shared = outcome, interrupted.advance, budget, target.kv_cache_memory
        search(llm, candidates, chosen_prompts, *shared)
    confirmed = outcome.chosen is not None
    record = {**tuning_record(outcome), "config": run.out if confirmed else None}
    run.emit(record, report_of(outcome))
    if not confirmed:
        info("no tuned settings were written, because no result was confirmed")
        return interrupted.code or NOT_ENOUGH
    tuned_settings(outcome, llm).write(run.out)
    info(f"tuned settings: {run.out} (use them with --config {run.out})")
    return interrupted.code


@expand
def profile(
    engine: MeasuredModel,
    source: PromptOptions,
    output: ReportOptions,
    concurrency: int = setting(1, "Requests that run at once.", low=1),
    steps: int = setting(40, "Measured steps per round, after warm-up.", low=5),
    rounds: int = setting(5, "Timed rounds; the median counts.", low=1),
    trace: str | None = setting(
        None,
        "Write a trace of the run with drafts (without drafts, of the plain run) for "
        "ui.perfetto.dev.",
        metavar="FILE.json[.gz]",
    ),
) -> int:
    """Show what a step takes, and what limits it: memory or compute."""
    if not debugging():  # the profiler's library reports its starts and stops on stderr
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with stage("starting"):
        from paceline.lab.bench.prompts import fit
        from paceline.lab.profiling import runs
        from paceline.lab.profiling.steady import check_path

    if trace is not None:
        check_path(trace)
        check_new(trace, "the trace", output.force)
    prompts = source.load()
    engine = replace(engine, max_batch_size=max(_MIN_BATCH, concurrency))
    draft = engine.resolved_draft
    loaded = engine.open(draft)
    engines = [("plain", loaded)]
    if draft is not None:
        engines = [("plain", engine.plain_beside(loaded)), (draft, loaded)]
    target = engines[0][1]
    half = -(-target.max_model_len // 2)  # left for decoding
    fitting, _ = fit(prompts, target, half, "shorter prompts")
    chosen, encoded = zip(*islice(cycle(fitting), concurrency), strict=True)
    result = runs.ProfileResult()
    tasks = runs.stages(len(engines), rounds, trace is not None)
    with measuring("profile", Budget(), tasks) as interrupted:
        runs.profile_all(engines, encoded, steps, rounds, trace, result, interrupted.advance)
    names = list(dict.fromkeys(prompt.name for prompt in chosen))
    record = {
        "model": engine.model,
        "draft": draft,
        "concurrency": concurrency,
        "prompts": names,
        **runs.record(result),
        "trace": None if interrupted.code else trace,
    }
    sequences = "1 sequence" if concurrency == 1 else f"{concurrency} sequences at once"
    context = f" with about {result.runs[0].context:.0f} tokens of context" if result.runs else ""
    shown = f"prompt {names[0]}" if len(names) == 1 else f"{len(names)} prompts"
    output.emit(record, runs.report_of(result, f"{engine.model}, {sequences}{context}, {shown}."))
    return interrupted.code
