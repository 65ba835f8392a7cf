"""Telling apart what start-up got wrong and how the machine changes."""

from __future__ import annotations

import random

import pytest

from paceline.control.correction import Correction, PassPrice, node_bucket

PLAIN, DRAFTS = 0, 3


def teach(known: Correction, cell: int, ratio: float, steps: int, batch: int = 1) -> None:
    for _ in range(steps):
        known.observe(batch, cell, ratio)


def test_dear_drafts_do_not_make_plain_steps_look_dear() -> None:
    """They cost twice what was measured at start-up: plain decoding must not look better for it."""
    known = Correction()
    teach(known, PLAIN, 1.0, 8)
    teach(known, DRAFTS, 2.0, 40)
    assert known.factor(1, DRAFTS) == pytest.approx(2.0, rel=0.05)
    assert known.factor(1, PLAIN) < 1.2


def test_a_machine_that_slows_down_slows_all() -> None:
    """Seen in drafts, it is expected of plain steps, which nobody has made since."""
    known = Correction()
    for _ in range(20):
        teach(known, PLAIN, 1.0, 2)
        teach(known, DRAFTS, 1.0, 2)
    teach(known, DRAFTS, 1.4, 30)
    assert known.factor(1, PLAIN) == pytest.approx(1.4, rel=0.08)
    assert known.factor(1, DRAFTS) == pytest.approx(1.4, rel=0.03)


def test_noise_and_hiccups_are_averaged_out() -> None:
    dice = random.Random(0)
    known = Correction()
    for _ in range(300):
        hiccup = 5.0 if dice.random() < 0.02 else 1.0
        known.observe(1, PLAIN, hiccup * dice.lognormvariate(0.0, 0.06))
        known.observe(1, DRAFTS, 1.5 * hiccup * dice.lognormvariate(0.0, 0.06))
    assert known.factor(1, PLAIN) == pytest.approx(1.0, rel=0.1)
    assert known.factor(1, DRAFTS) / known.factor(1, PLAIN) == pytest.approx(1.5, rel=0.06)


def test_a_new_cell_is_thought_like_its_neighbour() -> None:
    known = Correction()
    teach(known, PLAIN, 1.0, 8)
    teach(known, 2, 1.6, 30)
    assert known.factor(1, 3) == pytest.approx(1.6, rel=0.05)


def test_a_new_group_is_thought_like_the_nearest() -> None:
    known = Correction()
    teach(known, PLAIN, 1.5, 20, batch=2)
    assert known.factor(3, PLAIN) == pytest.approx(1.5, rel=0.05)
    assert known.seen(2, PLAIN) == 20 and not known.seen(3, PLAIN)


def test_cells() -> None:
    assert [node_bucket(n) for n in (0, 0.2, 1, 2, 3, 4, 7, 8)] == [0, 1, 1, 2, 2, 3, 3, 4]


def test_a_draft_takes_an_overhead_and_so_much_a_pass() -> None:
    """Told apart once drafts have had several lengths; one hiccup in between moves little."""
    price = PassPrice()
    for step in range(60):
        count = 2 + 3 * (step % 4)
        price.observe(0.1 * count, 0.1, (0.2 + 0.13 * count) * (20 if step == 30 else 1))
    assert price.overhead == pytest.approx(2.0, abs=0.6)
    assert price.factor == pytest.approx(1.3, abs=0.1)
    assert price.seconds(1.6, 0.1) == pytest.approx(0.2 + 0.13 * 16, rel=0.08)


def test_a_further_pass_never_looks_free() -> None:
    """Short drafts met busy moments: longer ones were cheaper. Once, their line sank below zero."""
    price = PassPrice()
    for step in range(300):
        count, seconds = (1, 4.0) if step % 2 else (8, 1.5)
        price.observe(count, 1.0, seconds)
    assert price.seconds(12, 1.0) >= price.seconds(8, 1.0) + 0.8 > 2.0


def test_the_first_draft_of_a_process_is_slow() -> None:
    """Eight levels that took four times as long: after two more its price is about right."""
    price = PassPrice()
    for seconds in (3.2, 0.9, 0.9):
        price.observe(0.8, 0.1, seconds)
    assert price.seconds(0.8, 0.1) < 1.5 * 0.9
    assert price.seconds(0.3, 0.1) < 2 * 0.4
