"""``paceline profile``: what a decoding step waits for."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.cli.measuring import Interruption, ReportOptions, spending
from paceline.cli.options import ModelOptions, expand
from paceline.cli.output import debugging
from paceline.core.stages import stage
from paceline.errors import ConfigError
from paceline.lab.bench import PromptOptions
from paceline.lab.budget import Budget
from paceline.settings import setting

if TYPE_CHECKING:
    from paceline import LLM
    from paceline.lab.profiling.runs import ProfileResult

_BATCH = 8  # sequences together where nobody says how many


@expand
def profile(
    engine: ModelOptions,
    source: PromptOptions,
    output: ReportOptions,
    concurrency: int = setting(1, "Sequences decoded at once.", low=1),
    steps: int = setting(40, "Steady steps a round.", low=5),
    rounds: int = setting(5, "Timed rounds; the median counts.", low=1),
    trace: str | None = setting(
        None,
        "Trace of the drafting run, else the plain one, for ui.perfetto.dev.",
        metavar="FILE.json[.gz]",
    ),
) -> int:
    """Say whether steady decoding waits for memory, compute, kernel launches or Python."""
    if not debugging():  # the profiler's library reports its starts and stops on stderr
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with stage("starting"):
        from paceline.lab.profiling import runs, steady
        from paceline.lab.profiling.steady import check_path

    if trace is not None:
        check_path(trace)
    prompts = source.load()
    engines = _engines(engine, concurrency)
    target = engines[0][1]
    encoded = [prompt.encode(target) for prompt in prompts]
    indices = steady.choose(encoded, concurrency, target.max_model_len)
    chosen = [encoded[number] for number in indices]
    result = runs.ProfileResult()
    pieces = runs.stages(len(engines), rounds)
    with Interruption() as interrupted, spending("profile", Budget(), pieces) as advance:
        runs.profile_all(engines, chosen, steps, rounds, trace, result, advance)
    names = list(dict.fromkeys(prompts[number].name for number in indices))
    record = {
        "model": engine.model,
        "draft": engine.resolved_draft,
        "concurrency": concurrency,
        "prompts": names,
        **runs.record(result),
        "trace": trace if len(result.runs) == len(engines) else None,
    }
    output.emit(record, runs.report_of(result, _setting(engine, concurrency, names, result)))
    return interrupted.code


def _engines(engine: ModelOptions, concurrency: int) -> list[tuple[str, LLM]]:
    """Plain decoding, and then the draft's if there is one, over the same weights. Raises
    ConfigError if fewer sequences are decoded together than ``concurrency`` asks for."""
    draft = engine.resolved_draft
    if engine.max_batch_size is None and engine.profile is None and concurrency > _BATCH:
        engine = replace(engine, max_batch_size=concurrency)
    loaded = engine.open(draft)
    batch = loaded.engine.scheduler.config.max_batch_size
    if concurrency > batch:
        raise ConfigError(
            f"--concurrency is {concurrency}, but sequences decoded together are at most {batch}; "
            f"add --max-batch-size {concurrency}"
        )
    if draft is None:
        return [("plain", loaded)]
    return [("plain", engine.plain_beside(loaded)), (draft, loaded)]


def _setting(
    engine: ModelOptions, concurrency: int, names: list[str], result: ProfileResult
) -> str:
    together = "1 sequence" if concurrency == 1 else f"{concurrency} sequences at once"
    context = f" with about {result.runs[0].context:.0f} tokens of context" if result.runs else ""
    prompts = f"prompt {names[0]}" if len(names) == 1 else f"{len(names)} prompts"
    return f"{engine.model}, {together}{context}, {prompts}."
