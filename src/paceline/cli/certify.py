"""``paceline certify``: is speculative decoding lossless for this model, drafter and sampling?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.certify_server import ServerOptions, by_url
from paceline.cli.continuing import BudgetOptions, SavedRun
from paceline.cli.measuring import (
    NOT_ENOUGH,
    PerplexityOptions,
    PromptOptions,
    ReportOptions,
    partial_results,
)
from paceline.cli.options import DEFAULT_DRAFT, ModelOptions, expand
from paceline.cli.progress import showing, spending
from paceline.cli.sampling import DistributionOptions
from paceline.errors import ConfigError
from paceline.settings import changed, entries, under
from paceline.stages import stage

if TYPE_CHECKING:
    from paceline import LLM, SamplingParams
    from paceline.budget import Budget
    from paceline.tools.bench.prompts import BenchPrompt
    from paceline.tools.certify import Certificate, Certifier, Effort
    from paceline.tools.perplexity import TextPerplexity

_effort = under("How much is tested")
# Samples are drawn in batches; smaller ones would only take longer.
_LEAST_BATCH = 32
_READ_TOKENS = 1024  # of a text for the target's perplexity
_RELATIVE = (
    "Lossless is meant with respect to the target as it was loaded, which is quantised: its text "
    "is not that of the model it was made of."
)


@dataclass(frozen=True)
class CertifiedSampling(DistributionOptions):
    """Sampling parameters to certify; greedy decoding is tested in any case."""

    temperature: float = changed(
        DistributionOptions, "temperature", 1.0, help="0 tests greedy decoding only."
    )


@dataclass(frozen=True)
class EffortOptions:
    """How much is decoded, and how sure a failure must be."""

    texts: int = _effort(8, "Prompts compared token for token.")
    max_tokens: int = _effort(64, "Tokens of each of them.")
    prefixes: int = _effort(4, "Places where samples are drawn.")
    samples: int = _effort(2000, "Samples a place; four times as many see half the bias.")
    alpha: float = _effort(0.001, "Chance that a lossless engine fails.")
    seed: int = _effort(0, "Makes the run repeatable.")

    def effort(self) -> Effort:
        """Raises ConfigError on a value out of range."""
        from paceline.tools.certify import Effort

        return Effort(**vars(self))


def _prompts(options: PromptOptions, count: int) -> list[BenchPrompt]:
    """``count`` of them, evenly spread; behind them those that runs which go on may take."""
    found = options.load(1 if options.prompts is None else count)
    count = min(count, len(found))
    chosen = [found[i * len(found) // count] for i in range(count)]
    more = options.load(options.per_category)
    return [*chosen, *(prompt for prompt in more if prompt not in chosen)]


def _encoded(
    prompts: Sequence[BenchPrompt], llm: LLM, effort: Effort
) -> list[tuple[str, list[int]]]:
    """As the target sees them; of those beyond the effort's only what it has room for."""
    found = [(prompt.name, prompt.encode(llm)) for prompt in prompts]
    limit = llm.max_model_len - effort.max_tokens - 16
    own, more = found[: effort.texts], found[effort.texts :]
    return [*own, *((name, ids) for name, ids in more if 0 < len(ids) <= limit)]


def _check(engine: ModelOptions) -> None:
    if engine.resolved_draft is None:
        raise typer.BadParameter(f"there is no draft to certify; try --draft {DEFAULT_DRAFT}")
    if engine.lossy:
        raise ConfigError(
            "--lossy (typical acceptance) is not lossless by design, so there is nothing to "
            "certify; leave it out"
        )


@by_url
@expand
def certify(
    context: typer.Context,
    engine: ModelOptions,
    prompts: PromptOptions,
    sampling: CertifiedSampling,
    options: EffortOptions,
    text: PerplexityOptions,
    output: ReportOptions,
    time: BudgetOptions,
    server: ServerOptions,
) -> None:
    """Test that speculative decoding says what the target alone would say; exit 0 only if so.

    With --url it is a server that is tested, by its answers alone.

    Exits with 1 if something is wrong, with 3 if there was not enough time to certify anything.
    """
    budget = time.begin()
    _check(engine)
    output.check()
    text.check()
    params, effort = sampling.params(), options.effort()
    chosen = _prompts(prompts, effort.texts)
    saved = time.run_of(
        "certify",
        engine.model,
        chosen,
        engine=replace(engine, draft=engine.resolved_draft),
        prompts=prompts,
        sampling=sampling,
        options=options,
    )
    with showing():
        certifier = _certifier(engine, chosen, params, effort, budget, saved)
        with (
            partial_results() as interrupted,
            spending("certifying", budget, certifier.pieces) as advance,
        ):
            certifier.run(advance)
        saved.keep(certifier.evidence)  # before anything else can go wrong
        with stage("judging what was drawn"):
            certificate = certifier.certificate()
        read = None if interrupted else _perplexity(text, engine, certifier.llm)
    certifier.evidence.looks += 1
    saved.keep(certifier.evidence)
    _emit(certificate, certifier.llm, params, output, read)
    interrupted.finish()
    if not certificate.lossless:
        raise typer.Exit(1 if certificate.problems else NOT_ENOUGH)


def _certifier(
    engine: ModelOptions,
    chosen: Sequence[BenchPrompt],
    params: SamplingParams,
    effort: Effort,
    budget: Budget,
    saved: SavedRun,
) -> Certifier:
    """With the model loaded, and what an earlier run has seen."""
    from paceline.tools.certify import Certifier, Evidence

    batch = max(_LEAST_BATCH, engine.max_batch_size or 0)
    llm = replace(engine, max_batch_size=batch).open(engine.resolved_draft)
    saved.check_model(llm.target)
    evidence = saved.found(Evidence)
    prompts = _encoded(chosen, llm, effort)
    return Certifier(llm, prompts, params, effort, budget=budget, evidence=evidence)


def _perplexity(text: PerplexityOptions, engine: ModelOptions, llm: LLM) -> TextPerplexity | None:
    """Of a target with quantised weights or cache, by which everything was judged; or if asked."""
    from paceline.model.held import is_few

    plain = llm.target.cache_dtype == llm.target.dtype and not is_few(llm.target.hf)
    if text.perplexity is None and plain:
        return None
    return text.compared(llm, engine.model, engine.quantize, _READ_TOKENS)


def _emit(
    certificate: Certificate,
    llm: LLM,
    params: SamplingParams,
    output: ReportOptions,
    read: TextPerplexity | None,
) -> None:
    from paceline.tools.certify.tables import report_of
    from paceline.tools.report.document import Text

    def spell(token: int) -> str:
        return str(llm.tokenizer.decode([token]))

    told = None if read is None else read.record()
    record: dict[str, Any] = {**certificate.record(), "sampling": _given(params)}
    report = report_of(certificate, spell)
    if read is not None:
        of = [Text(_RELATIVE)] if read.quantised else []
        report.add("Perplexity of the target", *of, Text(read.line))
    output.emit({**record, "perplexity": told}, report)


def _given(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that were certified."""
    shaping = entries(DistributionOptions, "command")
    return {entry.name: getattr(params, entry.name) for entry in shaping}
