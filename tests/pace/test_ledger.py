"""What drafting may cost: by construction, whatever it comes to."""

from __future__ import annotations

import random

import pytest

from paceline.pace.ledger import CREDIT, GRANT, KEPT, OWN_SHARE, SHARE, Ledger

PLAIN = 2.0  # seconds of a plain step


def draft(ledger: Ledger, tokens: int, seconds: float, probe: bool = False) -> None:
    ledger.settle({"it": 1}, {0: tokens}, seconds, PLAIN, seconds, probe)


def test_little_may_be_risked_before_anything_was_earned() -> None:
    ledger = Ledger()
    assert ledger.allowance("it", 1, PLAIN) == 0.0
    for _ in range(50):
        ledger.pass_by(PLAIN, PLAIN)
    assert ledger.allowance("it", 1, PLAIN) == pytest.approx((GRANT + 50 * SHARE) * PLAIN)
    for _ in range(10_000):
        ledger.pass_by(PLAIN, PLAIN)
    assert ledger.purse == KEPT * PLAIN, "a long time of plain decoding is no licence"


def test_what_drafts_win_they_may_risk_and_no_more() -> None:
    ledger = Ledger()
    draft(ledger, tokens=3, seconds=1.5 * PLAIN)
    assert ledger.won("it", 1, PLAIN) == pytest.approx(1.5 * PLAIN)
    draft(ledger, tokens=1, seconds=1.5 * PLAIN)
    assert ledger.won("it", 1, PLAIN) == pytest.approx(PLAIN)
    for _ in range(100):
        draft(ledger, tokens=4, seconds=1.5 * PLAIN)
    assert ledger.won("it", 1, PLAIN) == CREDIT * PLAIN
    assert ledger.won("another", 1, PLAIN) == 0.0


def test_another_concurrency_starts_with_little() -> None:
    ledger = Ledger()
    for _ in range(100):
        draft(ledger, tokens=4, seconds=PLAIN)
    assert 0 < ledger.won("it", 8, PLAIN) <= PLAIN


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_whatever_drafts_come_to(seed: int) -> None:
    """A draft is made whenever it may be; what it takes and gains is as it pleases.

    In all, at most SHARE longer than plain decoding, what is won before left aside, and one draft.
    """
    dice = random.Random(seed)
    ledger = Ledger()
    spent = plain = dearest = 0.0
    for step in range(5000):
        risk = dice.uniform(0.1, 2.0) * PLAIN
        kind = step // 500 % 3  # good times, bad ones, changing ones
        if risk <= ledger.allowance("it", 1, PLAIN):
            chance = (0.9, 0.02, dice.random())[kind]
            tokens = 1 + sum(dice.random() < chance for _ in range(3))
            took = (PLAIN + risk) * dice.choice((1.0, 1.0, 1.8))  # predictions may be wrong
            ledger.settle({"it": 1}, {0: tokens}, took, PLAIN, PLAIN + risk, probe=False)
            dearest = max(dearest, took)
        else:
            tokens, took = 1, PLAIN
        ledger.pass_by(took, PLAIN)
        spent, plain = spent + took, plain + tokens * PLAIN
        assert spent <= (1 + SHARE) * plain + dearest + (GRANT + CREDIT) * PLAIN


def test_what_was_lent_for_reading_comes_back() -> None:
    ledger = Ledger()
    ledger.lend("it", 4 * PLAIN)
    assert not ledger.may_lend("it", PLAIN)
    for _ in range(100):
        draft(ledger, tokens=4, seconds=PLAIN)
    assert ledger.may_lend("it", PLAIN)
    idle = Ledger()
    idle.lend("it", 2 * PLAIN)
    for _ in range(150):
        idle.pass_by(PLAIN, PLAIN)
    assert idle.may_lend("it", PLAIN) and idle.purse == pytest.approx(GRANT * PLAIN), (
        "out of what was earned"
    )


def test_a_sequence_may_lose_a_share_of_its_own_time() -> None:
    ledger = Ledger()
    assert ledger.own(0, 100, PLAIN) == pytest.approx(OWN_SHARE * 100 * PLAIN)
    assert not ledger.lost(0)
    draft(ledger, tokens=1, seconds=2 * PLAIN)
    draft(ledger, tokens=1, seconds=3 * PLAIN)
    assert ledger.lost(0)
    draft(ledger, tokens=8, seconds=3 * PLAIN)
    assert not ledger.lost(0)
    draft(ledger, tokens=1, seconds=9 * PLAIN)
    ledger.forget(0)
    assert not ledger.lost(0)


def test_a_probe_is_paid_for_by_the_purse() -> None:
    ledger = Ledger()
    for _ in range(200):
        ledger.pass_by(PLAIN, PLAIN)
    before = ledger.purse
    ledger.settle({"it": 1}, {0: 4, 1: 1}, 1.5 * PLAIN, PLAIN, 1.5 * PLAIN, probe=True)
    assert ledger.purse == pytest.approx(before - 0.5 * PLAIN)
    assert ledger.won("it", 2, PLAIN) == 0.0, "by what it costs the one that gains nothing"
