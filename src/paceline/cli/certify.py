"""``paceline certify``: is speculative decoding lossless for this model, drafter and sampling?

With ``--url``: is the server behind it lossless, whoever made it?
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from paceline.cli.continuing import BudgetOptions, SavedRun
from paceline.cli.measuring import (
    NOT_ENOUGH,
    PerplexityOptions,
    PromptOptions,
    ReportOptions,
    partial_results,
)
from paceline.cli.options import DistributionOptions, ModelOptions, expand
from paceline.cli.progress import showing, spending
from paceline.core.stages import stage
from paceline.errors import ConfigError
from paceline.lab.budget import Budget
from paceline.settings import changed, entries, under

if TYPE_CHECKING:
    from paceline import LLM, SamplingParams
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.lab.budget import Budget
    from paceline.lab.certify import Certificate, Certifier, Effort
    from paceline.lab.perplexity import TextPerplexity

_server = under("A server by its answers")
_TEXTS = 8
_REQUESTS = 400
_LONGEST = 32  # tokens of an answer: what is wrong shows at once, and requests are many
# Options that a server's certification has in common with an engine's.
_SHARED = {"model", "max_tokens", "alpha", "seed", "seconds"}
Options = TypeVar("Options")


@dataclass(frozen=True)
class ServerOptions:
    """Which server answers, and what it is compared with."""

    url: str | None = _server(
        None,
        "Certify a server that speaks OpenAI's protocol, asked for --model; its key is that of "
        "OPENAI_API_KEY.",
        shown="this machine's engine",
    )
    against: str | None = _server(
        None,
        "URL of another server of the same model, without speculation.",
        shown="the same one with speculation off, where it can",
    )
    requests: int = _server(_REQUESTS, f"Requests sent at most, of {_LONGEST} tokens at most.")


def by_url(command: Callable[..., None]) -> Callable[..., None]:
    """The command, but for calls with ``--url``: those load no model here."""

    @functools.wraps(command)
    def chosen(**values: Any) -> None:
        if values["url"] is not None:
            _certify_server(values)
        elif values["against"] is not None or values["requests"] != _REQUESTS:
            name = "--against" if values["against"] is not None else "--requests"
            raise typer.BadParameter(f"{name} goes with --url")
        else:
            command(**values)

    return chosen


def _certify_server(values: dict[str, Any]) -> None:
    from paceline.lab.bench.prompts import evenly
    from paceline.lab.certify.servers import AnsweringServer, ServerCertifier, ServerEffort

    server, output = _group(ServerOptions, values), _group(ReportOptions, values)
    prompts = _group(PromptOptions, values)
    server_options = {item.name for kind in (server, output, prompts) for item in fields(kind)}
    _refuse_others(values["context"], server_options | _SHARED)
    budget = Budget(values["seconds"] or None)
    output.check()
    sizes = server.requests, min(values["max_tokens"], _LONGEST), values["alpha"], values["seed"]
    effort = ServerEffort(*sizes)
    few = evenly(prompts.load(1), _TEXTS)
    key = os.environ.get("OPENAI_API_KEY")
    answering, reference = AnsweringServer.connect(server.url or "", values["model"] or None, key)
    if server.against is not None:
        reference, _ = AnsweringServer.connect(server.against, values["model"] or None, key)
    texts = [(prompt.name, prompt.text) for prompt in few]
    certifier = ServerCertifier(answering, reference, texts, effort, budget)
    with (
        showing(),
        partial_results() as interrupted,
        spending("certifying", budget, certifier.pieces) as advance,
    ):
        certifier.run(advance)
    certificate = certifier.certificate()
    output.emit(certificate.record(), certificate.report())
    interrupted.finish()
    if not certificate.lossless:
        raise typer.Exit(1 if certificate.problems else NOT_ENOUGH)


def _group(kind: Callable[..., Options], values: dict[str, Any]) -> Options:
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names})


def _refuse_others(context: typer.Context, known: set[str]) -> None:
    """Options of an engine say nothing of a server. Raises ConfigError."""
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "")
        if given is not None and given.name == "COMMANDLINE" and parameter.name not in known:
            raise ConfigError(
                f"{parameter.opts[0]} is for an engine of this machine, not for a server behind "
                "--url; leave it out, and start the server with it"
            )


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

    temperature: float | None = changed(
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
        from paceline.lab.certify import Effort

        return Effort(**vars(self))


def _prompts(options: PromptOptions, count: int) -> list[BenchPrompt]:
    """``count`` of them, evenly spread; behind them those that runs which go on may take."""
    from paceline.lab.bench.prompts import evenly

    chosen = evenly(options.load(1 if options.prompts is None else count), count)
    more = options.load(options.per_category)
    return [*chosen, *(prompt for prompt in more if prompt not in chosen)]


def _encoded(
    prompts: Sequence[BenchPrompt], llm: LLM, effort: Effort
) -> list[tuple[str, list[int]]]:
    """As the target sees them; of those beyond the effort's only what it has room for."""
    encoded = [(prompt.name, prompt.encode(llm)) for prompt in prompts]
    limit = llm.max_model_len - effort.max_tokens - 16
    texts, more = encoded[: effort.texts], encoded[effort.texts :]
    return [*texts, *((name, ids) for name, ids in more if 0 < len(ids) <= limit)]


def _check(engine: ModelOptions) -> None:
    if engine.resolved_draft is None:
        raise typer.BadParameter("there is no draft to certify; leave out --draft none")
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
    from paceline.lab.certify import Certifier, Evidence

    batch = max(_LEAST_BATCH, engine.max_batch_size or 0)
    llm = replace(engine, max_batch_size=batch).open(engine.resolved_draft)
    saved.check_model(llm.target)
    evidence = saved.measurements(Evidence)
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
    from paceline.lab.certify.tables import report_of
    from paceline.lab.report.document import Text

    def spell(token: int) -> str:
        return str(llm.tokenizer.decode([token]))

    file_record = None if read is None else read.record()
    record: dict[str, Any] = {**certificate.record(), "sampling": _given(params)}
    report = report_of(certificate, spell)
    if read is not None:
        of = [Text(_RELATIVE)] if read.quantised else []
        report.add("Perplexity of the target", *of, Text(read.line))
    output.emit({**record, "perplexity": file_record}, report)


def _given(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that were certified."""
    shaping = entries(DistributionOptions, "command")
    return {entry.name: getattr(params, entry.name) for entry in shaping}
