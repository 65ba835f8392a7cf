"""Never slower, in simulated time: whatever drafts cost, whatever of them is right.

From the first request of a fresh controller; costs believed at start-up are wrong by two either
way, acceptance changes in mid-text and from request to request, batches jump.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from paceline.control.adaptive import AdaptiveController
from paceline.control.cost import CostModel
from paceline.core.costs import TargetCosts
from paceline.draft.hybrid import HybridDrafter
from support.diagonal import diagonal
from support.simulated_batch import Batches, Rate, Truth, steady
from support.simulated_time import Guesser, Machine, always

TRUTHS = {
    "a head": Truth(),
    "a model that reads prompts": Truth(reads=True),
    "rows are dear": Truth(row=0.12, level=0.3, level_row=0.05),
    "a lookup": Truth(level=0.0, row=0.05, found=0.6),
    "a lookup, rows are dear": Truth(level=0.0, row=0.15, found=0.5),
    "half the target": Truth(level=0.5, level_row=0.05, row=0.08),
    "trees over a model": Truth(wide=3, level=0.2),
    "heads that share a pass": Truth(wide=2, one_pass=True),
    "wide lookups": Truth(level=0.0, wide=4, row=0.02),
    "a machine that changes": Truth(drift=lambda step: 1.0 + 0.3 * (step // 100 % 2)),
}


def flipping(number: int, written: int) -> float:
    return 0.9 if written // 60 % 2 == 0 else 0.05


def few_are_good(number: int, written: int) -> float:
    return 0.9 if number % 4 == 0 else 0.1


def of_all_kinds(number: int, written: int) -> float:
    return 0.2 + 0.7 * random.Random(number).random()


RATES: dict[str, Rate] = {
    "useless": steady(0.05),
    "poor": steady(0.3),
    "fair": steady(0.6),
    "changing": flipping,
    "few are good": few_are_good,
    "of all kinds": of_all_kinds,
}
RIGHT, CHEAP, DEAR, SLOW = (1, 1, 1), (1, 0.5, 0.5), (1, 2, 2), (2, 1, 1)


def ratios(
    truth: Truth, rate: Rate, batch: int, wrong: tuple[float, float, float], waves: int = 3
) -> list[float]:
    """Plain seconds by seconds of the waves, each the mean over two runs."""
    runs = []
    for seed in range(2):
        machine = Batches(truth, rate, batch, wrong=wrong, seed=seed)
        runs.append([machine.wave(128).ratio for _ in range(waves)])
    return [statistics.mean(column) for column in zip(*runs, strict=True)]


@pytest.mark.parametrize(
    ("truth", "rate", "batch"), diagonal(list(TRUTHS), list(RATES), (1, 4, 8), every=6)
)
def test_from_the_first_request_on(truth: str, rate: str, batch: int) -> None:
    found = ratios(TRUTHS[truth], RATES[rate], batch, RIGHT)
    assert found[0] > 0.95 and statistics.mean(found) > 0.96


@pytest.mark.parametrize(
    ("truth", "rate", "wrong"),
    diagonal(
        ("a head", "rows are dear", "a lookup, rows are dear"), list(RATES), (CHEAP, DEAR, SLOW)
    ),
)
def test_where_start_up_was_wrong_by_two(
    truth: str, rate: str, wrong: tuple[float, float, float]
) -> None:
    found = [statistics.mean(ratios(TRUTHS[truth], RATES[rate], b, wrong)) for b in (1, 8)]
    assert min(found) > 0.94 and statistics.mean(found) > 0.96


@pytest.mark.parametrize(("batch", "cheap"), [(8, 2), (8, 4), (16, 2), (16, 4)])
@pytest.mark.parametrize("truth", ["a head", "rows are dear", "half the target"])
def test_start_up_alone_is_not_believed_for_several(truth: str, batch: int, cheap: int) -> None:
    """Rows and passes look so many times too cheap: first requests lost up to 18 % to drafts."""
    wrong = (1.0, 1 / cheap, 1 / cheap)
    for rate in ("fair", "of all kinds"):
        machines = [Batches(TRUTHS[truth], RATES[rate], batch, wrong=wrong, seed=n) for n in (0, 1)]
        first = statistics.mean(machine.wave(96).ratio for machine in machines)
        assert first > (0.98 if cheap == 2 else 0.96), rate


@pytest.mark.parametrize(("truth", "least"), [("a head", 1.38), ("rows are dear", 1.085)])
def test_a_target_that_was_measured_wrong_is_known_after_a_step(truth: str, least: float) -> None:
    """Start-up took the target for three times as slow; 1.32 and 1.06 while drafts' prices were
    kept from before the first step."""
    machines = [
        Batches(TRUTHS[truth], RATES["fair"], 1, wrong=(3.0, 1 / 3, 1.0), seed=n) for n in range(24)
    ]
    assert statistics.mean(machine.wave(96).ratio for machine in machines) > least


@pytest.mark.parametrize("rate", RATES)
def test_where_the_load_jumps(rate: str) -> None:
    machine = Batches(Truth(), RATES[rate], 16, seed=1)
    found = [machine.wave(64, batch).ratio for batch in (1, 16, 2, 8, 1, 16, 4)]
    assert min(found) > 0.9 and statistics.mean(found) > 0.97


@pytest.mark.parametrize(("batch", "least"), [(1, 1.9), (4, 1.5), (8, 1.25)])
def test_nothing_is_lost_where_drafting_pays(batch: int, least: float) -> None:
    """Of the best fixed length's 2.2, 1.66 and 1.41, once it is known."""
    assert statistics.mean(ratios(Truth(), steady(0.85), batch, RIGHT, waves=4)[1:]) > least


def test_the_first_pass_of_a_draft_takes_longer() -> None:
    """It finds its weights outside the caches. 1.48 if one price a pass is learnt."""
    truth, speeds = Truth(first=0.5), list[float]()
    for seed in range(4):
        machine = Batches(truth, steady(0.85), 1, seed=seed)
        speeds += [machine.wave(96).ratio for _ in range(6)]
    assert statistics.mean(speeds) > 1.65


@pytest.mark.parametrize("slow", [range(60), range(100, 160), range(0, 10**6, 2)], ids=str)
def test_a_busy_machine_is_no_word_against_drafts(slow: range) -> None:
    """Four times as slow for a while: what drafts cost is told against what steps cost then. At
    half a step a pass, drafts once thought dear were never tried again."""
    truth = Truth(level=0.55, row=0.05, drift=lambda step: 4.0 if step in slow else 1.0)
    later = []
    for seed in range(12):
        machine = Batches(truth, steady(0.9), 1, seed=seed)
        waves = [machine.wave(96).ratio for _ in range(10)][4:]
        assert seed > 2 or statistics.mean(waves) > 1.14  # 1.22 where nothing is slow
        later += waves
    assert statistics.mean(later) > 1.18


def test_plain_steps_that_seemed_slow_behind_drafts_end_no_drafting_for_good() -> None:
    """What follows a draft was thought to take 25 plain steps, more than the budget ever holds."""
    truth = Truth(level=0.55, row=0.05, drift=lambda step: 4.0 if step % 2 == 0 else 1.0)
    machine = Batches(truth, steady(0.9), 1, seed=5)
    waves = [machine.wave(96).ratio for _ in range(12)]
    assert statistics.mean(waves[-4:]) > 1.1


@pytest.mark.parametrize("level", [0.15, 0.0], ids=["a head", "a lookup"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("first", [3, 5, 9])
def test_rows_that_start_up_measured_beside_other_work(
    level: float, batch: int, first: int
) -> None:
    """Forwards of so many rows and more look three times as dear: drafts were kept shorter for
    good (1.6 instead of 2.5 times plain decoding, one request with a head, from 3 rows on)."""
    truth, speeds = Truth(level=level, found=0.9), {1.0: 0.0, 3.0: 0.0}
    for times in speeds:
        for seed in range(4):
            machine = Batches(truth, steady(0.9), batch, seed=seed)
            curves = [
                replace(
                    c,
                    seconds=tuple(
                        s * times ** (n >= first) for n, s in zip(c.tokens, c.seconds, strict=True)
                    ),
                )
                for c in machine.control.cost.target.curves
            ]
            target = TargetCosts(machine.control.cost.target.batches, tuple(curves))
            cost = CostModel(target, machine.control.cost.drafters)
            lookups = {"it": machine.lookup} if machine.lookup else None
            machine.control = AdaptiveController(cost, None, lookups)
            speeds[times] += sum(machine.wave(96).ratio for _ in range(4))
    assert speeds[3.0] > 0.85 * speeds[1.0]


def test_what_is_known_of_a_drafter_survives_requests() -> None:
    machine = Batches(Truth(), steady(0.85), 1, seed=0)
    machine.wave(64)
    later = [machine.wave(64).ratio for _ in range(4)]
    assert min(later) > 1.6 and statistics.mean(later) > 1.9


def test_short_answers_gain_from_the_first_one_on() -> None:
    """The first draft of a lone request need not be saved up for."""
    first = [Batches(Truth(), steady(0.85), 1, seed=seed).wave(64).ratio for seed in range(4)]
    assert statistics.mean(first) > 1.75


@pytest.mark.parametrize("truth", ["a head", "a lookup"])
def test_no_request_is_slowed_down_for_another(truth: str) -> None:
    slowest = [
        min(machine.wave(128).slowest for _ in range(2))
        for machine in (Batches(TRUTHS[truth], few_are_good, 8, seed=seed) for seed in range(4))
    ]
    assert statistics.mean(slowest) > 0.95


TEAMS = {
    "useless": [(0.05, 0.0), (0.05, 0.2)],
    "poor and dear": [(0.3, 0.0), (0.3, 0.5)],
    "fair": [(0.5, 0.0), (0.6, 0.15)],
    "one is good": [(0.05, 0.0), (0.85, 0.1)],
}


@pytest.mark.parametrize(
    ("team", "batch", "mistaken"), diagonal(list(TEAMS), (1, 4, 8), (0.5, 1.0, 2.0))
)
def test_a_hybrid_is_never_slower(team: str, batch: int, mistaken: float) -> None:
    members = [
        Guesser(str(number), always(chance), seconds, seed=number)
        for number, (chance, seconds) in enumerate(TEAMS[team])
    ]
    machine = Machine(HybridDrafter(members, "cpu"), mistaken)
    ratios = [machine.together(128, batch) for _ in range(3)]
    assert ratios[0] > 0.95 and statistics.mean(ratios) > 0.96
    if team == "one is good" and batch == 1:
        assert ratios[-1] > 1.5
