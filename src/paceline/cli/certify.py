"""``paceline certify``: is speculative decoding lossless for this model, drafter and sampling?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.measuring import (
    PromptOptions,
    ReportOptions,
    finish,
    partial_results,
)
from paceline.cli.options import DEFAULT_DRAFT, ModelOptions, expand
from paceline.cli.progress import progress_bar
from paceline.cli.sampling import LawOptions
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline import LLM, SamplingParams
    from paceline.certify import Effort

_SAMPLING = "Sampling"
_EFFORT = "How much is tested"
# Samples are drawn in batches; smaller ones would only take longer.
_LEAST_BATCH = 32


@dataclass(frozen=True)
class CertifiedSampling(LawOptions):
    """Sampling parameters to certify; greedy decoding is tested in any case."""

    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "-t", help="0 tests greedy decoding only.", rich_help_panel=_SAMPLING
        ),
    ] = 1.0

    def params(self) -> SamplingParams:
        """Raises ConfigError on a value out of range."""
        from paceline import SamplingParams

        return SamplingParams(**self.law())


@dataclass(frozen=True)
class EffortOptions:
    """How much is decoded, and how sure a failure must be."""

    texts: Annotated[
        int, typer.Option(help="Prompts compared token for token.", rich_help_panel=_EFFORT)
    ] = 8
    max_tokens: Annotated[
        int, typer.Option(help="Tokens of each of them.", rich_help_panel=_EFFORT)
    ] = 64
    prefixes: Annotated[
        int, typer.Option(help="Places where samples are drawn.", rich_help_panel=_EFFORT)
    ] = 4
    samples: Annotated[
        int,
        typer.Option(
            help="Samples a place; four times as many see half the bias.", rich_help_panel=_EFFORT
        ),
    ] = 2000
    alpha: Annotated[
        float,
        typer.Option(help="Chance that a lossless engine fails.", rich_help_panel=_EFFORT),
    ] = 0.001
    seed: Annotated[
        int, typer.Option(help="Makes the run repeatable.", rich_help_panel=_EFFORT)
    ] = 0

    def effort(self) -> Effort:
        """Raises ConfigError on a value out of range."""
        from paceline.certify import Effort

        return Effort(
            self.texts, self.max_tokens, self.prefixes, self.samples, self.alpha, self.seed
        )


def _prompts(options: PromptOptions, llm: LLM, count: int) -> list[tuple[str, list[int]]]:
    """``count`` of them, evenly spread, as the target sees them."""
    found = options.load(1 if options.prompts is None else count)
    count = min(count, len(found))
    chosen = [found[i * len(found) // count] for i in range(count)]
    return [(prompt.name, prompt.encode(llm)) for prompt in chosen]


def _check(engine: ModelOptions) -> None:
    if engine.resolved_draft is None:
        raise typer.BadParameter(f"there is no draft to certify; try --draft {DEFAULT_DRAFT}")
    if engine.lossy:
        raise ConfigError(
            "--lossy (typical acceptance) is not lossless by design, so there is nothing to "
            "certify; leave it out"
        )


@expand
def certify(
    engine: ModelOptions,
    prompts: PromptOptions,
    sampling: CertifiedSampling,
    options: EffortOptions,
    output: ReportOptions,
) -> None:
    """Test that speculative decoding says what the target alone would say; exit 0 only if so."""
    _check(engine)
    output.check()
    from paceline.certify.run import Certifier
    from paceline.certify.tables import make_report

    params, effort = sampling.params(), options.effort()
    batch = max(_LEAST_BATCH, engine.max_batch_size or 0)
    llm = replace(engine, max_batch_size=batch).open(engine.resolved_draft)
    certifier = Certifier(llm, _prompts(prompts, llm, effort.texts), params, effort)
    with (
        partial_results() as interrupted,
        progress_bar("plain decoding", certifier.pieces) as advance,
    ):
        certifier.run(lambda description: advance(1, description))
    certificate = certifier.certificate()

    def spell(token: int) -> str:
        return str(llm.tokenizer.decode([token]))

    record: dict[str, Any] = {**certificate.record(), "sampling": _given(params)}
    output.emit(record, make_report(certificate, spell))
    finish(interrupted)
    if not certificate.lossless:
        raise typer.Exit(1)


def _given(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that were certified."""
    names: Sequence[str] = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    )
    return {name: getattr(params, name) for name in names}
