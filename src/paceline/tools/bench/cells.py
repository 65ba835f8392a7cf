"""Figures as the cells of tables show them; what is not known is an empty cell."""

from __future__ import annotations

from paceline.tools.bench.figures import Row, Spread
from paceline.tools.report.document import Cell


def rate(value: Spread) -> str:
    """Tokens a second."""
    return f"{value.median:.0f}" + _spread(value, 0)


def speedup(value: Spread) -> str:
    return f"{value.median:.2f}x" + _spread(value, 2)


def _spread(value: Spread, digits: int) -> str:
    """Half of what lies between the lowest and the highest round."""
    half = (value.high - value.low) / 2
    return f" ±{half:.{digits}f}" if half else ""


def times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"


def number(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def share(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def milliseconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value * 1e3:.0f}" if value >= 0.1 else f"{value * 1e3:.3g}"


def latencies(row: Row) -> list[Cell]:
    """Time to first token, inter-token latency (p50, p99) and the longest waits (p99)."""
    values = (row.time_to_first_token, row.inter_token_p50, row.inter_token_p99, row.stall_p99)
    return [milliseconds(value) for value in values]


def acceptance(row: Row, place: int) -> str | None:
    """At a position, with the number of drafts that reached it."""
    if place >= len(row.drafts.reached):
        return None
    return f"{row.drafts.acceptance[place]:.2f} ({row.drafts.reached[place]})"
