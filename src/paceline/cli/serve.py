"""``paceline serve``: an OpenAI-compatible server over the batched engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from paceline.cli.options import expand, select_model, without_default
from paceline.core.stages import info, stage
from paceline.errors import ConfigError, PacelineError
from paceline.files import read_toml
from paceline.server.config import ServeConfig, configure, keys, to_toml
from paceline.settings import setting

if TYPE_CHECKING:
    from paceline.server.service import Service


_FLAGS = tuple(without_default(key) for key in keys() if key.name != "config")


@expand
def serve(
    *,
    config: tuple[str, ...] = setting(
        (),
        "TOML file with settings. One of a server, one of `paceline tune`; flags win.",
        metavar="FILE",
        shown="none",
    ),
    print_config: bool = setting(False, "Print the configuration as a TOML file, and exit."),
    flags: Annotated[dict[str, Any], _FLAGS],
) -> None:
    """Serve a model: OpenAI's API, metrics, and a chat page at /."""
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    by_kind: dict[str, str] = {}
    for path in config:
        # Only files of tuned settings have a version.
        kind = "config" if "version" in read_toml(path, "config file") else "file"
        if by_kind.setdefault(kind, path) != path:
            both = f"--config {path} and --config {by_kind[kind]} hold the same kind of settings"
            raise ConfigError(f"{both}; leave out one of them")
    file = by_kind.pop("file", None)
    settings = configure(given | by_kind, file, select_model)
    from paceline.server.security import Keys, exposure_warning

    api_keys = Keys.load(settings.api_key_file)
    if print_config:
        print(f"# {len(api_keys)} API keys (not shown)")
        print(to_toml(settings), end="")
        return
    from paceline.server.run import bind, run, set_up_logging

    with bind(settings.host, settings.port) as listener:  # fails early if the port is taken
        warning = exposure_warning(settings.host, api_keys)
        if warning is not None:
            info(f"warning: {warning}")
        with _open(settings) as service:
            for note in service.facts.notes:
                info(f"note: {note}")
            set_up_logging(settings.log_level)
            run(service, api_keys, listener)


@contextmanager
def _open(settings: ServeConfig) -> Iterator[Service]:
    """Load the model, in this process or in an engine process."""
    if settings.single_process:
        from paceline.server.local import load_llm, local_service

        with stage(f"loading {settings.model}"):
            llm = load_llm(settings)
        service = local_service(llm, settings)
        with closing(service.client.engine):
            yield service
        return
    from paceline.server.client import EngineProcess
    from paceline.server.service import Service, load_tokenizer_alone

    with closing(EngineProcess(settings)) as process:
        with stage(f"loading {settings.model}"):
            try:  # while the engine process loads
                tokenizer = load_tokenizer_alone(settings)
            except PacelineError:
                process.wait_until_loaded()  # the engine's error about the model comes first
                raise
            process.wait_until_loaded()
        yield Service(process, tokenizer, settings)
