"""``paceline bench``: plain decoding against any methods, on any prompts."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.continuing import BudgetOptions, SavedRun
from paceline.cli.measuring import (
    NOT_ENOUGH,
    BenchOptions,
    PerplexityOptions,
    PromptOptions,
    ReportOptions,
    partial_results,
)
from paceline.cli.options import DEFAULT_DRAFT, ModelOptions, expand
from paceline.cli.progress import showing, spending
from paceline.cli.suite import SuiteOptions, finish, run_suite, settings_of, starter_of
from paceline.core.stages import stage
from paceline.errors import ConfigError, PromptError
from paceline.model.defaults import default_drafts
from paceline.settings import changed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import LLM
    from paceline.cli.measuring import Interruption
    from paceline.lab.bench.figures import Row
    from paceline.lab.bench.methods import Method
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.lab.bench.result import BenchResult, BenchSpending
    from paceline.lab.bench.runner import HeatRecord, Sweep
    from paceline.lab.budget import Budget

_PER_CATEGORY = 3
_READ_TOKENS = 4096  # of a text for its perplexity


@dataclass(frozen=True)
class _Plan:
    """A checked command line."""

    methods: list[Method]
    sweep: Sweep
    prompts: list[BenchPrompt]
    settings: dict[str, Any]


@dataclass(frozen=True)
class BenchBudget(BudgetOptions):
    """Two minutes, if nobody says otherwise."""

    seconds: float = changed(BudgetOptions, "seconds", 120.0)


@expand
def bench(
    context: typer.Context,
    engine: ModelOptions,
    wanted: PromptOptions,
    options: BenchOptions,
    suite: SuiteOptions,
    text: PerplexityOptions,
    output: ReportOptions,
    time: BenchBudget,
) -> None:
    """Measure plain decoding against other methods: speed, latency, acceptance, same text.

    Exit status 1 if a text is not plain decoding's or a method speculated in vain, 3 if the time
    was not enough to measure anything.
    """
    budget = time.begin()
    output.check()
    text.check()
    if suite.suite is not None:
        methods, rule = _methods(engine, options)
        return run_suite(context, engine, wanted, options, suite, output, methods, rule)
    suite.check_alone()
    with showing(), stage("starting"):
        plan = _plan(engine, wanted, options)
    pair = replace(engine, draft=engine.resolved_draft)
    saved = time.run_of(
        "bench", engine.model, plan.prompts, engine=pair, wanted=wanted, options=options
    )
    with showing():
        interrupted, result = _measured(engine, options, plan, budget, saved, text)
    if result is None:
        interrupted.finish()
        print(
            f"error: {budget.seconds:g} s were not enough to measure anything: all methods must be "
            "loaded and answer a prompt; give more --seconds, or fewer methods",
            file=sys.stderr,
        )
        raise typer.Exit(NOT_ENOUGH)
    from paceline.lab.bench.pages import report_of
    from paceline.lab.bench.result import SURENESS

    report = report_of(result)
    if result.spending is not None:
        report.add(SURENESS.title, *result.spending.blocks())
    output.emit(result.record(), report)
    finish(result, options.allow_idle, interrupted)


def _measured(
    engine: ModelOptions,
    options: BenchOptions,
    plan: _Plan,
    budget: Budget,
    saved: SavedRun,
    text: PerplexityOptions,
) -> tuple[Interruption, BenchResult | None]:
    """Whether Ctrl-C came, and figures if there are any."""
    from paceline.lab.bench.figures import rows
    from paceline.lab.bench.predict import predictions
    from paceline.lab.bench.result import BenchResult
    from paceline.lab.bench.runner import HeatRecord

    # It decodes nothing itself, so a small cache will do; every method gets one of its own.
    llm = replace(engine, max_batch_size=1, kv_cache_memory=None).open(None)
    saved.check_model(llm.target, timed=True)
    fitting, left_out = _fitting(plan.prompts, llm, options.max_tokens)
    methods = plan.methods
    starter = starter_of(llm, engine, plan.settings["rule"])
    prompts = [(prompt.category, ids) for prompt, ids in fitting]
    record, saved_heats = saved.measurements(HeatRecord) or HeatRecord(), list[Any]()
    before, wanted = record.spent, plan.sweep.wanted(prompts)
    if len(record.heats) >= record.rounds * wanted:
        record.rounds += plan.sweep.rounds  # all that was wanted is there: as much again

    def predict(clients: int, engines: Any) -> None:
        temperature = plan.sweep.temperatures[0]
        saved_heats.extend(predictions(record, methods, engines, clients, temperature))

    with (
        partial_results() as interrupted,
        spending("measuring", budget, plan.sweep.runs(prompts, methods)) as note,
    ):
        plan.sweep.run(
            prompts, methods, starter.open, record, lambda _, what: note(what), predict, budget
        )
    record.spent = before + budget.spent
    saved.keep(record)
    if not record.heats:
        return interrupted, None
    with stage("comparing the texts"):
        plains = {m.name for m in methods if not m.speculates and m.url is None}
        about = methods, plan.settings, llm, record, record
        result = BenchResult.of(*about, rows=rows(record, plains))
    asked = text.perplexity is not None and not interrupted
    read = [text.compared(llm, engine.model, engine.quantize, _READ_TOKENS)] if asked else []
    return interrupted, replace(
        result,
        predictions=saved_heats,
        left_out=[prompt.name for prompt in left_out],
        price=options.price,
        interrupted=bool(interrupted),
        unequal=starter.unequal,
        perplexities=read,
        spending=_spending(record, result.rows, plan.sweep, wanted, budget, before),
    )


def _fitting(
    prompts: Sequence[BenchPrompt], llm: LLM, tokens: int
) -> tuple[list[tuple[BenchPrompt, list[int]]], list[BenchPrompt]]:
    """As of ``fit``. Raises PromptError if none does."""
    from paceline.lab.bench.prompts import fit

    fitting, left_out = fit(prompts, llm, tokens)
    if not fitting:
        raise PromptError(
            f"all {len(left_out)} prompts are too long: {llm.target.name} sees "
            f"{llm.max_model_len} tokens with the answer; shorten them or lower --max-tokens"
        )
    return fitting, left_out


def _spending(
    record: HeatRecord, rows: Sequence[Row], sweep: Sweep, jobs: int, budget: Budget, before: float
) -> BenchSpending:
    from paceline.lab.bench.result import BenchSpending, sureness_of

    measured = {(heat.job.concurrency, heat.job.temperature) for heat in record.heats}
    cells = [(n, t) for n in sweep.concurrencies for t in sweep.temperatures]
    wanted, done = record.rounds * jobs, len(record.heats)
    missing = [f"{n} at once, temperature {t:g}" for n, t in cells if (n, t) not in measured]
    first = sum(heat.turn == 0 for heat in record.heats)
    if first < jobs:
        missing.append(f"{jobs - first} of {jobs} turns of the first round")
    elif done < wanted:
        missing.append(f"{wanted - done} of {wanted} turns of all rounds")
    spent = before + budget.spent
    return BenchSpending(
        budget.seconds, spent, done, wanted, tuple(missing), sureness_of(record, rows)
    )


def _methods(engine: ModelOptions, options: BenchOptions) -> tuple[list[Method], str]:
    """What is compared, and by which rule. Raises ConfigError."""
    options.check()
    if engine.max_batch_size is not None:
        raise ConfigError("bench has as many sequences together as --concurrency says; use that")
    from paceline.lab.bench.methods import parse_lengths, parse_methods

    length, rule = _length_and_rule(engine)
    draft = engine.resolved_draft
    names = options.method or _default_methods(engine.model, draft)
    return parse_methods(names, draft, length, parse_lengths(options.lengths)), rule


def _plan(engine: ModelOptions, wanted: PromptOptions, options: BenchOptions) -> _Plan:
    """Everything that can be refused before a model is loaded. Raises ConfigError, DataError."""
    from paceline.lab.bench.runner import Settings, Sweep

    methods, rule = _methods(engine, options)
    sweep = Sweep(
        options.concurrencies(),
        options.temperatures(),
        options.rounds,
        Settings(options.max_tokens, not options.stop_at_eos, options.seed_for(rule)),
    )
    prompts = wanted.load(_PER_CATEGORY)
    settings = settings_of(
        engine,
        wanted.prompts or "the shipped set",
        sweep,
        rule,
        categories=list(dict.fromkeys(prompt.category for prompt in prompts)),
        prompts=len(prompts),
        price=options.price,
    )
    return _Plan(methods, sweep, prompts, settings)


def _length_and_rule(engine: ModelOptions) -> tuple[Any, str]:
    """Asked for, else the profile's (its length only with its draft), else auto."""
    length, rule = engine.draft_length, engine.rule
    if engine.profile is not None:
        from paceline.settings.tuned import TunedProfile

        profile = TunedProfile.read(engine.profile)
        rule = rule or profile.engine.rule
        if length is None and engine.draft is None:
            length = profile.draft.length
    return ("auto" if length is None else length), rule or "auto"


def _default_methods(model: str, draft: str | None) -> list[str]:
    others = default_drafts(model)[1:] if draft == DEFAULT_DRAFT else ()
    return ["plain", *(["draft"] if draft is not None else []), *(others or ["ngram"])]
