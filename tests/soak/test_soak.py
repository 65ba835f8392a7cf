"""The short form of ``make soak``: everything that clients do, for less than a minute.

``PACELINE_SOAK_SECONDS`` says for how long (12 by default, to which comes the time to compare).
"""

from __future__ import annotations

import os
import time

from soak.__main__ import EMBEDDED, arguments_of, soak, summary
from soak.storm import Plan

SECONDS = float(os.environ.get("PACELINE_SOAK_SECONDS", "12"))


def test_a_server_under_all_that_clients_do() -> None:
    plan = Plan("suite", SECONDS)
    begin = time.monotonic()
    judge = soak(plan, arguments_of(EMBEDDED, (), ()), print)
    report = "\n".join(summary(judge, plan, time.monotonic() - begin))
    assert not judge.findings, report
    for kind in (
        "distinct answers compared",
        "unseeded",
        "extreme",
        "invalid",
        "cancelled",
        "hostile",
    ):
        assert judge.counts[kind] > 0, report
    assert judge.tokens > 100, report
