"""Ties are told from bugs by re-scoring."""

from __future__ import annotations

import math

import pytest

from paceline.core.params import SamplingParams
from paceline.lab.certify.decoding import Difference, explain, first_difference
from support.engine_models import adapted, reference_logits

MODEL = adapted()
PROMPT = [5, 9, 2]


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], []) is None


def test_equal_texts_have_no_difference() -> None:
    assert explain(MODEL, PROMPT, [4, 5], [4, 5], SamplingParams()) is None


def test_the_gap_is_that_of_the_two_logits() -> None:
    logits = reference_logits(MODEL, [*PROMPT, 4])[-1]
    difference = explain(MODEL, PROMPT, [4, 7, 1], [4, 8, 1], SamplingParams())
    assert difference is not None and (difference.at, difference.left, difference.right) == (
        1,
        7,
        8,
    )
    assert difference.gap == pytest.approx(abs(float(logits[7] - logits[8])), abs=1e-4)
    assert not difference.is_tie
    assert 0 < difference.rounding < 1e-4


def test_a_truncated_text_is_no_tie() -> None:
    difference = explain(MODEL, PROMPT, [4, 7], [4], SamplingParams())
    assert difference is not None and difference.gap == math.inf and not difference.is_tie


def test_sampled_scores_take_temperature_and_noise_into_account() -> None:
    params = SamplingParams(temperature=0.5, seed=3)
    hot = explain(MODEL, PROMPT, [7], [8], params)
    cold = explain(MODEL, PROMPT, [7], [8], SamplingParams())
    assert hot is not None and cold is not None
    assert hot.gap != pytest.approx(cold.gap)
    assert hot.rounding == pytest.approx(2 * cold.rounding)


def test_a_token_at_the_edge_of_truncation_is_a_tie() -> None:
    order = reference_logits(MODEL, PROMPT)[-1].argsort(descending=True).tolist()
    params = SamplingParams(temperature=1.0, top_k=5, seed=3)
    for left, right, expected in (
        (order[0], order[4], True),  # the last that is kept
        (order[0], order[5], True),  # the first that is cut
        (order[0], order[9], False),
        (order[0], order[2], False),
    ):
        difference = explain(MODEL, PROMPT, [left], [right], params)
        assert difference is not None and difference.is_tie == expected


def test_rounding_is_the_effect_of_other_batch_shapes() -> None:
    """Tiny in float32, and the same logits however the text was read."""
    difference = explain(MODEL, list(range(5, 45)), [4, 7], [4, 8], SamplingParams())
    assert difference is not None and 0 <= difference.rounding < 2e-4
    assert Difference(0, 1, 2, 0.3, 0.2).is_tie is False
    assert Difference(0, 1, 2, 0.3, 0.4).is_tie is True
