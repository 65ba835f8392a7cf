"""Settings, each said once: its default, its help, what it may be and where it can be said.

A table is a frozen dataclass whose fields are made by ``setting``. The command line takes its
options from such tables (cli/options.py), a server its flags and the keys of its file
(server/config.py), a training its configuration (train/configs.py). ``EngineSettings`` is the table
of the engine. Nothing here loads torch, so that ``--help`` is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from paceline.core.sizes import parse_bytes
from paceline.errors import ConfigError


@dataclass(frozen=True)
class Key:
    """What there is to know about one setting besides its default.

    ``panel`` is its heading in ``--help`` and, in small letters, its section in a file. ``kind``
    is how it is written, by default as its type is. ``shown`` is the default in words, "" shows
    none. ``flags`` replace ``--name``. ``but`` names where it cannot be said: "command", "server",
    "LLM", "beside".
    """

    help: str
    panel: str = ""
    kind: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    shown: str | None = None
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        return self.panel.lower()

    def parse(self, value: object, where: str) -> Any:
        """The value as the table holds it; ``where`` begins an error's line. Raises ConfigError."""
        try:
            return _KINDS[self.kind][0](value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except (TypeError, ValueError):
            raise ConfigError(f"{where} is {value!r}; it must be {_KINDS[self.kind][1]}") from None

    def read(self, value: object, where: str) -> Any:
        """As ``parse``, and checked."""
        parsed = self.parse(value, where)
        if self.choices and parsed not in self.choices:
            raise ConfigError(f"{where} is {value!r}; use one of {', '.join(self.choices)}")
        if self.low is not None and isinstance(parsed, (int, float)) and not parsed >= self.low:
            raise ConfigError(f"{where} is {value!r}; it must be at least {self.low:g}")
        if self.high is not None and isinstance(parsed, (int, float)) and parsed > self.high:
            raise ConfigError(f"{where} is {value!r}; it can be at most {self.high:g}")
        return parsed


# -- ways to write a value -------------------------------------------------------------------------


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _number(value: object) -> float:
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


def _numbers(value: object) -> tuple[int, ...]:
    """``2,6,11``; nothing is ()."""
    items = value.split(",") if isinstance(value, str) else _list(value)
    return tuple(int(item) for item in items if item.strip())


# Of each kind: how a value is read, and what it must be, in words.
_KINDS: dict[str, tuple[Callable[[object], Any], str]] = {
    "text": (_text, "text in quotes"),
    "count": (_count, "a whole number"),
    "number": (_number, "a number"),
    "seconds": (_number, "a number of seconds"),
    "switch": (_switch, "true or false"),
    "list": (_list, "a list of texts"),
    "size": (_size, "a size, as in 512M or 2G"),
    "length": (_length, "auto or a whole number"),
    "numbers": (_numbers, "numbers, as in 2,6,11"),
}
SPELT = ("size", "length", "numbers")  # kinds that a command line takes as text
_KIND_OF = {str: "text", int: "count", float: "number", bool: "switch"}


# -- tables ----------------------------------------------------------------------------------------


def setting(default: Any, help: str, **more: Any) -> Any:
    """A field of a table; ``more`` are fields of ``Key``. MISSING: it must be given."""
    return field(default=default, kw_only=default is MISSING, metadata={"key": Key(help, **more)})


def under(panel: str) -> Callable[..., Any]:
    """``setting`` for the fields of one heading."""
    return partial(setting, panel=panel)


def changed(table: type, name: str, default: Any, **changes: Any) -> Any:
    """The setting of another table with another default, or said in other words."""
    (key,) = (item.metadata["key"] for item in fields(table) if item.name == name)
    return field(default=default, metadata={"key": replace(key, **changes)})


@dataclass(frozen=True)
class TableEntry:
    """One field of a table; ``type`` is without None, and ``optional`` says whether that may be."""

    name: str
    type: Any
    optional: bool
    default: Any  # MISSING: it must be given
    key: Key

    @property
    def flag(self) -> str:
        """The long option, as ``--draft-length``."""
        long = (item.partition("/")[0] for item in self.key.flags if item.startswith("--"))
        return next(long, flag(self.name))

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is tuple


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def entries(table: type, where: str) -> Iterator[TableEntry]:
    """The settings of a table that can be set ``where``: command, server, LLM or beside."""
    hints = get_type_hints(table)
    for item in fields(table):
        key = item.metadata.get("key")
        if key is not None and where not in key.but:
            yield entry_of(item.name, hints[item.name], item)


def entry_of(name: str, hint: Any, item: Field[Any]) -> TableEntry:
    """The entry of a ``setting`` with this name and type."""
    key = item.metadata["key"]
    inner = [part for part in get_args(hint) if part is not NoneType]
    type_ = hint if get_origin(hint) is tuple or not inner else inner[0]
    key = replace(key, kind=key.kind or _KIND_OF.get(type_, "list"))
    return TableEntry(name, type_, NoneType in get_args(hint), item.default, key)


# -- the engine ------------------------------------------------------------------------------------

_model, _engine = under("Model"), under("Engine")


def _sampled(name: str, **bounds: float) -> Any:
    """What requests get that do not name a sampling parameter."""
    help = f"{name} of requests that name none."
    return _model(None, help, shown="the checkpoint's", but=("command", "beside"), **bounds)


@dataclass(frozen=True)
class LoadSettings:
    """How a model is loaded."""

    dtype: str = _engine(
        "auto",
        "Numbers of the model.",
        choices=("auto", "bfloat16", "float16", "float32"),
        but=("beside",),
    )
    device: str = _engine("auto", "auto, cpu, cuda, cuda:1 ...", but=("beside",))
    backend: str = _engine(
        "auto",
        "What runs the forwards: auto, native (kernels of our own), reference (torch), or a "
        "registered one.",
        but=("beside",),
    )
    quantize: str | None = _engine(
        None,
        "Round the weights when loading, on a processor; none: dequantise those of a file.",
        choices=("int8", "int4", "none"),
        shown="as they are",
        but=("beside",),
    )
    tensor_parallel: int = _engine(
        1,
        "Processes that share the model's weights, each on a GPU of its own or on a part of the "
        "processor.",
        low=1,
        but=("beside",),
    )
    offload: str | None = _engine(
        None,
        "Where layers stay that the device has no memory for; a step brings them there.",
        choices=("cpu", "disk"),
        shown="no",
        but=("beside",),
    )
    weights_memory: int | None = _engine(
        None,
        "With offload: the device's memory for layers that stay there.",
        kind="size",
        shown="half of what is free",
        but=("beside",),
    )
    threads: int | None = _engine(
        None, "Processor threads.", low=1, shown="torch's choice", but=("LLM", "beside")
    )
    kv_cache_memory: int | None = _engine(
        None, "Memory for keys and values, as in 512M or 2G.", kind="size", shown="auto"
    )
    kv_cache_dtype: str = _engine(
        "auto",
        "Numbers of the target's keys and values; auto: as the model's.",
        choices=("auto", "int8"),
        but=("beside",),
    )


@dataclass(frozen=True)
class EngineSettings(LoadSettings):
    """Everything about an engine that is not a model: the one table of it.

    ``LLM`` and ``LLM.beside`` have these as keywords, the commands as options, a server as flags
    and as keys of its file. None is left open: a profile of ``paceline tune`` or the default of
    ``EngineOptions`` (build.py) fills it.
    """

    draft_length: int | str | None = _model(
        None,
        "Tokens drafted a step: a number, or auto to adapt.",
        kind="length",
        low=0,
        high=64,
        shown="auto",
    )
    drafting: str = _model(
        "fair",
        "What drafts are for: fair, no request is slowed down for another's sake; throughput, most "
        "tokens a second of all.",
        choices=("fair", "throughput"),
    )
    draft_quantize: str | None = _model(
        None,
        "Round the weights of a draft model when loading, on a processor.",
        choices=("int8", "int4"),
        shown="no",
    )
    draft_device: str | None = _model(
        None, "Device of a draft model, such as cpu beside a target on a GPU.", shown="the target's"
    )
    draft_offload: str | None = _model(
        None,
        "As offload, of a draft model.",
        choices=("cpu", "disk"),
        shown="no",
    )
    max_draft_length: int | None = _model(
        None, "Bound of the length auto.", low=1, but=("LLM", "command", "server")
    )
    rule: str | None = _model(
        None,
        "Acceptance rule of sampled drafts without a seed.",
        choices=("auto", "token", "block", "coupled"),
        shown="auto",
    )
    generation_config: str = _model(
        "auto",
        "Sampling of requests that do not say it: auto, as the checkpoint's generation_config.json "
        "has it; none, neutral.",
        choices=("auto", "none"),
        but=("command", "beside"),
    )
    default_temperature: float | None = _sampled("temperature", low=0, high=100)
    default_top_p: float | None = _sampled("top_p", high=1)
    default_top_k: int | None = _sampled("top_k", low=-1)
    default_min_p: float | None = _sampled("min_p", low=0, high=1)
    default_repetition_penalty: float | None = _sampled("repetition_penalty", low=0.01, high=100)
    lossy: bool = _model(
        False,
        "Typical acceptance: faster sampling that is NOT the model's own distribution.",
        but=("server",),
    )
    log_decisions: bool = _model(
        False, "Log who drafts for a request, how far and why, when that changes.", but=("command",)
    )
    max_batch_size: int | None = _engine(None, "Sequences decoded together.", low=1, shown="8")
    prefix_sharing: bool = _engine(
        True, "Requests that begin alike share what is cached.", but=("command", "server")
    )
    seed: int | None = _engine(
        None, "Of requests that bring none.", but=("command", "server"), shown="random"
    )


def explicit(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Of ``values`` the engine's settings that ``where`` knows and that are not left open.

    Raises ConfigError for a value of a wrong kind; objects, such as dtypes of torch, are left, and
    so are sizes in bytes.
    """
    plain = (str, int, float, list, tuple, dict)

    def read(entry: TableEntry, value: Any) -> Any:
        size = entry.key.kind == "size" and type(value) is int
        given = isinstance(value, plain) and not size
        return entry.key.parse(value, entry.name) if given else value

    return {
        entry.name: read(entry, value)
        for entry in entries(EngineSettings, where)
        if (value := values.get(entry.name)) is not None
    }
