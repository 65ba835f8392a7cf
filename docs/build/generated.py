"""The tables of the reference, from the tables of the code: they cannot differ from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from paceline.draft.spec import DraftSpec
from paceline.drafters import RECORDS
from paceline.server.api.protocol import ChatRequest, CompletionRequest, Speculation
from paceline.server.config import SECTIONS, keys
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
        entries = [entry for entry in keys() if entry.key.section == section]
        rows = [(f"`{e.flag}`", _in_python(e), _default(e), e.key.help) for e in entries]
        parts.append(f"## {section.capitalize()}\n\n{table(columns, rows)}")
    return "\n\n".join(parts)


def _in_python(entry: TableEntry) -> str:
    engine = entry.key.section in ("model", "engine") and "LLM" not in entry.key.but
    return f"`{entry.name}`" if engine else ""


def _default(entry: TableEntry) -> str:
    if entry.key.shown is not None:
        return entry.key.shown
    return "" if entry.default in (MISSING, None, ()) else f"`{entry.default}`"


# -- fields of the server --------------------------------------------------------------------------


def request_fields() -> str:
    """Of completions and chats, and of ``speculation`` in both."""
    models = {"completions": CompletionRequest, "chats": ChatRequest}
    names = dict.fromkeys(name for model in models.values() for name in model.model_fields)
    rows = []
    for name in names:
        where = [kind for kind, model in models.items() if name in model.model_fields]
        info = next(m.model_fields[name] for m in models.values() if name in m.model_fields)
        asked = "both" if len(where) == len(models) else where[0]
        rows.append((*_field(name, info), asked))
    inner = [_field(f"speculation.{name}", info) for name, info in _fields(Speculation)]
    return table(
        ("Field", "Type", "Default", "Bounds", "In"), [*rows, *((*row, "both") for row in inner)]
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
    kind = re.sub(r"Annotated\[int, FieldInfo\(.*?\)\]\)?\]", "int", kind)
    for prefix in ("typing.", "paceline.server.api.protocol.", "paceline.server.fields."):
        kind = kind.replace(prefix, "")
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
        page = record.page if "://" in record.page else f"../drafters/{record.page}"
        text = f"## {record.kind}\n\n`{record.__name__}`. {doc} [More]({page}).\n"
        rows = list(_options(record))
        parts.append(f"{text}\n{table(('Option', 'Default', 'Type'), rows)}" if rows else text)
    return "\n\n".join(parts)


def _options(record: type[DraftSpec]) -> Iterable[tuple[str, str, str]]:
    for item in fields(record):
        name = item.metadata.get("key", item.name)
        shown = "must be given" if item.default is MISSING else f"`{item.default}`"
        yield f"`{name}`", shown, f"`{item.type}`"


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "request_fields": request_fields,
    "drafters": drafters,
}
