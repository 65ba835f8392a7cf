"""``paceline serve``: an OpenAI-compatible server over the batched engine."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import chosen_model
from paceline.cli.progress import showing
from paceline.errors import PacelineError
from paceline.server.config import Key, ServeConfig, configure, default_of, keys, to_toml
from paceline.stages import stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from paceline.server.security import Keys
    from paceline.server.service import Service

_TYPES: dict[str, Any] = {
    "text": str,
    "count": int,
    "seconds": float,
    "switch": bool,
    "list": list[str],
    "size": str,
    "length": str,
}


def _option(item: Field[Any], key: Key) -> inspect.Parameter:
    """The flag of one setting; None means that it was not given."""
    default = default_of(item)
    choices = f" One of {', '.join(key.choices)}." if key.choices else ""
    option: Any
    if item.name == "model":
        option = typer.Argument(
            metavar="MODEL", help=key.help, show_default=key.shown or str(default)
        )
    else:
        shown = key.shown or str(default).lower().removesuffix(".0")
        option = typer.Option(
            help=key.help + choices,
            show_default=shown,
            rich_help_panel=key.section.capitalize(),
        )
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_TYPES[key.kind] | None, option],
    )


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command(config, print_config, flags)`` a flag for every field of ServeConfig."""
    settings = [_option(item, key) for item, key in keys()]

    def call(config: str | None, print_config: bool, **flags: Any) -> None:
        command(config, print_config, {name: v for name, v in flags.items() if v not in (None, [])})

    own = [
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    metavar="FILE",
                    help="TOML file that says what the flags can say; flags win.",
                    show_default="none",
                ),
            ],
        ),
        inspect.Parameter(
            "print_config",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[
                bool,
                typer.Option("--print-config", help="Print the configuration as such a file."),
            ],
        ),
    ]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    parameters = [*settings[:1], *own, *settings[1:]]
    call.__annotations__ = {item.name: item.annotation for item in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


@with_flags
def serve(config: str | None, print_config: bool, flags: dict[str, Any]) -> None:
    """Serve a model over HTTP: OpenAI's API, metrics, and a page at /."""
    settings = configure(flags, config, chosen_model)
    from paceline.server.security import Keys

    api_keys = Keys.load(settings.api_key_file)
    if print_config:
        print(f"# {len(api_keys)} API keys, which are not shown")
        print(to_toml(settings), end="")
        return
    _run(settings, api_keys)


def _run(settings: ServeConfig, api_keys: Keys) -> None:
    """What is quickly found out comes first: the address, then the model."""
    from paceline.server.run import bind, run, set_up_logging
    from paceline.server.security import exposure_warning, key_file_warning

    telemetry = None
    if settings.otlp_endpoint is not None:
        from paceline.server.telemetry import Telemetry

        telemetry = Telemetry.to(settings.otlp_endpoint, settings.name)
    with bind(settings.host, settings.port) as listener:
        notes = [exposure_warning(settings.host, api_keys)]
        if settings.api_key_file is not None:
            notes.append(key_file_warning(settings.api_key_file))
        for note in filter(None, notes):
            print(f"warning: {note}", file=sys.stderr)
        with _open(settings) as service:
            for note in service.loop.facts.notes:
                print(f"note: {note}", file=sys.stderr)
            set_up_logging(settings.log_level)
            run(service, settings, api_keys, listener, telemetry)


@contextmanager
def _open(settings: ServeConfig) -> Iterator[Service]:
    """The loaded model, in this process or in one of its own."""
    from paceline.server.run import asks_of, limits_of

    limits, asks = limits_of(settings), asks_of(settings)
    if settings.single_process:
        from paceline.server.loading import load_llm
        from paceline.server.local import local_service

        with showing(), stage(f"loading {settings.model}"):
            llm = load_llm(settings)
        yield local_service(
            llm, settings.name, limits, asks, settings.log_prompts, settings.alias_of
        )
        return
    from paceline.server.process import EngineProcess
    from paceline.server.remote import RemoteEngine
    from paceline.server.service import Service

    with EngineProcess(settings) as process:
        with showing(), stage(f"loading {settings.model}"):
            tokenizer = _tokenizer(settings)  # while the other process loads
            engine = RemoteEngine(process, process.hello(), limits)
        if isinstance(tokenizer, PacelineError):
            raise tokenizer
        yield Service(engine, tokenizer, settings.name, asks, settings.log_prompts)


def _tokenizer(settings: ServeConfig) -> PreTrainedTokenizerFast | PacelineError:
    """Or why there is none; what the engine says of the model comes first."""
    from paceline.server.loading import load_tokenizer_alone

    try:
        return load_tokenizer_alone(settings)
    except PacelineError as error:
        return error
