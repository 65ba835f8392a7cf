"""Tables of settings. Each setting is declared once: its default, help, allowed values, and the
places where it can be set.

A table is a frozen dataclass whose fields are made by ``setting``. The options of the commands
(cli/options.py), the flags and the file of a server (server/config.py) and the configurations of
trainings (train/configs.py) come from such tables. ``EngineSettings`` is that of the engine.
Nothing here imports torch, so that ``--help`` is fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import lru_cache, partial
from math import isinf
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from paceline.core.memory import parse_bytes
from paceline.errors import ConfigError


@dataclass(frozen=True)
class TableEntry:
    """One setting.

    ``panel``: its heading in ``--help`` and, in lower case, its section in a file. ``kind``: a
    notation that its type does not imply: size, length ... ``low``, ``high``: bounds, included.
    ``advice`` follows the ``choices`` in errors. ``shown``: the default in words; "" shows none.
    ``flags`` replace ``--name``. ``except_in``: where it cannot be set: "command", "server", "LLM",
    "with_draft". The last four are the field's own, set by ``entry_of``: ``type`` leaves out None,
    which ``optional`` allows."""

    help: str
    panel: str = ""
    kind: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    advice: str = ""
    shown: str | None = None
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    except_in: tuple[str, ...] = ()
    name: str = ""
    type: Any = None
    optional: bool = False
    default: Any = None  # MISSING: the setting is required

    @property
    def section(self) -> str:
        return self.panel.lower()

    @property
    def flag(self) -> str:
        """The long option, as ``--draft-length``."""
        long = (item.partition("/")[0] for item in self.flags if item.startswith("--"))
        return next(long, flag(self.name))

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is tuple

    def read(self, value: object, where: str) -> Any:
        """Parse and check a value. ``where`` begins the message of errors. Raises ConfigError."""
        of_type = _typed, _WORDS.get(self.type, "a list of texts")
        parse, words = _KINDS.get(self.kind, of_type)
        try:
            parsed = parse(self.type, value)
            if self.low is not None and parsed == ():
                raise ValueError
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except (TypeError, ValueError):
            raise ConfigError(f"{where} is {value!r}; it must be {words}") from None
        if self.choices and parsed not in self.choices:
            named = f"{where} is {value!r}; use one of {', '.join(self.choices)}"
            raise ConfigError(named + self.advice)
        numbers = parsed if isinstance(parsed, tuple) else (parsed,)
        for number in (item for item in numbers if isinstance(item, (int, float))):
            if self.low is not None and not number >= self.low:
                raise ConfigError(f"{where} is {value!r}; it must be at least {self.low:g}")
            if self.high is not None and number > self.high:
                raise ConfigError(f"{where} is {value!r}; it can be at most {self.high:g}")
        return parsed


# -- tables ----------------------------------------------------------------------------------------


def setting(default: Any, help: str, **more: Any) -> Any:
    """Make a field of a table. ``more``: of ``TableEntry``. A default MISSING makes it required."""
    entry = TableEntry(help, **more)
    return field(default=default, kw_only=default is MISSING, metadata={"entry": entry})


def under(panel: str) -> Callable[..., Any]:
    """``setting`` for fields under one heading."""
    return partial(setting, panel=panel)


def changed(table: type, name: str, default: Any, **changes: Any) -> Any:
    """The setting of another table with another default or other properties."""
    (entry,) = (item.metadata["entry"] for item in fields(table) if item.name == name)
    return field(default=default, metadata={"entry": replace(entry, **changes)})


def flag(name: str) -> str:
    """The long option of a setting."""
    return f"--{name.replace('_', '-')}"


@lru_cache
def entries(table: type, where: str = "") -> tuple[TableEntry, ...]:
    """The settings of a table that can be set in ``where``: command, server, LLM or beside."""
    hints = get_type_hints(table)
    settings = [item for item in fields(table) if "entry" in item.metadata]
    return tuple(
        entry_of(item.name, hints[item.name], item)
        for item in settings
        if where not in item.metadata["entry"].except_in
    )


def entry_of(name: str, hint: Any, item: Field[Any]) -> TableEntry:
    """The entry of a field made by ``setting``, with this name and type."""
    inner = [part for part in get_args(hint) if part is not NoneType]
    type_ = hint if get_origin(hint) is tuple or not inner else inner[0]
    entry: TableEntry = item.metadata["entry"]
    optional = NoneType in get_args(hint)
    return replace(entry, name=name, type=type_, optional=optional, default=item.default)


# -- parsing values --------------------------------------------------------------------------------


def _typed(kind: Any, value: object) -> Any:
    """Convert to the type. A single text may stand for a list of one; empty texts are refused."""
    is_list = get_origin(kind) is tuple
    parsed = msgspec.convert([value] if is_list and isinstance(value, str) else value, kind)
    if not all(item.strip() for item in (parsed if is_list else [parsed]) if isinstance(item, str)):
        raise ValueError
    if isinstance(parsed, float) and isinf(parsed):
        raise ValueError
    return parsed


def _size(_: Any, value: object) -> int:
    return parse_bytes(value if isinstance(value, str) else str(msgspec.convert(value, int)))


def _length(_: Any, value: object) -> int | str:
    if value == "auto":
        return "auto"
    # The values of flags are text.
    return int(value) if isinstance(value, str) and value.isdecimal() else _typed(int, value)


def _lengths(kind: Any, value: object) -> int | str | tuple[int, ...]:
    """Parse a length, or several as in ``1,2,4``."""
    several = isinstance(value, str) and "," in value
    return tuple(map(int, str(value).split(","))) if several else _length(kind, value)


def _numbers(kind: Any, value: object) -> Any:
    """Parse ``2,6,11``; empty text is ()."""
    if isinstance(value, str):
        value = [item.strip() for item in value.split(",")] if value.strip() else ()
    return msgspec.convert(value, kind, strict=False)


# What a value must be, in words, by type and by kind; for kinds, which are text on a command line,
# also the parser.
_WORDS = {str: "text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
_KINDS: dict[str, tuple[Callable[[Any, object], Any], str]] = {
    "size": (_size, "a size, as in 512M or 2G"),
    "length": (_length, "auto or a whole number"),
    "lengths": (_lengths, "auto, a whole number, or several, as in 1,2,4"),
    "numbers": (_numbers, "numbers, as in 2,6,11"),
}


# -- the engine ------------------------------------------------------------------------------------

_model, _engine = under("Model"), under("Engine")
_load = partial(_engine, except_in=("with_draft",))


def _sampled(name: str, **bounds: float) -> Any:
    """The default of a sampling parameter, for requests that leave it open."""
    help = f"{name} of requests that do not set it."
    return _model(
        None, help, shown="the checkpoint's", except_in=("command", "with_draft"), **bounds
    )


@dataclass(frozen=True)
class LoadSettings:
    """Settings of loading a model."""

    dtype: str = _load(
        "auto", "Data type of the model.", choices=("auto", "bfloat16", "float16", "float32")
    )
    device: str = _load("auto", "Where the model runs: auto, cpu, cuda, cuda:1 ...")
    backend: str = _load(
        "auto",
        "What runs the forwards: auto, native (C++ kernels), reference (torch), or the name of a "
        "registered backend.",
    )
    quantize: str | None = _load(
        None,
        "Round the weights to 8 or 4 bits. Done while loading, on CPUs only; none dequantises a "
        "quantised checkpoint.",
        choices=("int8", "int4", "none"),
        advice="; AWQ, GPTQ and other quantised checkpoints are recognised without it",
        shown="the checkpoint's precision",
    )
    tensor_parallel: int = _load(
        1,
        "Processes that share the weights, each on its own GPU or its share of the CPU cores.",
        low=1,
    )
    offload: str | None = _load(
        None,
        "Where to keep the layers that do not fit into the device's memory; each forward copies "
        "them to the device.",
        choices=("cpu", "disk"),
        shown="no",
    )
    weights_memory: int | None = _load(
        None,
        "With --offload: how much of the device's memory the weights may take.",
        kind="size",
        shown="half of the free memory",
    )
    threads: int | None = _engine(
        None, "CPU threads.", low=1, shown="torch's choice", except_in=("LLM", "with_draft")
    )
    kv_cache_memory: int | None = _engine(
        None, "Memory for the KV cache, such as 512M or 2G.", kind="size", shown="auto"
    )
    kv_cache_dtype: str = _load(
        "auto",
        "Data type of the target's KV cache; auto is the model's own.",
        choices=("auto", "int8"),
    )


@dataclass(frozen=True)
class EngineSettings(LoadSettings):
    """All settings of an engine other than its models.

    They are keywords of ``LLM`` and ``LLM.with_draft``, options of the commands, and flags and
    file keys of a server. A setting that is None is open: it takes the value of tuned settings
    (``paceline tune``) or the default of ``EngineOptions`` (build.py)."""

    draft_length: int | str | None = _model(
        None,
        "Draft tokens per step; auto adapts the number while decoding.",
        kind="length",
        low=0,
        high=64,
        shown="auto",
    )
    drafting: str = _model(
        "fair",
        "What to optimise when several requests run: fair, drafts may not make any request slower "
        "than plain decoding; throughput, the most tokens per second of the whole batch.",
        choices=("fair", "throughput"),
    )
    draft_quantize: str | None = _model(
        None, "Like --quantize, but for the draft model.", choices=("int8", "int4"), shown="no"
    )
    draft_device: str | None = _model(
        None,
        "Device of the draft model, such as cpu with the target on a GPU.",
        shown="the target's",
    )
    draft_offload: str | None = _model(
        None, "Like --offload, but for the draft model.", choices=("cpu", "disk"), shown="no"
    )
    rule: str | None = _model(
        None,
        "Acceptance rule for drafts of requests that sample without a seed.",
        choices=("auto", "token", "block", "coupled"),
        shown="auto",
    )
    generation_config: str = _model(
        "auto",
        "Default sampling parameters: auto takes them from the checkpoint's "
        "generation_config.json; none uses neutral values, which means greedy decoding.",
        choices=("auto", "none"),
        except_in=("command", "with_draft"),
    )
    default_temperature: float | None = _sampled("temperature", low=0, high=100)
    default_top_p: float | None = _sampled("top_p", high=1)
    default_top_k: int | None = _sampled("top_k", low=-1)
    default_min_p: float | None = _sampled("min_p", low=0, high=1)
    default_repetition_penalty: float | None = _sampled("repetition_penalty", low=0.01, high=100)
    log_decisions: bool = _model(
        False,
        "Log the drafter and draft length of each request, and why, whenever they change.",
        except_in=("command",),
    )
    max_model_len: int | None = _engine(
        None, "Most tokens of a sequence, prompt plus answer.", low=2, shown="the model's"
    )
    strict: bool = _engine(
        False,
        "Stop with a traceback when a drafter fails, instead of continuing without drafts (also "
        "PACELINE_STRICT=1).",
        except_in=("server",),
    )
    max_batch_size: int | None = _engine(
        None, "Most sequences that are decoded in one batch.", low=1, shown="8"
    )
    prefix_sharing: bool = _engine(
        True, "Requests with a common prefix share its KV cache.", except_in=("command", "server")
    )
    seed: int | None = _engine(
        None,
        "Seed of requests that do not set one.",
        low=0,
        high=2**63 - 1,
        except_in=("command", "server"),
        shown="random",
    )


@dataclass(frozen=True)
class AdapterSettings:
    """LoRA adapters to load with a model, each written as NAME=FOLDER."""

    lora: tuple[str, ...] = _model(
        (),
        "LoRA adapter. Requests to a server choose one by its name as their model; a command uses "
        "the first.",
        shown="none",
        metavar="NAME=FOLDER",
    )

    @property
    def adapters(self) -> dict[str, str]:
        """Folders by name. Raises ConfigError."""
        pairs = [pair.partition("=") for pair in self.lora]
        for pair, (name, _, folder) in zip(self.lora, pairs, strict=True):
            if not name or not folder:
                raise ConfigError(f"lora is {pair!r}; write NAME=FOLDER, as in sql=adapters/sql")
        if len({name for name, _, _ in pairs}) < len(pairs):
            raise ConfigError("two adapters of lora have one name; rename one")
        return {name: folder for name, _, folder in pairs}


def explicit(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The engine settings among ``values`` that ``where`` accepts and that are not None."""
    names = (entry.name for entry in entries(EngineSettings, where))
    return {name: values[name] for name in names if values.get(name) is not None}
