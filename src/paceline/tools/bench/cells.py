"""Figures as the cells of tables show them; what is not known is an empty cell."""

from __future__ import annotations

from functools import partial

from paceline.tools.bench.figures import Row, Spread
from paceline.tools.report.document import shown

times = partial(shown, form="{:.2f}x")
number = partial(shown, form="{:.2f}")
share = partial(shown, form="{:.0%}")


def rate(value: Spread) -> str:
    """Tokens a second."""
    return f"{value.median:.0f}" + _spread(value, 0)


def speedup(value: Spread) -> str:
    return f"{value.median:.2f}x" + _spread(value, 2)


def _spread(value: Spread, digits: int) -> str:
    """Half of what lies between the lowest and the highest round."""
    half = (value.high - value.low) / 2
    return f" ±{half:.{digits}f}" if half else ""


def milliseconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value * 1e3:.0f}" if value >= 0.1 else f"{value * 1e3:.3g}"


def acceptance(row: Row, place: int) -> str | None:
    """At a position, with the number of drafts that reached it."""
    if place >= len(row.drafts.reached):
        return None
    return f"{row.drafts.acceptance[place]:.2f} ({row.drafts.reached[place]})"
