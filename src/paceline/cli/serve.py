"""``paceline serve``: an OpenAI-compatible server over the batched engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli.options import chosen_model, parameter_of, with_signature
from paceline.cli.progress import showing
from paceline.core.stages import stage
from paceline.errors import ConfigError, PacelineError
from paceline.files import read_toml
from paceline.server.config import ServeConfig, configure, keys, to_toml
from paceline.settings import entries, setting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from paceline.server.security import Keys
    from paceline.server.service import Service


@dataclass(frozen=True)
class FileOptions:
    """Where the settings come from besides the flags."""

    config: tuple[str, ...] = setting(
        (),
        "TOML file with the settings of the flags, or a file of paceline tune; one of each at "
        "most. Flags win.",
        metavar="FILE",
        shown="none",
    )
    print_config: bool = setting(False, "Print the configuration as such a file.")


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command(config, print_config, flags)`` a flag for every setting of ServeConfig."""
    parameters = [parameter_of(entry) for entry in entries(FileOptions, "command")]
    flags = [parameter_of(entry, left_open=True) for entry in keys() if entry.name != "profile"]

    def call(config: list[str] | None, print_config: bool, **flags: Any) -> None:
        given = {name: v for name, v in flags.items() if v not in (None, [])}
        file, tuned = _files(config or [])
        command(file, print_config, given | ({} if tuned is None else {"profile": tuned}))

    return with_signature(call, command, [*flags[:1], *parameters, *flags[1:]])


def _files(paths: list[str]) -> tuple[str | None, str | None]:
    """The server's own file and that of ``paceline tune``. Raises ConfigError."""
    by_kind: dict[bool, list[str]] = {False: [], True: []}
    for path in paths:
        # Only tuned settings have a version.
        by_kind["version" in read_toml(path, "config file")].append(path)
    for same in by_kind.values():
        if len(same) > 1:
            raise ConfigError(f"--config {same[1]} is of the same kind as {same[0]}; leave out one")
    return next(iter(by_kind[False]), None), next(iter(by_kind[True]), None)


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
