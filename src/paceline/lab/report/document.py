"""The parts of a report: sections of tables and paragraphs. A command builds one
``Report``, prints it and, if asked, writes it to a file (render.py). What is measured is said once,
as columns, for JSON and for tables."""

from __future__ import annotations

import statistics
from collections import Counter
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
    """Rows of cells under ``columns``; numbers stand to the right, None is an empty cell. ``note``
    stands below. Floats are shown with three digits."""

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
    """A title and sections, in the order in which they come."""

    title: str
    sections: list[Section] = field(default_factory=list)

    def add(self, title: str, *blocks: Block, detail: bool = False) -> None:
        self.sections.append(Section(title, list(blocks), detail))


def show(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def is_number(cell: Cell) -> bool:
    """Whether a cell belongs to the right: a number, perhaps with a unit (1.83x, 12 ms, 4 %)."""
    if isinstance(cell, str):
        return bool(cell) and (cell[0].isdigit() or (cell[0] in "+-±<" and len(cell) > 1))
    return cell is not None


# An acceptance where there was a drafter that drafted nothing.
NONE_TRIED = "none tried"


def untried(reasons: Iterable[Mapping[str, int]]) -> str:
    """The note beside such a table, from ``not_drafted`` of those that drafted nothing."""
    counts = sum(map(Counter, reasons), Counter[str]())
    why = "".join(f" ({reason})" for reason, _ in counts.most_common(1))
    return f"{NONE_TRIED}: no draft was tried{why}."


times = "{:.2f}x".format
number = "{:.2f}".format
share = "{:.0%}".format


def milliseconds(seconds: float) -> str:
    """Three digits, without a unit: the heading has it."""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def size(count: float) -> str:
    """Bytes by powers of 1000, as bandwidths are."""
    return decimal(round(count))


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Spread:
    """The median over rounds, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def shown(self, digits: int, unit: str = "") -> str:
        """Half of what lies between the lowest and the highest round stands beside the median."""
        half = (self.high - self.low) / 2
        return f"{self.median:.{digits}f}{unit}" + (f" ±{half:.{digits}f}" if half else "")


class Column(NamedTuple):
    """A figure of an item: its key in JSON, its heading in a table, and how it is shown there.
    ``path``: the attributes, or keys of mappings, that lead to it; "" is the item itself, None the
    key. Without a key or a heading it is left out there. What is None is an empty cell."""

    key: str
    heading: str = ""
    path: str | None = None
    shown: Callable[[Any], Cell] = _same
    stored: Callable[[Any], Any] = _same

    def value(self, item: Any) -> Any:
        path = self.key if self.path is None else self.path
        for name in path.split(".") if path else ():
            item = item[name] if isinstance(item, Mapping) else getattr(item, name)
        return item

    def cell(self, item: Any) -> Cell:
        value = self.value(item)
        return None if value is None else self.shown(value)


def record_of(item: Any, columns: Sequence[Column]) -> dict[str, Any]:
    """What JSON has of an item."""
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
