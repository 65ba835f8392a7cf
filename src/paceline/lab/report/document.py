"""The parts of a report: sections of tables, paragraphs and figures. A command builds one
``Report``, prints it and, if asked, writes it to a file (render.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Cell = str | int | float | None


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


@dataclass(frozen=True)
class Figure:
    """A picture, drawn when a file is written: ``draw()`` gives an SVG document (see plots.py)."""

    title: str
    draw: Callable[[], str]
    name: str  # of its file beside a Markdown report, without suffix


Block = Table | Text | Figure


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

    def figures(self) -> list[Figure]:
        return [b for section in self.sections for b in section.blocks if isinstance(b, Figure)]


def show(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def is_number(cell: Cell) -> bool:
    """Whether a cell belongs to the right: a number, perhaps with a unit (1.83x, 12 ms, 4 %)."""
    if isinstance(cell, str):
        return bool(cell) and (cell[0].isdigit() or (cell[0] in "+-±<" and len(cell) > 1))
    return cell is not None
