"""From what matches what to tokens per step."""

from __future__ import annotations

import msgspec
import pytest
import torch

from paceline.train.acceptance import (
    AcceptanceCounts,
    candidate_ranks,
    simulate_decoding,
    start_positions,
    total,
)


def matrix(rows: list[str]) -> torch.Tensor:
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def test_a_draft_starts_where_the_last_step_ended() -> None:
    # Starts 0, 3 and 4: two, none and one accepted; rows 1, 2 and 5 are never started from.
    found = simulate_decoding(matrix(["xx.", "xxx", "xxx", ".xx", "x..", "xxx"]), undrafted=0)
    assert found == AcceptanceCounts(tokens=6, steps=3, reached=(3, 2, 1), accepted=(2, 1, 0))
    assert found.mean_accepted_length == 2.0
    assert found.rates == (2 / 3, 1 / 2, 0.0)


def test_the_step_of_the_prompt_counts() -> None:
    assert simulate_decoding(matrix(["x", "."])) == AcceptanceCounts(3, 2, (1,), (1,))
    assert simulate_decoding(matrix([]).reshape(0, 3)) == AcceptanceCounts(
        1, 1, (0, 0, 0), (0, 0, 0)
    )


def test_nothing_is_tried_beyond_the_end() -> None:
    found = simulate_decoding(matrix(["xx.", "x.."]), undrafted=0)
    assert (found.tokens, found.steps) == (2, 1)
    assert found.reached == (1, 1, 0)


def test_full_acceptance_adds_the_targets_own_token() -> None:
    found = simulate_decoding(matrix(["xx"] * 9), undrafted=0)
    assert (found.tokens, found.steps) == (9, 3)
    assert found.rates == (1.0, 1.0)


def by_hand(text: list[int], prompt: int, drafts: list[list[int]]) -> tuple[int, int]:
    """Tokens and steps of an engine that gets these drafts, written down step by step."""
    committed, steps = prompt + 1, 1  # the prompt's own step gives one token
    while committed < len(text):
        accepted = 0
        for token in drafts[committed - 2]:
            position = committed + accepted
            if position >= len(text) or text[position] != token:
                break
            accepted += 1
        committed = min(len(text), committed + accepted + 1)
        steps += 1
    return len(text) - prompt, steps


@pytest.mark.parametrize("seed", range(20))
def test_walking_a_text_equals_decoding_it(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length, prompt = int(torch.randint(8, 30, (), generator=generator)), 4
    text = torch.randint(0, 2, (length,), generator=generator)
    drafts = torch.randint(0, 2, (length, 3), generator=generator)
    rows = start_positions(text, prompt)
    found = simulate_decoding(candidate_ranks(drafts[rows, :, None], text, rows) == 0)
    assert (found.tokens, found.steps) == by_hand(text.tolist(), prompt, drafts.tolist())


def test_counts_of_texts_are_summed_and_stored() -> None:
    parts = [AcceptanceCounts(5, 2, (2, 1), (1, 1)), AcceptanceCounts(3, 3, (3,), (0,))]
    both = total(parts)
    assert both == AcceptanceCounts(8, 5, (5, 1), (1, 1))
    assert msgspec.convert(both.to_dict(), AcceptanceCounts) == both
    assert total([]).mean_accepted_length == 0.0
