"""``paceline certify``: test whether speculative decoding is lossless, for a model, drafter and
sampling parameters or, with ``--url``, for any server of OpenAI's protocol."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import ModelOptions, expand
from paceline.cli.output import NOT_ENOUGH, ReportOptions, RunOptions, measuring
from paceline.core.stages import stage
from paceline.errors import ConfigError
from paceline.lab.bench import PromptOptions
from paceline.lab.budget import Budget
from paceline.lab.certify.effort import Effort
from paceline.request.options import DistributionOptions, SamplingDefaults
from paceline.settings import TableEntry, entries, under

if TYPE_CHECKING:
    from paceline.lab.certify.certificate import Certificate

_server = under("Testing a server")
_MIN_BATCH = 32  # samples are drawn in batches; smaller ones would only take longer


def _certify_entry(entry: TableEntry) -> TableEntry:
    """A sampling option with its neutral default: exactly what the user gives is certified."""
    neutral: dict[str, Any] = {**SamplingDefaults().filled(), "temperature": 1.0}
    if entry.name == "temperature":
        entry = replace(entry, help="Temperature; 0 tests greedy decoding only.")
    return replace(entry, default=neutral.get(entry.name, entry.default), shown=None)


_DISTRIBUTION = tuple(map(_certify_entry, entries(DistributionOptions, "command")))


def _certify_server(
    context: typer.Context,
    url: str,
    against: str | None,
    model: str | None,
    prompts: PromptOptions,
    effort: Effort,
    output: ReportOptions,
    budget: Budget,
) -> int:
    """Certify a server, without loading a model. Raises ConfigError for options of engines."""
    tables = PromptOptions, Effort, ReportOptions
    applicable = {entry.name for table in tables for entry in entries(table)}
    applicable |= {"url", "against", "model", "seconds"}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in applicable and source and source.name == "COMMANDLINE":
            raise ConfigError(
                f"{parameter.opts[0]} is for an engine of this machine, not for the server at "
                "--url; leave it out here and start the server with it"
            )
    from paceline.lab.bench.prompts import evenly
    from paceline.lab.certify.server import ServerCertifier, connect

    texts = [(prompt.name, prompt.text) for prompt in evenly(prompts.load(1), effort.num_prompts)]
    model_and_key = model or None, os.environ.get("OPENAI_API_KEY")
    server, reference = connect(url, *model_and_key)
    if against is not None:
        reference, _ = connect(against, *model_and_key)
    certifier = ServerCertifier(server, reference, texts, effort, budget)
    with measuring("certifying", budget, effort.requests) as interrupted:
        certifier.run(interrupted.advance)
    certificate = certifier.certificate()
    output.emit(certificate.record(), certificate.report())
    return interrupted.code or _code(certificate)


def _code(certificate: Certificate) -> int:
    return 0 if certificate.lossless else 1 if certificate.problems else NOT_ENOUGH


@expand
def certify(
    context: typer.Context,
    pair: Annotated[dict[str, Any], entries(ModelOptions, "command")],
    prompts: PromptOptions,
    sampling: Annotated[DistributionOptions, _DISTRIBUTION],
    effort: Effort,
    run: RunOptions,
    url: str | None = _server(
        None,
        "Certify an OpenAI-compatible server. It is asked for --model, with the key "
        "OPENAI_API_KEY.",
        shown="this machine",
    ),
    against: str | None = _server(
        None,
        "URL of a server of the same model without speculation, to compare with.",
        shown="the tested server with speculation off, where it supports that",
    ),
) -> int:
    """Test that speculation gives the output of the target alone.

    With --url a running server is tested instead, only by the answers it sends.

    Exits with 0 only if it does, with 1 if something is wrong, with 3 if the time was too short to
    certify anything.
    """
    budget = Budget(run.seconds or None)
    if url is not None:
        return _certify_server(context, url, against, pair["model"], prompts, effort, run, budget)
    if against is not None:
        raise typer.BadParameter("--against needs --url")
    engine = ModelOptions(**pair)
    if engine.resolved_draft is None:
        raise typer.BadParameter("there is no draft to certify; leave out --draft none")
    from paceline.lab.bench.prompts import evenly, tokens_needed

    params, count = sampling.params(), effort.num_prompts
    chosen = evenly(prompts.load(1 if prompts.prompts is None else count), count)
    batch = max(_MIN_BATCH, engine.max_batch_size or 0)
    base = replace(engine, max_batch_size=1, kv_cache_memory=None).open(None)
    from paceline.lab.certify.run import Certifier

    encoded = [(prompt.name, prompt.encode(base)) for prompt in chosen]
    needed = tokens_needed(base, (ids for _, ids in encoded), effort.max_tokens)
    llm = engine.with_draft(base, max_batch_size=batch, max_model_len=needed)
    certifier = Certifier(llm, encoded, params, effort, budget=budget)
    with measuring("certifying", budget, len(list(certifier.tasks()))) as interrupted:
        certifier.run(interrupted.advance)
    with stage("testing the samples"):
        certificate = certifier.certificate()
    given = {entry.name: getattr(params, entry.name) for entry in _DISTRIBUTION}
    run.emit({**certificate.record(), "sampling": given}, certificate.report())
    return interrupted.code or _code(certificate)
