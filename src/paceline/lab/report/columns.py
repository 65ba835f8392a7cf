"""What a report says of each thing that was measured: once, for JSON and for tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.filesize import decimal

from paceline.lab.report.document import Cell, Table

# An acceptance where there was a drafter that drafted nothing; and the note beside such a table.
NONE_TRIED = "none tried"
UNTRIED = "none tried: no draft was tried, as it would not have paid."

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
