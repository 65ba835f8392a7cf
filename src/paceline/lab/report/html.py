"""Reports as one HTML file: no outside requests, figures inside as SVG."""

from __future__ import annotations

import re
from html import escape

from paceline.lab.report.document import Block, Report, Table, Text, is_number, show

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #8884; text-align: left; }
.n { text-align: right; }
.note { color: #777; font-size: .9em; }
.warning { border-left: 4px solid #c33; padding-left: .7rem; font-weight: 600; }
figure { margin: 1rem 0; background: #fff; color: #000; padding: .5rem; }
figure svg { max-width: 100%; height: auto; }
"""


def as_html(report: Report) -> str:
    """The whole document."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(report.title)}</h1>",
    ]
    for section in report.sections:
        parts.append(f"<h2>{escape(section.title)}</h2>")
        parts.extend(_block(block) for block in section.blocks)
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Text):
        kind = ' class="warning"' if block.warning else ""
        return f"<p{kind}>{escape(block.text)}</p>"
    # Only the element itself: an XML declaration or doctype is not for the middle of a page. Ids
    # are made the figure's own, or the clip paths of one picture would be those of another.
    svg = re.sub(r"^.*?(?=<svg)", "", block.draw(), count=1, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{block.name}-", svg)
    return f"<figure>{svg}<figcaption>{escape(block.title)}</figcaption></figure>"


def _table(table: Table) -> str:
    parts = ['<div class="wide"><table>']
    if table.title:
        parts.append(f"<caption>{escape(table.title)}</caption>")
    parts.append("<thead><tr>")
    parts.extend(f"<th>{escape(heading)}</th>" for heading in table.columns)
    parts.append("</tr></thead><tbody>")
    for row in table.rows:
        cells = (
            f'<td class="{"n" if is_number(cell) else "t"}">{escape(show(cell))}</td>'
            for cell in row
        )
        parts.append(f"<tr>{''.join(cells)}</tr>")
    parts.append("</tbody></table></div>")
    if table.note:
        parts.append(f'<p class="note">{escape(table.note)}</p>')
    return "".join(parts)
