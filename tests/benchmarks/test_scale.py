"""The formula for machines that are not here: what a forward takes, and what the sheet says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import scale
from scale import Rows

H100 = scale.machine("h100", "8b")


def test_a_forward_takes_its_bytes_and_then_its_arithmetic() -> None:
    seconds = [H100.forward([Rows(1, 64)] * count) for count in (1, 64, 512, 1024)]
    read = H100.target.bytes / (H100.chip.bandwidth * H100.reading)
    assert 15e9 < H100.target.bytes < 15.1e9 and read < seconds[0] < 1.1 * read
    assert seconds[1] < 1.1 * seconds[0]  # reading the weights hides 64 rows
    # By then it is the products, and what attention reads besides.
    each = 2 * H100.target.bytes / 2 / (H100.chip.flops * H100.arithmetic)
    assert seconds[3] - seconds[2] == pytest.approx(512 * each, rel=0.2)


def test_several_chips_share_the_reading_and_pay_for_sums() -> None:
    whole = scale.machine("h100", "70b")
    alone = whole.target.bytes / (whole.chip.bandwidth * whole.reading)
    assert alone / 8 < whole.forward([Rows(1, 64)]) < alone / 4


def test_the_command(start: Callable[..., tuple[Any, str, Any]]) -> None:
    code, out, figures = start(scale, "--chips", "h100", "--models", "8b")
    assert code == 0 and "8B on 1 x H100" in out and "a replica" in out
    assert round(figures["h100 8b 8 0"]) == 1058 and round(figures["h100 8b 128 3"]) == 10573
    assert figures["h100 8b 8 3"] > 1.5 * figures["h100 8b 8 0"]
