"""The parts of a report: sections of tables and paragraphs. A command builds one ``Report``, prints
it and, if asked, writes it to a file (render.py). Columns define figures once, for JSON and for
tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.filesize import decimal

from paceline.files import read_toml

Cell = str | int | float | None
NOTES = read_toml(Path(__file__).with_name("notes.toml"), "the notes of reports")


@dataclass(frozen=True)
class Table:
    """Rows of cells under ``columns``; numbers are aligned right, None is an empty cell, floats are
    shown with three digits. ``note`` is printed below the table."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph. ``warning``: something the reader must not miss."""

    text: str
    warning: bool = False


Block = Table | Text


@dataclass
class Section:
    """``detail``: a terminal shows it on request; files always have it."""

    title: str
    blocks: list[Block] = field(default_factory=list)
    detail: bool = False


@dataclass
class Report:
    title: str
    sections: list[Section] = field(default_factory=list)

    def add(self, title: str, *blocks: Block, detail: bool = False) -> None:
        """Add a section. Tables without rows, empty texts and empty sections are left out."""
        filled = [b for b in blocks if (b.rows if isinstance(b, Table) else b.text)]
        if filled:
            self.sections.append(Section(title, filled, detail))


def show(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def is_number(cell: Cell) -> bool:
    """Whether a cell is aligned right: a number, perhaps with a unit (1.83x, 12 ms, 4 %)."""
    if isinstance(cell, str):
        return bool(cell) and (cell[0].isdigit() or (cell[0] in "+-±<" and len(cell) > 1))
    return cell is not None


times = "{:.2f}x".format
number = "{:.2f}".format
share = "{:.0%}".format


def milliseconds(seconds: float) -> str:
    """Milliseconds with three digits, without the unit, which is in the heading."""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def size(count: float) -> str:
    """Bytes with decimal units (powers of 1000), like bandwidths."""
    return decimal(round(count))


@dataclass(frozen=True)
class Spread:
    """The median over rounds, with the lowest and the highest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def shown(self, digits: int, unit: str = "") -> str:
        """The median ± half of the range between the lowest and the highest round."""
        half = (self.high - self.low) / 2
        return f"{self.median:.{digits}f}{unit}" + (f" ±{half:.{digits}f}" if half else "")


class Column(NamedTuple):
    """A figure of an item: its key in JSON and its heading in tables; without a key or a heading it
    is left out there. ``path``: the dotted attributes or mapping keys that lead to the value; "" is
    the item itself, None means the same as the key. ``shown`` and ``stored`` convert the value for
    tables and for JSON. None is an empty cell."""

    key: str
    heading: str = ""
    path: str | None = None
    shown: Callable[[Any], Cell] = lambda value: value
    stored: Callable[[Any], Any] = lambda value: value

    def value(self, item: Any) -> Any:
        path = self.key if self.path is None else self.path
        for name in path.split(".") if path else ():
            item = item[name] if isinstance(item, Mapping) else getattr(item, name)
        return item

    def cell(self, item: Any) -> Cell:
        value = self.value(item)
        return None if value is None else self.shown(value)


def record_of(item: Any, columns: Sequence[Column]) -> dict[str, Any]:
    """The JSON object of an item: the columns with a key."""
    return {c.key: c.stored(c.value(item)) for c in columns if c.key}


def table_of(
    items: Iterable[Any], columns: Sequence[Column], note: str = "", title: str = ""
) -> Table:
    """A row for each item, of the columns that have a heading."""
    seen = [column for column in columns if column.heading]
    rows = [[column.cell(item) for column in seen] for item in items]
    return Table([column.heading for column in seen], rows, title, note)


def table_across(
    corner: str, items: Mapping[str, Any], columns: Sequence[Column], note: str = ""
) -> Table:
    """A column for each item, under its name, and a row for each of ``columns``."""
    rows = [[column.heading, *map(column.cell, items.values())] for column in columns]
    return Table([corner, *items], rows, note=note)
