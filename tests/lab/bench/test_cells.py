"""Figures as tables show them."""

from __future__ import annotations

import pytest

from paceline.lab.bench import cells
from paceline.lab.bench.figures import Spread
from paceline.lab.report.document import is_number


def test_medians_with_spread() -> None:
    assert cells.rate(Spread(359.4, 354.0, 360.0)) == "359 ±3"
    assert cells.speedup(Spread(1.424, 1.38, 1.49)) == "1.42x ±0.06"
    assert cells.speedup(Spread(1.0, 1.0, 1.0)) == "1.00x"
    assert is_number(cells.rate(Spread(359.4, 354.0, 360.0)))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.00364, "3.64"), (0.0178, "17.8"), (0.1178, "118"), (1.5, "1500")],
)
def test_milliseconds(seconds: float, expected: str) -> None:
    assert cells.milliseconds(seconds) == expected


def test_numbers() -> None:
    assert (cells.times(1.5), cells.number(2.913), cells.share(0.617)) == ("1.50x", "2.91", "62%")
