"""Figures as the cells of tables show them."""

from __future__ import annotations

from paceline.lab.bench.figures import Spread

times = "{:.2f}x".format
number = "{:.2f}".format
share = "{:.0%}".format


def rate(value: Spread) -> str:
    """Tokens a second."""
    return f"{value.median:.0f}" + _spread(value, 0)


def speedup(value: Spread) -> str:
    return f"{value.median:.2f}x" + _spread(value, 2)


def _spread(value: Spread, digits: int) -> str:
    """Half of what lies between the lowest and the highest round."""
    half = (value.high - value.low) / 2
    return f" ±{half:.{digits}f}" if half else ""


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.0f}" if value >= 0.1 else f"{value * 1e3:.3g}"
