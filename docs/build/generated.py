"""The tables of the reference, from the tables of the code: they cannot differ from it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any

import typer
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.text import Text

from paceline.cli.main import app
from paceline.draft.spec import DraftSpec
from paceline.drafters import RECORDS
from paceline.server.api.anthropic import MessagesRequest
from paceline.server.api.protocol import ChatRequest, CompletionRequest, Speculation
from paceline.server.api.responses_api import ResponsesRequest
from paceline.server.config import SECTIONS, keys
from paceline.server.metrics import Metrics
from paceline.settings import TableEntry


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


# -- settings --------------------------------------------------------------------------------------


def settings() -> str:
    """A table for each section of the server's file."""
    columns = ("Setting", "In Python", "Default", "Meaning")
    parts = []
    for section in SECTIONS:
        entries = [entry for entry in keys() if entry.section == section]
        rows = [(f"`{e.flag}`", _in_python(e), _default(e), e.help) for e in entries]
        parts.append(f"## {section.capitalize()}\n\n{table(columns, rows)}")
    return "\n\n".join(parts)


def _in_python(entry: TableEntry) -> str:
    engine = entry.section in ("model", "engine") and "LLM" not in entry.except_in
    return f"`{entry.name}`" if engine else ""


def _default(entry: TableEntry) -> str:
    if entry.shown is not None:
        return entry.shown
    return "" if entry.default in (MISSING, None, ()) else f"`{entry.default}`"


# -- fields of the server --------------------------------------------------------------------------


def request_fields() -> str:
    """Of the four kinds of requests, and of ``speculation`` in all of them."""
    models: dict[str, type[BaseModel]] = {
        "completions": CompletionRequest,
        "chats": ChatRequest,
        "responses": ResponsesRequest,
        "messages": MessagesRequest,
    }
    names = dict.fromkeys(name for model in models.values() for name in model.model_fields)
    rows = list[tuple[str, ...]]()
    for name in names:
        where = [kind for kind, model in models.items() if name in model.model_fields]
        shown = {kind: _field(name, models[kind].model_fields[name]) for kind in where}
        label, kind, default, bounds = shown[where[0]]
        if len({row[2] for row in shown.values()}) > 1:
            default = ", ".join(f"{row[2]} ({kind})" for kind, row in shown.items() if row[2])
        asked = "all" if len(where) == len(models) else ", ".join(where)
        rows.append((label, kind, default, bounds, asked))
    inner = [_field(f"speculation.{name}", info) for name, info in _fields(Speculation)]
    return table(
        ("Field", "Type", "Default", "Bounds", "In"), [*rows, *((*row, "all") for row in inner)]
    )


def _fields(model: type[BaseModel]) -> Iterable[tuple[str, FieldInfo]]:
    return model.model_fields.items()


def _field(name: str, info: FieldInfo) -> tuple[str, str, str, str]:
    annotation: Any = info.annotation
    kind = getattr(annotation, "__name__", "") if isinstance(annotation, type) else str(annotation)
    shown = "" if info.default in (PydanticUndefined, None) else f"`{info.default!r}`"
    return f"`{info.alias or name}`", f"`{_short(kind)}`", shown, _bounds(info)


def _short(kind: str) -> str:
    """A type without the modules of its parts."""
    kind = re.sub(r"Annotated\[(\w+), FieldInfo\(.*?\)\]\)?\]", r"\1", kind)
    kind = re.sub(r"Annotated\[(\w+), .*?\)\]", r"\1", kind)
    kind = re.sub(r"\b(?:[a-z_]+\.)+", "", kind)
    return kind if len(kind) <= 60 else f"{kind[:57]}..."


def _bounds(info: FieldInfo) -> str:
    words = {Ge: "at least {0.ge}", Gt: "above {0.gt}", Le: "at most {0.le}", Lt: "below {0.lt}"}
    words |= {MaxLen: "at most {0.max_length} long", MinLen: "at least {0.min_length} long"}
    return ", ".join(words[type(m)].format(m) for m in info.metadata if type(m) in words)


# -- drafters --------------------------------------------------------------------------------------


def drafters() -> str:
    """Each kind: how it is written, its options with their defaults, and its page."""
    parts = []
    for record in RECORDS:
        doc = " ".join((record.__doc__ or "").split())
        page = record.page or f"{record.kind}.md"
        page = page if "://" in page else f"../drafters/{page}"
        text = f"## {record.kind}\n\n`{record.__name__}`. {doc} [More]({page}).\n"
        rows = list(_options(record))
        parts.append(f"{text}\n{table(('Option', 'Default', 'Type'), rows)}" if rows else text)
    return "\n\n".join(parts)


def _options(record: type[DraftSpec]) -> Iterable[tuple[str, str, str]]:
    for item in fields(record):
        name = item.metadata.get("key", item.name)
        shown = "must be given" if item.default is MISSING else f"`{item.default}`"
        yield f"`{name}`", shown, f"`{item.type}`"


# -- metrics ---------------------------------------------------------------------------------------


def metrics() -> str:
    """Name with labels, type and documentation of every metric of the server."""
    rows = []
    for metric in Metrics().registry._collector_to_names:
        family = metric.describe()[0]
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = ",".join(metric._labelnames)
        shown = f"`{name}{{{labels}}}`" if labels else f"`{name}`"
        rows.append((shown, family.type, family.documentation))
    return table(("Metric", "Type", "Meaning"), rows)


# -- commands --------------------------------------------------------------------------------------

_SHARED = 4  # commands from which on an option is described once, behind all of them


def commands() -> str:
    """Usage, meaning and options of every command; then the options that many of them share."""
    listed = dict(_commands(typer.main.get_command(app), "paceline"))
    users: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, command in listed.items():
        for parameter in command.params:
            if parameter.name not in ("help", "help_all"):
                users[_option(parameter)].append(name)
    shared: dict[str, list[tuple[str, str, str]]] = {
        "Shared options": [],
        "Options of training": [],
    }
    for row, names in users.items():
        if len(names) >= _SHARED:
            training = all(name.startswith("paceline train ") for name in names)
            shared["Options of training" if training else "Shared options"].append(row)
    columns, parts = ("Option", "Default", "Meaning"), []
    for name, command in listed.items():
        mine = [row for row, names in users.items() if name in names and len(names) < _SHARED]
        parts += [f"### {name}", (command.help or "").strip()]
        parts += [table(columns, mine)] if mine else []
        for title, rows in shared.items():
            if flags := [row[0] for row in rows if name in users[row]]:
                parts.append(f"[{title}](#{title.lower().replace(' ', '-')}): {', '.join(flags)}.")
    for title, rows in shared.items():
        parts += [f"### {title}", table(columns, rows)]
    return "\n\n".join(parts)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for inner in command.commands.values():
        yield from _commands(inner, f"{name} {inner.name}")


def _option(parameter: Any) -> tuple[str, str, str]:
    """Its flags, or its name, its default and its help."""
    flags = (*parameter.opts, *parameter.secondary_opts)
    if parameter.param_type_name == "argument":
        flags = ((parameter.metavar or parameter.name).upper(),)
    shown, default = parameter.show_default, parameter.default
    if not isinstance(shown, str):
        values = default if isinstance(default, (list, tuple)) else [default]
        known = shown and default is not None and default is not False and default != ""
        shown = ", ".join(f"`{value}`" for value in values) if known else ""
    if parameter.required:
        shown = "must be given"
    help = Text.from_markup(parameter.help or "").plain
    if "|" in (parameter.metavar or ""):
        help += f" One of {parameter.metavar.replace('|', ', ')}."
    return ", ".join(f"`{flag}`" for flag in flags), shown, help


TABLES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "metrics": metrics,
    "settings": settings,
    "request_fields": request_fields,
    "drafters": drafters,
}
