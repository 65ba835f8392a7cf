"""What drafting may cost: by construction, whatever it comes to."""

from __future__ import annotations

import random

import pytest

from paceline.pace.ledger import CREDIT, GRANT, KEPT, LONE, OWN, SHARE, Ledger

PLAIN = 2.0  # seconds of a plain step


def draft(ledger: Ledger, tokens: int, seconds: float, probe: bool = False) -> None:
    ledger.settle({"it": 1}, {0: tokens}, seconds, PLAIN, probe)


def test_little_may_be_risked_before_anything_was_earned() -> None:
    ledger = Ledger()
    assert ledger.allowance("it", 1, PLAIN) == 0.0
    for _ in range(50):
        ledger.pass_by(PLAIN, PLAIN)
    assert ledger.allowance("it", 1, PLAIN) == pytest.approx((GRANT + 50 * SHARE) * PLAIN)
    for _ in range(10_000):
        ledger.pass_by(PLAIN, PLAIN)
    assert ledger.purse == KEPT * PLAIN, "a long time of plain decoding is no licence"


def test_several_begin_with_less_than_one_alone() -> None:
    ledger = Ledger()
    ledger.pass_by(PLAIN, PLAIN, batch=8)
    assert ledger.purse == pytest.approx((GRANT - LONE + SHARE) * PLAIN)
    ledger.pass_by(PLAIN, PLAIN, batch=1)
    assert ledger.purse == pytest.approx((GRANT + 2 * SHARE) * PLAIN), "the rest, once"
    ledger.pass_by(PLAIN, PLAIN, batch=1)
    assert ledger.purse == pytest.approx((GRANT + 3 * SHARE) * PLAIN)


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
            ledger.settle({"it": 1}, {0: tokens}, took, PLAIN)
            dearest = max(dearest, took)
        else:
            tokens, took = 1, PLAIN
        ledger.pass_by(took, PLAIN)
        spent, plain = spent + took, plain + tokens * PLAIN
        assert spent <= (1 + SHARE) * plain + dearest + (GRANT + CREDIT) * PLAIN


def test_debts_are_paid_back_before_anything_more_is_risked() -> None:
    """A draft may cost more than was thought: reading a prompt, a slow step."""
    ledger = Ledger()
    draft(ledger, tokens=1, seconds=4 * PLAIN)
    assert ledger.allowance("it", 1, PLAIN) == pytest.approx(-3 * PLAIN)
    assert ledger.allowance("another", 1, PLAIN) == pytest.approx(-3 * PLAIN), "one purse for all"
    for _ in range(int((3 - GRANT) / SHARE) + 1):
        ledger.pass_by(PLAIN, PLAIN)
    assert ledger.allowance("it", 1, PLAIN) == pytest.approx(SHARE * PLAIN)


def test_a_sequence_that_was_slowed_down_is_known() -> None:
    ledger = Ledger()
    draft(ledger, tokens=1, seconds=(1 + OWN) * PLAIN)
    assert not ledger.lost(0, PLAIN)
    draft(ledger, tokens=1, seconds=1.5 * PLAIN)
    assert ledger.lost(0, PLAIN) and not ledger.lost(1, PLAIN)
    draft(ledger, tokens=8, seconds=3 * PLAIN)
    assert not ledger.lost(0, PLAIN)
    draft(ledger, tokens=1, seconds=9 * PLAIN)
    ledger.forget(0)
    assert not ledger.lost(0, PLAIN)


def test_a_probe_is_paid_for_by_the_purse() -> None:
    """By what it costs the one that gains nothing; what all gain by it is won."""
    ledger = Ledger()
    for _ in range(200):
        ledger.pass_by(PLAIN, PLAIN)
    before = ledger.purse
    ledger.settle({"it": 1}, {0: 4, 1: 1}, 1.5 * PLAIN, PLAIN, probe=True)
    assert ledger.purse == pytest.approx(before - 0.5 * PLAIN)
    assert ledger.won("it", 2, PLAIN) == pytest.approx(PLAIN)
    ledger.settle({"it": 1}, {0: 1, 1: 1}, 1.5 * PLAIN, PLAIN, probe=True)
    assert ledger.purse == pytest.approx(before - PLAIN)
    assert ledger.won("it", 2, PLAIN) == pytest.approx(PLAIN), "its winnings pay for no probe"
