"""A report on a terminal (by Rich), as Markdown, and as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from paceline.errors import ConfigError
from paceline.files import check_writable, render_template, replace_files, write_errors
from paceline.files.ownership import is_signed, signed
from paceline.lab.report.document import Report, Table, is_number, show

_SHORT = 24  # characters of a column that stays on one line
_GAP = 2  # characters between columns, and half of it at the edges


def check_path(path: str | Path) -> None:
    """Refuse a report of unknown kind, or over a file that is none of ours, before the
    measuring begins. Raises ConfigError."""
    if Path(path).suffix not in (".md", ".html"):
        raise ConfigError(f"report {str(path)!r}: end its name in .md or .html")
    check_writable(path, "the report", is_signed)


def write(report: Report, path: str | Path) -> None:
    """Write ``.md`` or ``.html``. Raises ConfigError on another suffix, and WriteError."""
    check_path(path)
    path = Path(path)
    template = Path(__file__).with_name(f"report{path.suffix}")
    text = render_template(
        template, report=report, as_table=as_table, is_number=is_number, show=show
    )
    with write_errors("the report", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_files({path: signed(text).encode("utf-8")}, "the report", is_signed)


def print_report(report: Report, console: Console, details: bool = True) -> None:
    """All sections, or those that are no ``detail``."""
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
    """With its title above and its note below, both as wide as the console. A table that is too
    wide is printed in parts, each with the columns that tell the rows apart; no word breaks that
    has room on a line."""
    columns, rows = range(len(table.columns)), table.rows
    keys = next((n for n in columns if len({tuple(row[:n]) for row in rows}) == len(rows)), 1) or 1
    part, parts = [*columns[:keys]], list[list[int]]()
    for column in columns[keys:]:
        least = sum(_needs(table, i)[0] + _GAP for i in (*part, column))
        if len(part) > keys and least > console.width:
            parts.append(part)
            part = part[:keys]
        part.append(column)
    if table.title:
        console.print(RichText(table.title, style="italic"))
    for chosen in (*parts, part):
        cells = [[row[i] for i in chosen] for row in rows]
        console.print(_rich_table(Table([table.columns[i] for i in chosen], cells), console.width))
    if table.note:
        console.print(RichText(table.note, style="dim italic"))


def _rich_table(table: Table, width: int) -> RichTable:
    """A table's columns; numbers stand to the right."""
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    needs = [_needs(table, index) for index in range(len(table.columns))]
    widths = _widths(needs, width - _GAP * len(needs))
    columns = zip(table.columns, _of_numbers(table), widths, strict=True)
    for heading, numbers, wide in columns:
        shown.add_column(
            heading, justify="right" if numbers else "left", overflow="fold", width=wide
        )
    for row in table.rows:
        shown.add_row(*(RichText(show(cell)) for cell in row))
    return shown


def _needs(table: Table, index: int) -> tuple[int, int]:
    """Characters of a column: of its longest word (a short column stays on one line), and of its
    longest line."""
    cells = [table.columns[index], *(show(row[index]) for row in table.rows)]
    lines = [line for cell in cells for line in cell.split("\n")]
    most = max(1, *map(cell_len, lines))
    words = [cell_len(word) for line in lines for word in line.split()]
    return (most if most <= _SHORT else max(words)), most


def _widths(needs: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Of columns that share ``room`` characters: words stay whole where they can, and what is left
    goes to the columns with the longest lines for their widths."""
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
    """A table as Markdown writes it, with its title above and its note below."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    rule = "|" + "|".join("---:" if numbers else "---" for numbers in _of_numbers(table)) + "|"
    rows = [line([show(cell) for cell in row]) for row in table.rows]
    parts = [f"**{table.title}**"] if table.title else []
    parts.append("\n".join([line(table.columns), rule, *rows]))
    if table.note:
        parts.append(f"*{table.note}*")
    return "\n\n".join(parts)
