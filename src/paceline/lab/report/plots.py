"""The pictures of reports, drawn by matplotlib as whole SVG documents. It is imported on the first
call and used without its global state: no display is needed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

Series = Mapping[str, Sequence[float | None]]


def lines(
    x: Sequence[float], series: Series, x_label: str, y_label: str, log_x: bool = False
) -> str:
    """One line a series over shared ``x``; None leaves a gap. ``log_x`` for powers of two."""
    figure, axes = _canvas()
    for number, (name, values) in enumerate(series.items()):
        points = [float("nan") if value is None else value for value in values]
        axes.plot(x[: len(points)], points, marker=_MARKERS[number % len(_MARKERS)], label=name)
    if log_x:
        axes.set_xscale("log", base=2)
    axes.set_xticks(list(x), [f"{value:g}" for value in x])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    return _finish(figure, axes, x_label, y_label, legend=len(series) > 1)


def bars(
    categories: Sequence[str],
    series: Series,
    y_label: str,
    baseline: float | None = None,
    stacked: bool = False,
) -> str:
    """A group of bars for each category, or one of ``stacked`` parts; ``baseline`` draws a line
    across (1.0 = plain)."""
    figure, axes = _canvas(width=max(7.0, 0.9 * len(categories)))
    width = 0.6 if stacked else 0.8 / max(1, len(series))
    below = [0.0] * len(categories)
    for number, (name, values) in enumerate(series.items()):
        shift = 0.0 if stacked else (number + 0.5) * width - 0.4
        heights = [value or 0.0 for value in values]
        positions = [i + shift for i in range(len(categories))]
        axes.bar(positions, heights, width, bottom=below, label=name)
        if stacked:
            below = [low + height for low, height in zip(below, heights, strict=True)]
    if baseline is not None:
        axes.axhline(baseline, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(categories)), categories, rotation=25, ha="right")
    return _finish(figure, axes, "", y_label, legend=stacked or len(series) > 1)


_MARKERS = "osD^vPX*"


def _canvas(width: float = 7.0) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.0), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=_COLOURS)
    return figure, axes


# Okabe and Ito's palette, which people with colour blindness can tell apart.
_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000", "#f0e442"]


def _finish(figure: Any, axes: Any, x_label: str, y_label: str, legend: bool) -> str:
    from matplotlib import rc_context

    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize="small")
    text = io.StringIO()
    # Without a salt and a date the same numbers give the same bytes. Text stays text: searchable.
    with rc_context({"svg.hashsalt": "paceline", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
