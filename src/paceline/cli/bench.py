"""``paceline bench``: plain decoding against any methods, on any prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.cli.measuring import (
    NOT_ENOUGH,
    Interruption,
    RunOptions,
    spending,
)
from paceline.cli.options import ModelOptions, expand
from paceline.core.stages import info, stage
from paceline.errors import ConfigError, PromptError
from paceline.lab.bench import BenchOptions, PromptOptions
from paceline.model.names import DEFAULT_DRAFT, default_drafts
from paceline.settings import changed, under

if TYPE_CHECKING:
    from paceline import LLM
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.lab.bench.runner import HeatRecord, Method, Sweep
    from paceline.lab.budget import Budget

_PER_CATEGORY = 3


@dataclass(frozen=True)
class BenchRun(RunOptions):
    """Two minutes, if nobody says otherwise."""

    seconds: float = changed(RunOptions, "seconds", 120.0)
    details: bool = under("Output")(
        False, "Also print latencies, categories, acceptance by position and time per step."
    )


@dataclass(frozen=True)
class _Plan:
    """A checked command line."""

    methods: list[Method]
    sweep: Sweep
    prompts: list[BenchPrompt]
    settings: dict[str, Any]


@expand
def bench(
    engine: ModelOptions,
    source: PromptOptions,
    options: BenchOptions,
    run: BenchRun,
) -> int:
    """Measure plain decoding against other methods: speed, latency, acceptance, same text.

    Exit status 1 if a text is not plain decoding's or a method speculated in vain, 3 if the time
    was not enough to measure anything.
    """
    budget = run.begin()
    with stage("starting"):
        plan = _plan(engine, source, options)
        from paceline.lab.bench.pages import report_of
        from paceline.lab.bench.result import BenchResult
        from paceline.lab.bench.runner import HeatRecord

    # It decodes nothing itself, so a small cache will do; every method gets one of its own.
    llm = replace(engine, max_batch_size=1, kv_cache_memory=None).open(None)
    record = HeatRecord()
    interrupted, about = _measured(engine, plan, llm, record, budget)
    if not record.heats:
        if not interrupted.code:
            info(
                f"error: {budget.seconds:g} s were not enough to measure anything: all methods "
                "must be loaded and answer a prompt; give more --seconds, or fewer methods"
            )
        return interrupted.code or NOT_ENOUGH
    with stage("comparing the texts"):
        result = BenchResult.of(plan.methods, plan.settings, llm, record)
        result = replace(result, **about)
    run.emit(result.record(), report_of(result), run.details)
    complaints = result.complaints(options.allow_idle)
    for line in complaints:
        info(f"error: {line}")
    return interrupted.code or int(bool(complaints))


def _plan(engine: ModelOptions, source: PromptOptions, options: BenchOptions) -> _Plan:
    """Everything that can be refused before a model is loaded. Raises ConfigError, DataError."""
    if engine.max_batch_size is not None:
        raise ConfigError("bench has as many sequences together as --concurrency says; use that")
    from paceline.lab.bench.engines import parse_methods

    length, rule = engine.length_and_rule
    draft = engine.resolved_draft
    sweep = options.sweep(rule)
    names = options.method or _default_methods(engine.model, draft)
    methods = parse_methods(names, draft, length, list(dict.fromkeys(options.lengths or ())))
    prompts = source.load(_PER_CATEGORY)
    settings = {
        "model": engine.model,
        "source": source.prompts or "the shipped set",
        "categories": list(dict.fromkeys(prompt.category for prompt in prompts)),
        "prompts": len(prompts),
        "price": options.price,
        **vars(sweep),
        "rule": rule,
        "lossy": engine.lossy,
    }
    return _Plan(methods, sweep, prompts, settings)


def _default_methods(model: str, draft: str | None) -> list[str]:
    others = default_drafts(model)[1:] if draft == DEFAULT_DRAFT else ()
    return ["plain", *(["draft"] if draft is not None else []), *(others or ["ngram"])]


def _measured(
    engine: ModelOptions, plan: _Plan, llm: LLM, record: HeatRecord, budget: Budget
) -> tuple[Interruption, dict[str, Any]]:
    """Measure into ``record``: whether Ctrl-C came, and other fields of BenchResult. Raises
    PromptError if no prompt leaves room for an answer."""
    from paceline.lab.bench.engines import Starter
    from paceline.lab.bench.prompts import fit, tokens_needed
    from paceline.lab.bench.runner import spending_of

    methods, sweep = plan.methods, plan.sweep
    fitting, left_out = fit(plan.prompts, llm, sweep.max_tokens)
    if not fitting:
        raise PromptError(
            f"all {len(left_out)} prompts are too long: {llm.target.name} sees "
            f"{llm.max_model_len} tokens with the answer; shorten them or lower --max-tokens"
        )
    rule, memory = plan.settings["rule"], engine.kv_cache_memory
    prompts = [(prompt.category, ids) for prompt, ids in fitting]
    needed = tokens_needed(llm, (ids for _, ids in prompts), sweep.max_tokens)
    sizes = {"max_model_len": needed, "kv_cache_memory": memory}
    starter = Starter(llm, rule=rule, lossy=engine.lossy, **sizes)
    runs = sweep.rounds * sweep.wanted(prompts) * len(methods)
    with Interruption() as interrupted, spending("measuring", budget, runs) as note:
        sweep.run(prompts, methods, starter.open, record, note, budget)
    return interrupted, {
        "left_out": [prompt.name for prompt in left_out],
        "price": plan.settings["price"],
        "interrupted": bool(interrupted.code),
        "unequal": starter.unequal,
        "spending": spending_of(record, sweep, prompts, budget),
    }
