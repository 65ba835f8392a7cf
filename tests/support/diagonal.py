"""Products of which every run has a part, and the slow tests the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def diagonal(*values: Sequence[Any], every: int = 0) -> list[Any]:
    """All cases of some values. In every run are those whose places add up to a multiple of
    ``every``, by default the shortest length: each value of the others meets one of the shortest.
    """
    every = every or min(map(len, values))
    return [
        pytest.param(*case, marks=pytest.mark.slow if sum(places) % every else ())
        for places, case in (
            zip(*numbered, strict=True) for numbered in product(*map(enumerate, values))
        )
    ]
