"""``paceline certify --url``: is the server behind a URL lossless, whoever made it?"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import typer

from paceline.budget import Budget
from paceline.cli.measuring import NOT_ENOUGH, PromptOptions, ReportOptions, partial_results
from paceline.cli.progress import showing, spending
from paceline.errors import ConfigError
from paceline.settings import under

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
    from paceline.tools.certify.servers import AnsweringServer, ServerCertifier, ServerEffort

    server, output = _group(ServerOptions, values), _group(ReportOptions, values)
    prompts = _group(PromptOptions, values)
    own = {item.name for kind in (server, output, prompts) for item in fields(kind)}
    _refuse_others(values["context"], own | _SHARED)
    budget = Budget(values["seconds"] or None)
    output.check()
    sizes = server.requests, min(values["max_tokens"], _LONGEST), values["alpha"], values["seed"]
    effort = ServerEffort(*sizes)
    found = prompts.load(1)
    few = [found[n * len(found) // _TEXTS] for n in range(_TEXTS)] if found[_TEXTS:] else found
    key = os.environ.get("OPENAI_API_KEY")
    answering, reference = AnsweringServer.found(server.url or "", values["model"] or None, key)
    if server.against is not None:
        reference, _ = AnsweringServer.found(server.against, values["model"] or None, key)
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
