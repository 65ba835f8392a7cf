"""A report's parts, and the three ways to show them: terminal, Markdown, HTML.

A command builds one ``Report`` and both prints it and, if asked, writes it to a file, so the two
cannot disagree. Figures are drawn only when a file is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError
from paceline.files import replace_files, telling
from paceline.ownership import check_file, is_signed, signed

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows of cells under ``columns``; numbers stand to the right, None is an empty cell.

    ``note`` says below the table how the figures came about. Floats are shown as they are given,
    so format them first where digits matter.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph. ``warning``: something the reader must not miss."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Figure:
    """A picture, drawn when it is needed: ``draw()`` gives an SVG document (see plots.py)."""

    title: str
    draw: Callable[[], str]
    name: str  # of its file beside a Markdown report, without suffix


Block = Table | Text | Figure


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Report:
    """A title and sections of tables, paragraphs and figures, in the order in which they come."""

    title: str
    sections: list[Section] = field(default_factory=list)

    def add(self, title: str, *blocks: Block) -> None:
        self.sections.append(Section(title, list(blocks)))

    def write(self, path: str | Path) -> list[Path]:
        """Write ``.md`` (figures as SVG files beside it) or ``.html`` (all in one file).

        Returns the files written: all of them, or none. Raises ConfigError on another suffix,
        WriteError if the place is not writable.
        """
        from paceline.lab.report.html import as_html
        from paceline.lab.report.markdown import as_markdown, figure_path

        check_path(path)
        path = Path(path)
        if path.suffix == ".html":
            texts = {path: as_html(self)}
        else:
            texts = {path: as_markdown(self, path)}
            texts |= {figure_path(path, figure): figure.draw() for figure in self.figures()}
        with telling("the report", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        contents = {file: signed(text).encode("utf-8") for file, text in texts.items()}
        replace_files(contents, "the report", is_signed)
        return list(texts)

    def figures(self) -> list[Figure]:
        return [b for section in self.sections for b in section.blocks if isinstance(b, Figure)]


def check_path(path: str | Path) -> None:
    """Refuse a report of unknown kind, or in the place of a file that is none of ours, before the
    measuring begins. Raises ConfigError."""
    if Path(path).suffix not in (".md", ".html"):
        raise ConfigError(f"report {str(path)!r}: end its name in .md or .html")
    check_file(path, "the report", is_signed)


def show(cell: Cell) -> str:
    """A cell as text, the same everywhere."""
    if cell is None:
        return ""
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def is_number(cell: Cell) -> bool:
    """Whether a cell belongs to the right: a number, perhaps with a unit (1.83x, 12 ms, 4 %)."""
    if isinstance(cell, str):
        return bool(cell) and (cell[0].isdigit() or (cell[0] in "+-±<" and len(cell) > 1))
    return cell is not None
