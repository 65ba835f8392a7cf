"""Reports as Markdown, with the figures as files beside them."""

from __future__ import annotations

from pathlib import Path

from paceline.lab.report.document import Block, Figure, Report, Table, Text, is_number, show


def figure_path(report: Path, figure: Figure) -> Path:
    """Where a figure of the report at ``report`` lies."""
    return report.with_name(f"{report.stem}-{figure.name}.svg")


def as_markdown(report: Report, path: Path) -> str:
    """The whole document; ``path`` is where it will lie."""
    parts = [f"# {report.title}"]
    for section in report.sections:
        parts.append(f"## {section.title}")
        parts.extend(_block(block, path) for block in section.blocks)
    return "\n\n".join(parts) + "\n"


def _block(block: Block, path: Path) -> str:
    if isinstance(block, Table):
        return as_table(block)
    if isinstance(block, Text):
        return f"**{block.text}**" if block.warning else block.text
    return f"![{block.title}]({figure_path(path, block).name})"


def as_table(table: Table) -> str:
    """A table as Markdown writes it, with its title above and its note below."""
    lines = [_row(table.columns)]
    right = [
        all(is_number(row[place]) for row in table.rows if row[place] not in (None, ""))
        for place in range(len(table.columns))
    ]
    lines.append("|" + "|".join("---:" if side else "---" for side in right) + "|")
    lines.extend(_row([show(cell) for cell in row]) for row in table.rows)
    parts = [f"**{table.title}**"] if table.title else []
    parts.append("\n".join(lines))
    if table.note:
        parts.append(f"*{table.note}*")
    return "\n\n".join(parts)


def _row(cells: object) -> str:
    assert isinstance(cells, (list, tuple))
    return (
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    )
