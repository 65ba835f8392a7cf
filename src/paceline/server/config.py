"""Everything ``paceline serve`` can be told, once: the flags, the TOML file and their checks.

Every field of ``ServeConfig`` is a flag (``max_queue`` is ``--max-queue``) and a key of its
section in the file; both go through ``Key.read``, so neither can say what the other cannot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from paceline.config import parse_bytes
from paceline.defaults import EMBEDDED, IN_WORDS, REAL, default_drafts
from paceline.errors import ConfigError

SECTIONS = ("model", "engine", "server", "limits", "security")

OptionKind = Literal["text", "count", "seconds", "switch", "list", "size", "length"]


@dataclass(frozen=True)
class Key:
    """One setting: its section in the file, what ``--help`` says, and which values make sense.

    ``shown`` is the default in words where None would say nothing.
    """

    section: str
    kind: OptionKind
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    shown: str | None = None

    def read(self, value: object, where: str) -> Any:
        """The value as ``ServeConfig`` holds it; ``where`` begins the error's line.

        Raises ConfigError.
        """
        try:
            found = _READERS[self.kind](value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except (TypeError, ValueError):
            raise ConfigError(f"{where} is {value!r}; it must be {_WORDS[self.kind]}") from None
        if self.choices and found not in self.choices:
            raise ConfigError(f"{where} is {value!r}; use one of {', '.join(self.choices)}")
        if self.low is not None and isinstance(found, (int, float)) and not found >= self.low:
            raise ConfigError(f"{where} is {value!r}; it must be at least {self.low:g}")
        if self.high is not None and isinstance(found, (int, float)) and found > self.high:
            raise ConfigError(f"{where} is {value!r}; it can be at most {self.high:g}")
        return found


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value == float("inf"):
        raise TypeError
    return float(value)


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _list(value: object) -> tuple[str, ...]:
    """One text is a list of one."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise TypeError
    return tuple(map(_text, items))


def _size(value: object) -> int:
    return parse_bytes(value if isinstance(value, str) else str(_count(value)))


def _length(value: object) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, str) and value.isdecimal():  # flags are text
        return int(value)
    return _count(value)


_READERS: dict[OptionKind, Callable[[object], Any]] = {
    "text": _text,
    "count": _count,
    "seconds": _seconds,
    "switch": _switch,
    "list": _list,
    "size": _size,
    "length": _length,
}
_WORDS: dict[OptionKind, str] = {
    "text": "text in quotes",
    "count": "a whole number",
    "seconds": "a number of seconds",
    "switch": "true or false",
    "list": "a list of texts",
    "size": "a size, as in 512M or 2G",
    "length": "auto or a whole number",
}


def _key(default: object, *arguments: Any, **options: Any) -> Any:
    return field(default=default, metadata={"key": Key(*arguments, **options)})


@dataclass(frozen=True)
class ServeConfig:
    """What a server is. Sizes are in bytes, times in seconds; 0 in ``deadline`` is no deadline."""

    model: str = _key(
        EMBEDDED,
        "model",
        "text",
        "Model folder, GGUF file, hub name or built-in name.",
        shown=IN_WORDS,
    )
    draft: tuple[str, ...] = _key(
        (),
        "model",
        "list",
        "Draft model, ngram or another drafter's spec; repeatable: requests choose by name, the "
        "first is the default. 'none' decodes plainly.",
        shown=f"for {REAL} and {EMBEDDED} what is built in, else none",
    )
    draft_length: int | str | None = _key(
        None,
        "model",
        "length",
        "Tokens drafted a step: a number, or auto to adapt.",
        low=0,
        high=64,
        shown="auto",
    )
    rule: str | None = _key(
        None,
        "model",
        "text",
        "Acceptance rule of sampled drafts without a seed.",
        choices=("auto", "token", "block", "coupled"),
        shown="auto",
    )
    profile: str | None = _key(
        None, "model", "text", "A file of paceline tune; it gives what is left open.", shown="none"
    )
    served_model_name: str | None = _key(
        None, "model", "text", "The model's name in the API.", shown="MODEL"
    )

    dtype: str = _key(
        "auto",
        "engine",
        "text",
        "Numbers of the model.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    device: str = _key("auto", "engine", "text", "auto, cpu, cuda, cuda:1 ...")
    threads: int | None = _key(
        None, "engine", "count", "Processor threads.", low=1, shown="torch's choice"
    )
    max_batch_size: int | None = _key(
        None, "engine", "count", "Sequences decoded together.", low=1, shown="8"
    )
    kv_cache_memory: int | None = _key(
        None, "engine", "size", "Memory for keys and values, as in 512M or 2G.", shown="auto"
    )

    host: str = _key("127.0.0.1", "server", "text", "Address to listen on.")
    port: int = _key(
        8000, "server", "count", "Port to listen on; 0 takes a free one.", low=0, high=65535
    )
    log_level: str = _key(
        "info",
        "server",
        "text",
        "How much is logged.",
        choices=("debug", "info", "warning", "error"),
    )
    log_prompts: bool = _key(False, "server", "switch", "Log the prompts; else content is not.")
    drain_seconds: float = _key(
        30.0, "server", "seconds", "On SIGTERM, running requests may take so long.", low=0
    )

    metrics_alias: str | None = _key(
        None,
        "server",
        "text",
        "Metrics also under the names of another server, for its dashboards.",
        choices=("vllm",),
        shown="none",
    )
    otlp_endpoint: str | None = _key(
        None,
        "server",
        "text",
        "Where OpenTelemetry traces and metrics go, as in http://127.0.0.1:4318; needs "
        "paceline[otlp].",
        shown="nowhere",
    )

    single_process: bool = _key(
        False, "server", "switch", "HTTP and the engine in one process: slower, easier to debug."
    )

    max_queue: int = _key(64, "limits", "count", "Requests that may wait; then 429.", low=0)
    deadline: float = _key(
        600.0, "limits", "seconds", "Seconds a request may take; 0: any time.", low=0
    )
    max_request_bytes: int = _key(
        4 * 2**20, "limits", "size", "Size of a request; then 413.", shown="4M"
    )
    max_n: int = _key(16, "limits", "count", "Most choices (n) of a request.", low=1, high=16)
    max_logprobs: int = _key(
        20, "limits", "count", "Most logprobs of a token that may be asked for.", low=0, high=20
    )
    max_prompts: int = _key(
        64, "limits", "count", "Most prompts of one completion request.", low=1, high=64
    )

    api_key_file: str | None = _key(
        None,
        "security",
        "text",
        "File with API keys, one a line; also the variable PACELINE_API_KEYS.",
        shown="no keys",
    )
    cors_origin: tuple[str, ...] = _key(
        (),
        "security",
        "list",
        "Origin whose pages may call the API, as in https://chat.example; repeatable.",
        shown="none",
    )

    def __post_init__(self) -> None:
        if "none" in self.draft and len(self.draft) > 1:
            raise ConfigError("draft 'none' stands alone; leave out it or the other drafts")
        for origin in self.cors_origin:
            scheme, colons, rest = origin.partition("://")
            plain = scheme in ("http", "https") and colons and rest and not set(rest) & set("/ *?#")
            if origin != "*" and not plain:
                raise ConfigError(
                    f"cors_origin {origin!r} is no origin; write https://chat.example, without a "
                    "path, or * for any"
                )

    @property
    def drafts(self) -> tuple[str, ...] | None:
        """What ``LLM`` is to load: None is the profile's draft or, without a profile, no draft."""
        if self.draft:
            return None if self.draft == ("none",) and self.profile is None else self.draft
        return (default_drafts(self.model) or None) if self.profile is None else None

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.model

    @property
    def alias_of(self) -> str | None:
        """The model that metrics speak of under another server's names, if they do."""
        return None if self.metrics_alias is None else self.name


def keys() -> Iterator[tuple[Field[Any], Key]]:
    """Every setting, in the order of ``--help``."""
    for item in fields(ServeConfig):
        yield item, item.metadata["key"]


def default_of(item: Field[Any]) -> Any:
    assert item.default is not MISSING
    return item.default


def configure(
    flags: Mapping[str, object],
    file: str | Path | None = None,
    choose: Callable[[str], str] = lambda given: given or EMBEDDED,
) -> ServeConfig:
    """Defaults, then the file, then the flags that are not None. Raises ConfigError.

    ``choose`` is given the model's name, "" where nobody names one, and has the last word.
    """
    values = {} if file is None else read_file(file)
    for item, key in keys():
        given = flags.get(item.name)
        if given is not None:
            values[item.name] = key.read(given, flag(item.name))
    values["model"] = choose(values.get("model", ""))
    return ServeConfig(**values)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_file(path: str | Path) -> dict[str, Any]:
    """The values of a configuration file. Raises ConfigError, naming the file and the key."""
    tomllib: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None
    known = {(key.section, item.name): key for item, key in keys()}
    values = {}
    for section, entries in table.items():
        if section not in SECTIONS or not isinstance(entries, dict):
            raise ConfigError(f"{path}: {_stranger(section)}")
        for name, value in entries.items():
            key = known.get((section, name))
            if key is None:
                raise ConfigError(f"{path}: {_stranger(name, section)}")
            values[name] = key.read(value, f"{path}: [{section}] {name}")
    return values


def _stranger(name: str, section: str | None = None) -> str:
    """Why a key or section is not known, and what may have been meant."""
    homes = {item.name: key.section for item, key in keys()}
    place = f"[{section}] {name}" if section else name
    if name in homes and homes[name] != section:
        return f"{place} belongs into the section [{homes[name]}]"
    if section is None:
        hint = get_close_matches(name, SECTIONS, 1)
        near = f"did you mean [{hint[0]}]? " if hint else ""
        return f"unknown section or key {name!r}; {near}The sections are {', '.join(SECTIONS)}"
    hint = get_close_matches(name, homes, 1) or [
        other for other in homes if homes[other] == section
    ]
    near = f"did you mean {hint[0]}?" if len(hint) == 1 else f"it knows {', '.join(hint)}"
    if len(hint) == 1 and homes[hint[0]] != section:
        near = f"did you mean {hint[0]} in [{homes[hint[0]]}]?"
    return f"unknown key {place}; {near}"


def to_toml(config: ServeConfig) -> str:
    """A file that says the same; what is left open stands in a comment."""
    import tomli_w

    values = asdict(config)
    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for item, key in keys():
            if key.section != section:
                continue
            value = values[item.name]
            if value is None or (value == () and key.shown is not None):
                lines.append(f"# {item.name}: {key.shown}")
            else:
                shown = list(value) if isinstance(value, tuple) else value
                lines.append(tomli_w.dumps({item.name: shown}).strip())
        lines.append("")
    return "\n".join(lines)
