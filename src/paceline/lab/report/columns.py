"""What a report says of each thing that was measured: once, for JSON and for tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from paceline.errors import DataError
from paceline.lab.report.document import Cell, Table

# An acceptance where there was a drafter that drafted nothing; and the note beside such a table.
NONE_TRIED = "none tried"
UNTRIED = "none tried: no draft was tried, as it would not have paid."

# -- formats -------------------------------------------------------------------------------------

times = "{:.2f}x".format
number = "{:.2f}".format
share = "{:.0%}".format


def milliseconds(seconds: float) -> str:
    """Three digits, without a unit: the heading has it."""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


# -- columns -------------------------------------------------------------------------------------

Restored = TypeVar("Restored")


def _same(value: Any) -> Any:
    return value


class Column(NamedTuple):
    """A figure of an item: its key in JSON, its heading in a table, and how it is shown there.

    ``path``: the attributes, or keys of mappings, that lead to it; "" is the item itself, None the
    key. Without a key or a heading it is left out there. What is None is an empty cell.
    """

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


def item_of(record: Mapping[str, Any], columns: Sequence[Column], kind: type[Restored]) -> Restored:
    """The item, a dataclass, of which ``record_of`` made the record.

    Takes the columns that store an attribute of the item as it is; the dataclass needs defaults for
    all others. Raises DataError if a value is missing or of another type.
    """
    from msgspec import ValidationError, convert

    kept = {c.key if c.path is None else c.path: c.key for c in columns if c.stored is _same}
    names = {name: key for name, key in kept.items() if name.isidentifier() and key in record}
    fields = {name: record[key] for name, key in names.items()}
    try:
        return convert(fields, kind, strict=False)
    except ValidationError as error:
        raise DataError(f"this is no record of {kind.__name__}: {error}") from None


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


@dataclass(frozen=True)
class Sheet:
    """A list of items as a table and as JSON: ``key`` there, ``title`` of its section here."""

    key: str
    title: str
    columns: Sequence[Column]
    note: str = ""

    def table(self, items: Iterable[Any]) -> Table:
        return table_of(items, self.columns, self.note)

    def records(self, items: Iterable[Any]) -> list[dict[str, Any]]:
        return [record_of(item, self.columns) for item in items]

    def read(self, records: Iterable[Mapping[str, Any]], kind: type[Restored]) -> list[Restored]:
        """As of ``item_of``. Raises DataError."""
        return [item_of(record, self.columns, kind) for record in records]
