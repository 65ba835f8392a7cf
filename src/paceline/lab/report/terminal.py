"""Reports on a terminal, by Rich."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from paceline.lab.report.document import Report, Table, Text, is_number, show


def print_report(report: Report, console: Console) -> None:
    """All sections; figures are for files and left out here."""
    for section in report.sections:
        blocks = [block for block in section.blocks if isinstance(block, (Table, Text))]
        if not blocks:
            continue
        console.rule(RichText(section.title, style="bold"), align="left")
        for block in blocks:
            if isinstance(block, Table):
                console.print(rich_table(block))
            else:
                style = "bold red" if block.warning else ""
                console.print(RichText(block.text, style=style))


def rich_table(table: Table) -> RichTable:
    """A table with its title above and its note below; numbers stand to the right."""
    shown = RichTable(
        title=table.title or None,
        caption=table.note or None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for place, heading in enumerate(table.columns):
        cells = [row[place] for row in table.rows if place < len(row) and row[place] is not None]
        right = bool(cells) and all(is_number(cell) for cell in cells if cell != "")
        shown.add_column(heading, justify="right" if right else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(RichText(show(cell)) for cell in row))
    return shown
