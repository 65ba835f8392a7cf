"""The rules of the field, agreed with or contradicted by made-up measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.costs import CostCurve, TargetCosts
from paceline.lab.tune.advice import Advice, advise
from paceline.lab.tune.confirm import Confirmation, Finalist
from paceline.lab.tune.plan import TuningOutcome
from paceline.lab.tune.search import MeasuredMethod
from paceline.lab.tune.spending import TuneOptions
from support.tuning_methods import NOTHING, PLAIN, chain, target


def outcome(
    *methods: MeasuredMethod, costs: TargetCosts | None = None, copied: float = 0.0
) -> TuningOutcome:
    return TuningOutcome(
        TuneOptions(),
        "m",
        parameters=1000,
        target=costs or target(1000),
        plain=PLAIN,
        methods=list(methods),
        copied=copied,
    )


def rule(found: list[Advice], words: str) -> Advice:
    (item,) = [advice for advice in found if words in advice.rule]
    return item


def lookup(rate: float, levels: int = 4) -> MeasuredMethod:
    """Text that is looked up: no passes."""
    base = chain(rate, 0.0, levels, "ngram")
    return replace(base, passes=(0,) * (levels + 1), pass_seconds=NOTHING, family="ngram")


@pytest.mark.parametrize(
    ("parameters", "cost", "holds", "words"),
    [
        (70, 0.1, True, "14.3 times smaller; a pass costs 0.10 of a target step"),
        (500, 0.1, False, "2.0 times smaller"),
        (70, 3.0, False, "a pass costs 3.00"),
        (500, 3.0, True, "2.0 times smaller"),
    ],
)
def test_the_size_of_a_draft(parameters: int, cost: float, holds: bool, words: str) -> None:
    found = advise(outcome(replace(chain(0.8, cost), parameters=parameters)))
    item = rule(found, "10 to 20 times")
    assert item.holds is holds
    assert words in item.measured
    assert ("it pays" in item.verdict) == (cost < 1)


def test_a_confirmed_figure_counts_more_than_a_prediction() -> None:
    method = replace(chain(0.8, 0.1), parameters=70)
    found = outcome(method)
    assert "x predicted" in rule(advise(found), "10 to 20 times").verdict
    finalist = Finalist("draft", "draft", "draft", "auto", 8, 1, 1.43, (method,))
    found.results = [Confirmation(finalist, drafted=9, ratios=[0.92])]
    item = rule(advise(found), "10 to 20 times")
    assert (item.holds, item.verdict) == (False, "it does not pay, 0.92x confirmed")
    item = rule(advise(found), "break-even")
    assert item.verdict == "decode plainly"
    assert item.measured == "draft is confirmed at 0.92x for 1 at once"


def test_low_acceptance() -> None:
    item = rule(advise(outcome(chain(0.3, 0.5))), "below 0.4")
    assert item.holds is True
    assert "draft 0.30 (0." in item.measured
    item = rule(advise(outcome(chain(0.3, 0.01))), "below 0.4")
    assert item.holds is False
    assert "cheap enough" in item.verdict
    item = rule(advise(outcome(chain(0.7, 0.01))), "below 0.4")
    assert item.holds is None
    assert "the least is 0.70, draft" in item.measured


def test_high_acceptance() -> None:
    assert rule(advise(outcome(chain(0.95, 0.05))), "above 0.8").holds is True
    item = rule(advise(outcome(chain(0.9, 1.5))), "above 0.8")
    assert item.holds is False
    assert "best length is 1 of 8" in item.measured
    assert rule(advise(outcome(chain(0.5, 0.3))), "above 0.8").holds is True


def test_prompt_lookup_where_output_copies() -> None:
    item = rule(advise(outcome(lookup(0.9), chain(0.5, 0.2), copied=0.6)), "copies")
    assert item.holds is True
    assert item.measured.startswith("60% of the output")
    assert item.verdict == "ngram comes first"
    item = rule(advise(outcome(lookup(0.2), chain(0.9, 0.05), copied=0.6)), "copies")
    assert item.holds is False
    assert "draft comes first, copied text or not" in item.verdict
    item = rule(advise(outcome(lookup(0.2), chain(0.9, 0.05), copied=0.1)), "copies")
    assert item.holds is True
    item = rule(advise(outcome(lookup(0.6), copied=0.6)), "copies")
    assert (item.holds, item.verdict) == (True, "it pays")
    item = rule(advise(outcome(lookup(0.001), copied=0.0)), "copies")
    assert (item.holds, item.verdict) == (True, "it does not pay")


def test_the_break_even_batch_is_told() -> None:
    item = rule(advise(outcome(chain(0.5, 0.1, 1), costs=target(16))), "break-even")
    assert "gains up to" in item.measured
    assert "plain decoding is faster" in item.verdict
    item = rule(advise(outcome(chain(0.9, 0.1))), "break-even")
    assert "still gains at 32" in item.measured
    item = rule(advise(outcome(chain(0.1, 3.0))), "break-even")
    assert item.verdict == "decode plainly"


def test_trees_against_chains() -> None:
    tree = replace(chain(0.9, 0.1), shape="2x2x1", label="tree")
    item = rule(advise(outcome(tree, chain(0.6, 0.1))), "trees")
    assert (item.holds, item.verdict) == (True, "the tree pays for its nodes")
    wide = replace(tree, nodes=tuple(4.0 * n for n in range(9)))
    item = rule(advise(outcome(wide, chain(0.85, 0.1), costs=target(4))), "trees")
    assert (item.holds, item.verdict) == (False, "the chain is faster: nodes cost time")


def test_temperature() -> None:
    found = outcome(chain(0.8, 0.1))
    assert not [a for a in advise(found) if "temperature" in a.rule]
    found.at_other = (1.0, 0.55)
    item = rule(advise(found), "temperature")
    assert item.holds is True
    assert "0.80 at temperature 0, 0.55 at 1" in item.measured


def test_batches() -> None:
    assert rule(advise(outcome(chain(0.8, 0.1))), "larger batches").holds is True
    jam = TargetCosts((1, 2, 4, 8, 16, 32), tuple(CostCurve((1,), (4.0**n,)) for n in range(6)))
    assert rule(advise(outcome(chain(0.8, 0.1), costs=jam)), "larger batches").holds is False


def test_nothing_is_said_of_nothing() -> None:
    assert advise(TuningOutcome(TuneOptions(), "m", 1000)) == []
