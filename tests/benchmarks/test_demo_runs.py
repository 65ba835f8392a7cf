"""Many runs of the demo: what is read off its show."""

import io

from rich.console import Console

from demo_runs import spread, totals
from paceline.cli.demo import Measurement, _table
from paceline.core.sequence import DraftCounts
from paceline.engine.clock import PHASES
from paceline.engine.driver import StepSums
from paceline.lab.report.render import rich_table


def scene(seconds: float) -> Measurement:
    counts = DraftCounts(drafted=80, accepted=60, target_steps=40)
    plain, fast = (
        StepSums(tokens=100, seconds=dict.fromkeys(PHASES, whole / len(PHASES)))
        for whole in (2.0, seconds)
    )
    return Measurement("x", plain, fast, counts, None)


def test_the_rows_that_sum_up_are_read_off_the_show() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    table = rich_table(_table([[scene(1.0)], [scene(0.25)]], "d"))
    console.print("plain  50 tokens/s", "total 3 4.00x", table)
    assert totals(out.getvalue().replace("\n", "\r\n")) == [(50.0, 2.0), (50.0, 8.0)]
    assert totals("no table") == []


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == "1.00 to 3.00, median 2.00"
