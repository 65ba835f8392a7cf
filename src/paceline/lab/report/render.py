"""Renders a report on a terminal (with rich), as Markdown, or as an HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from paceline.errors import ConfigError
from paceline.files import render_template, write_files
from paceline.lab.report.document import Report, Table, is_number, show

_SHORT = 24  # a column whose cells have at most this many characters is not wrapped
_GAP = 2  # characters between columns


def check_path(path: str | Path) -> None:
    """Raises ConfigError for a suffix of another format."""
    if Path(path).suffix not in (".md", ".html"):
        raise ConfigError(f"report {str(path)!r}: end its name in .md or .html")


def write(report: Report, path: str | Path) -> None:
    """Write a ``.md`` or ``.html`` file. Raises ConfigError as ``check_path``, and WriteError."""
    check_path(path)
    path = Path(path)
    template = Path(__file__).with_name(f"report{path.suffix}")
    functions = {"as_table": as_table, "is_number": is_number, "show": show}
    text = render_template(template, report=report, **functions)
    write_files({path: text.encode("utf-8")}, "the report")


def print_report(report: Report, console: Console, details: bool = True) -> None:
    """Print all sections or, without ``details``, those that are not marked as ``detail``."""
    for section in report.sections:
        if section.detail and not details:
            continue
        console.rule(RichText(section.title, style="bold"), align="left")
        for block in section.blocks:
            if isinstance(block, Table):
                print_table(block, console)
            else:
                console.print(RichText(block.text, style="bold red" if block.warning else ""))
    hidden = [section.title for section in report.sections if section.detail]
    if hidden and not details:
        console.print(f"With --details: {', '.join(hidden)}.")


def print_table(table: Table, console: Console) -> None:
    """Print a table below its title and above its note. One wider than the console is printed in
    parts, all with the columns that identify a row. Words that fit on a line are not broken, and
    numbers are aligned right."""
    columns, rows, numbers = range(len(table.columns)), table.rows, _of_numbers(table)
    keys = next((n for n in columns if len({tuple(row[:n]) for row in rows}) == len(rows)), 1) or 1
    part, parts = [*columns[:keys]], list[list[int]]()
    for column in columns[keys:]:
        width = sum(_column_width(table, i)[0] + _GAP for i in (*part, column))
        if len(part) > keys and width > console.width:
            parts.append(part)
            part = part[:keys]
        part.append(column)
    if table.title:
        console.print(RichText(table.title, style="italic"))
    for indices in (*parts, part):
        printed = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        needs = [_column_width(table, i) for i in indices]
        widths = _distribute(needs, console.width - _GAP * len(needs))
        for i, width in zip(indices, widths, strict=True):
            side: Literal["left", "right"] = "right" if numbers[i] else "left"
            printed.add_column(table.columns[i], justify=side, overflow="fold", width=width)
        for row in rows:
            printed.add_row(*(RichText(show(row[i])) for i in indices))
        console.print(printed)
    if table.note:
        console.print(RichText(table.note, style="dim italic"))


def _column_width(table: Table, index: int) -> tuple[int, int]:
    """The least width of a column, that of its longest word or, if it is short, of its longest
    line; and the width of its longest line."""
    cells = [table.columns[index], *(show(row[index]) for row in table.rows)]
    lines = [line for cell in cells for line in cell.split("\n")]
    most = max(1, *map(cell_len, lines))
    words = [cell_len(word) for line in lines for word in line.split()]
    return (most if most <= _SHORT else max(words)), most


def _distribute(needs: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Distribute ``room`` characters among columns. Each gets its least width if possible; the rest
    goes to the columns with the longest lines relative to their widths."""
    widths, columns = [least for least, _ in needs], range(len(needs))
    while sum(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    for _ in range(room - sum(widths)):
        fullest = max(columns, key=lambda i: needs[i][1] / widths[i])
        widths[fullest] += needs[fullest][1] > widths[fullest]
    return widths


def _of_numbers(table: Table) -> list[bool]:
    columns = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    filled = [[cell for cell in column if cell not in (None, "")] for column in columns]
    return [bool(cells) and all(map(is_number, cells)) for cells in filled]


def as_table(table: Table) -> str:
    """A table in Markdown, with its title above and its note below."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    rule = "|" + "|".join("---:" if numbers else "---" for numbers in _of_numbers(table)) + "|"
    rows = [line([show(cell) for cell in row]) for row in table.rows]
    parts = [f"**{table.title}**"] if table.title else []
    parts.append("\n".join([line(table.columns), rule, *rows]))
    if table.note:
        parts.append(f"*{table.note}*")
    return "\n\n".join(parts)
