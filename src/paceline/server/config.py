"""The settings of ``paceline serve``, from flags and a TOML file.

Every field of ``ServeConfig`` is a flag (``max_queue`` is ``--max-queue``) and a key in a section
of the file. ``TableEntry.read`` parses and checks the values of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core.keywords import announce, our_name
from paceline.errors import ConfigError
from paceline.files import read_toml
from paceline.model.names import (
    DEFAULT_DRAFT,
    DEFAULT_MODEL,
    EMBEDDED,
    MODEL_HELP,
    REAL,
    default_drafts,
)
from paceline.settings import AdapterSettings, EngineSettings, TableEntry, entries, under

SECTIONS = ("model", "engine", "server", "limits", "security")

_model, _server, _limits, _security = map(under, ("Model", "Server", "Limits", "Security"))


@dataclass(frozen=True)
class _Names:
    """The model, its drafts and its name."""

    model: str = _model(
        EMBEDDED,
        MODEL_HELP,
        shown=DEFAULT_MODEL,
        flags=("MODEL",),
    )
    draft: tuple[str, ...] = _model(
        (),
        "Draft model or spec, 'auto' or 'none'. Requests choose one by name; the first is the "
        "default. 'auto' is all drafters that are likely to help, 'none' decodes plainly. For "
        f"{REAL} and {EMBEDDED} the default includes ngram and the built-in drafters.",
        shown=DEFAULT_DRAFT,
    )
    config: str | None = _model(
        None,
        "File written by `paceline tune`. It is used for settings that are not given here.",
        shown="none",
    )
    served_model_name: str | None = _model(None, "The model's name in the API.", shown="MODEL")


@dataclass(frozen=True)
class ServeConfig(EngineSettings, AdapterSettings, _Names):
    """Settings of a server. Sizes are in bytes, times in seconds; ``deadline`` 0 means none."""

    host: str = _server("127.0.0.1", "Address to listen on.")
    port: int = _server(8000, "Port; 0 takes a free one.", low=0, high=65535)
    log_level: str = _server(
        "info", "Least severe level that is logged.", choices=("debug", "info", "warning", "error")
    )
    log_prompts: bool = _server(False, "Log prompts. Without it no content is logged.")
    drain_seconds: float = _server(
        30.0, "Seconds that running requests get to finish after SIGTERM.", low=0
    )
    single_process: bool = _server(
        False, "Run HTTP and the engine in one process: slower, but easier to debug."
    )

    max_queue: int = _limits(64, "Most waiting sequences; with more, requests get 429.", low=0)
    deadline: float = _limits(600.0, "Most seconds a request may take; 0 is no limit.", low=0)
    max_request_bytes: int = _limits(
        4 * 2**20, "Largest request; larger ones are refused with 413.", kind="size", shown="4M"
    )

    api_key_file: str | None = _security(
        None,
        "File with API keys, one per line. The variable PACELINE_API_KEYS has keys, too.",
        shown="no keys",
    )
    cors_origin: tuple[str, ...] = _security(
        (), "Origin whose pages may call the API, such as https://chat.example.", shown="none"
    )

    lora_updates: bool = _security(
        False, "Let clients load adapters from folders of this machine, and unload them."
    )

    def __post_init__(self) -> None:
        if self.name in self.adapters:
            raise ConfigError(f"an adapter and the model are both called {self.name!r}; rename one")
        if "none" in self.draft and len(self.draft) > 1:
            raise ConfigError(
                "draft 'none' cannot be combined with other drafts; leave out it or the others"
            )

    @property
    def drafts(self) -> tuple[str, ...]:
        """The specs of the drafts to load. Without ``draft``, tuned settings name theirs."""
        if self.draft:
            return self.draft
        return default_drafts(self.model) if self.config is None else (DEFAULT_DRAFT,)

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.model


def keys() -> tuple[TableEntry, ...]:
    """All settings of a server, in the order of ``--help``."""
    return entries(ServeConfig, "server")


def configure(
    flags: Mapping[str, object],
    file: str | Path | None = None,
    choose: Callable[[str], str] = lambda name: name or EMBEDDED,
) -> ServeConfig:
    """Merge defaults, file, and flags that are not None; the last wins. ``choose`` gets the model's
    name ("" if none was given) and returns the model to serve. Raises ConfigError."""
    values = {} if file is None else read_file(file)
    for entry in keys():
        value = flags.get(entry.name)
        if value is not None:
            values[entry.name] = entry.read(value, entry.flag)
    values["model"] = choose(values.get("model", ""))
    return ServeConfig(**values)


def read_file(path: str | Path) -> dict[str, Any]:
    """The values in a configuration file. Raises ConfigError, which names file and key."""
    values = {}
    for section, content in read_toml(path, "config file").items():
        if section not in SECTIONS or not isinstance(content, dict):
            sections = ", ".join(SECTIONS)
            raise ConfigError(f"{path}: unknown section {section}; the sections are {sections}")
        known = {entry.name: entry for entry in keys() if entry.section == section}
        for name, value in content.items():
            where = f"{path}: [{section}] {name}"
            if name not in known:  # perhaps another engine's name for one of the keys
                ours = our_name(name, known)
                if ours not in known:
                    advice = ours or f"unknown key; the keys are {', '.join(known)}"
                    raise ConfigError(f"{where}: {advice}")
                announce(f"{path}: [{section}]", name, ours, ours in content or ours in values)
                name = ours
            values[name] = known[name].read(value, where)
    return values


def to_toml(config: ServeConfig) -> str:
    """The text of a configuration file with these settings, without those that are unset."""
    import tomli_w

    values = {name: value for name, value in asdict(config).items() if value not in (None, ())}
    tables = {
        section: {
            entry.name: values[entry.name]
            for entry in keys()
            if entry.section == section and entry.name in values
        }
        for section in SECTIONS
    }
    return tomli_w.dumps(tables)
