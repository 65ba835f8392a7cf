"""The tables and charts of docs/benchmarks.md, from figures.json.

    python benchmarks/figures.py           # write them
    python benchmarks/figures.py --check   # exit 1 if the page or a chart differs

A table is inserted in the page between ``<!-- figures: NAME -->`` and ``<!-- end -->``. A chart
shows cells of a table, so that every number is stored once. It is an SVG with a light and a dark
colour scheme, between which the browser chooses."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TABLES = {table["name"]: table for table in FIGURES["tables"]}

# The palette of Okabe and Ito for people with colour blindness; lighter on black.
LIGHT, DARK = (
    ("#0072b2", "#e69f00", "#009e73", "#d55e00"),
    ("#56b4e9", "#f0b840", "#2fc79a", "#ff8f4a"),
)
WIDTH, LABELS, BAR = 720, 190, 12  # pixels: width of a chart and of its labels, height of a bar


def markdown(table: dict[str, Any]) -> str:
    """The table, and a line with the machine, the date and the command or another way (``how``)
    to repeat it."""
    head, align = table["columns"], ["---", *["---:"] * (len(table["columns"]) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, align, *table["rows"])]
    lines = [re.sub(r"\|  (?=\|)", "| ", line) for line in lines]
    how = table.get("how", "")
    how = f"{how[:1].upper()}{how[1:]}`{table['command']}`"
    return "\n".join([*lines, "", f"*{table['machine']}; {table['date']}.* {how}"])


def number(cell: str) -> float | None:
    """The number of a cell in a chart: that before an "x", or the first one; None without one."""
    match = re.search(r"[\d.]+(?=x)", cell) or re.search(r"[\d.]+", cell)
    return float(match[0]) if match else None


def svg(chart: dict[str, Any]) -> str:
    """A chart as an SVG document."""
    table = TABLES[chart["table"]]
    rows = [table["rows"][row] for row in chart["rows"]]
    body, height = {"bars": bars, "lines": lines}[chart["kind"]](chart, rows, table["columns"])
    fills = [
        "".join(f".c{n}{{fill:{c};stroke:{c}}}" for n, c in enumerate(colours))
        for colours in (LIGHT, DARK)
    ]
    style = (
        f"text{{font:12px sans-serif;fill:#222}}.t{{font-weight:bold}}.g{{stroke:#8888}}{fills[0]}"
        f".l{{fill:none;stroke-width:2}}.s{{font-size:10px}}"
        f"@media(prefers-color-scheme:dark){{text{{fill:#ddd}}{fills[1]}.l{{fill:none}}}}"
    )
    title, about = escape(chart["title"]), f"{table['machine']}; {table['date']}"
    notes = [*wrap(about, 130), *wrap(table.get("how", "") + table["command"], 130)]
    body += [words(0, height + 20 + 14 * n, line, "s") for n, line in enumerate(notes)]
    height += 14 * len(notes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 14:g}" '
        f'width="{WIDTH}" role="img">'
        f"<title>{title}</title><style>{style}</style>\n"
        + words(0, 16, chart["title"], "t")
        + "\n".join(body)
        + "\n</svg>\n"
    )


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>\n'
    )


def legend(names: Sequence[str]) -> Iterator[str]:
    for n, name in enumerate(names):
        x = LABELS + n * (WIDTH - LABELS) // 4
        yield f'<rect x="{x}" y="28" width="12" height="12" class="c{n}"/>' + words(
            x + 17, 39, name
        )


Drawn = tuple[list[str], float]


def bars(chart: dict[str, Any], rows: list[list[str]], columns: list[str]) -> Drawn:
    """A group of bars for each row, with a bar per column, and a vertical line at ``baseline``."""
    shown = [[number(row[column]) for column in chart["columns"]] for row in rows]
    scale = (WIDTH - LABELS - 60) / max(value or 0 for group in shown for value in group)
    body, y = list(legend([columns[column] for column in chart["columns"]])), 54.0
    for row, group in zip(rows, shown, strict=True):
        values = [(n, value) for n, value in enumerate(group) if value is not None]
        body.append(words(LABELS - 8, y + len(values) * BAR / 2 + 4, row[0].strip("`"), "", "end"))
        for n, value in values:
            body.append(
                f'<rect x="{LABELS}" y="{y:g}" width="{value * scale:.1f}" height="{BAR - 2}" '
                f'class="c{n}"/>' + words(LABELS + value * scale + 5, y + BAR - 2, f"{value:g}")
            )
            y += BAR
        y += 8
    if base := chart.get("baseline"):
        x = LABELS + base * scale
        body.append(f'<line x1="{x:.1f}" y1="48" x2="{x:.1f}" y2="{y:g}" class="g"/>')
    return body, y


def lines(chart: dict[str, Any], rows: list[list[str]], columns: list[str]) -> Drawn:
    """A line for each row over ``x``, whose first value is 1; both axes begin at 0."""
    shown = [[1.0, *(number(row[column]) or 0.0 for column in chart["columns"])] for row in rows]
    top, bottom, right, most = 96, 330, WIDTH - 60, max(max(values) for values in shown)

    def across(x: float) -> float:
        return 40 + (right - 40) * x / chart["x"][-1]

    def down(y: float) -> float:
        return bottom - (bottom - top) * y / most

    body = []
    for n, row in enumerate(rows):
        x, y = 40 + n % 2 * 330, 28 + n // 2 * 20
        body.append(f'<rect x="{x}" y="{y}" width="12" height="12" class="c{n}"/>')
        body.append(words(x + 17, y + 11, row[0]))
    for level in range(int(most) + 1):
        body.append(
            f'<line x1="40" x2="{right}" y1="{down(level):g}" y2="{down(level):g}" class="g"/>'
        )
        body.append(words(32, down(level) + 4, str(level), "", "end"))
    for x in chart["x"]:
        body.append(words(across(x), bottom + 18, str(x), "", "middle"))
    for n, values in enumerate(shown):
        points = [(across(x), down(y)) for x, y in zip(chart["x"], values, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" class="c{n} l"/>')
        body.append(words(points[-1][0] + 6, points[-1][1] + 4, f"{values[-1]:g}"))
    return body, bottom + 28


def page(text: str) -> str:
    """The page with the current tables. Raises KeyError for an unknown table."""
    block = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.S)
    return block.sub(lambda match: f"{match[1]}\n{markdown(TABLES[match[2]])}\n\n{match[3]}", text)


def files() -> dict[Path, str]:
    """The contents of all files that are written."""
    charts = {ROOT / "docs/images" / f"{c['name']}.svg": svg(c) for c in FIGURES["charts"]}
    return {PAGE: page(PAGE.read_text(encoding="utf-8")), **charts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    check = parser.parse_args().check
    for path, text in files().items():
        if check and (not path.is_file() or path.read_text(encoding="utf-8") != text):
            sys.exit(f"{path.relative_to(ROOT)} does not match figures.json; run figures.py")
        if not check:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
