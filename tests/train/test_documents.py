"""Documents in batches: weights, order, cutting, padding; and the loss against probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline import DataError
from paceline.train.data import Documents, TokenStream
from paceline.train.losses import distribution_loss, teacher_probs
from paceline.train.unrolled import DraftStarts


def stream(name: str, lengths: list[int], prompt: int = 2, first: int = 0) -> TokenStream:
    """Documents of these lengths, of ids that count up; their first ``prompt`` not to be learnt."""
    starts = np.cumsum([0, *lengths[:-1]])
    loss_mask = np.concatenate([np.arange(length) >= prompt for length in lengths])
    ids = np.arange(first, first + sum(lengths)).astype(np.uint16)
    return TokenStream(name, ids, loss_mask, starts)


def test_every_document_is_used_once_per_epoch() -> None:
    documents = Documents([stream("a", [10] * 20)], [1.0], seed=0, longest=64)
    first = [n for step in range(5) for n in documents.batch(step, 40)]
    second = [n for step in range(5, 10) for n in documents.batch(step, 40)]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_a_batch_depends_on_seed_and_step_only() -> None:
    streams = [stream("a", [9, 14, 30] * 5), stream("b", [25] * 8)]
    once, again, other = (Documents(streams, [1, 2], seed, 64) for seed in (3, 3, 4))
    assert again.batch(7, 60) == once.batch(7, 60)  # without the batches before it
    assert [once.batch(n, 60) for n in range(5)] == [again.batch(n, 60) for n in range(5)]
    assert [other.batch(n, 60) for n in range(5)] != [again.batch(n, 60) for n in range(5)]


def test_files_are_drawn_by_weight() -> None:
    documents = Documents([stream("a", [10] * 9), stream("b", [10] * 5)], [3, 1], 0, 64)
    drawn = [n for step in range(400) for n in documents.batch(step, 20)]
    assert 0.7 < sum(n < 9 for n in drawn) / len(drawn) < 0.8


def test_long_documents_are_divided_and_useless_pieces_left_out() -> None:
    own = stream("a", [3, 100, 6, 40], prompt=20)
    documents = Documents([own], [1.0], 0, longest=32)
    pieces = [(int(ids[0]), int(ids[-1]) + 1) for ids, _ in documents.pieces]
    # 3 and 6 tokens have no position to learn from; the last piece of 100 has four tokens
    assert pieces == [(3, 35), (35, 67), (67, 99), (99, 103), (109, 141), (141, 149)]
    with pytest.raises(DataError, match=r"few\.jsonl has no document of 4 tokens or more"):
        Documents([stream("few.jsonl", [3, 3])], [1.0], 0, 32)


def test_the_separator_after_a_text_is_its_end_token() -> None:
    """Where it is to be learnt: conversations have end tokens of their own."""
    ids = np.array([9, 1, 2, 3, 9, 4, 5, 6, 9, 7, 8, 6, 5], np.uint16)
    loss_mask = np.ones(13, bool)
    loss_mask[8] = False
    documents = Documents([TokenStream("a", ids, loss_mask, np.array([0, 4, 8]))], [1.0], 0, 64)
    pieces = [piece.tolist() for piece, _ in documents.pieces]
    assert pieces == [[9, 1, 2, 3, 9], [9, 4, 5, 6], [9, 7, 8, 6, 5]]


def test_windows_are_of_like_length_and_padded_at_the_end() -> None:
    lengths = [30, 5, 28, 6, 29, 50]
    own = stream("a", lengths, first=1)
    documents = Documents([own], [1.0], 0, 64)
    parts = documents.windows(range(6), tokens=64)
    assert [part.lengths for part in parts] == [(5, 6), (28, 29), (30,), (50,)]
    part = parts[1]
    assert part.ids.shape == (2, 29)
    assert part.ids[0].tolist() == [*range(36, 64), 0] and not part.loss_mask[0, 28]
    assert part.loss_mask[1].tolist() == [False] * 2 + [True] * 27
    assert sum(p.drafts for p in parts) == sum(length - 2 for length in lengths)


def test_packed_windows_hold_the_same_texts() -> None:
    documents = Documents([stream("a", [30, 20, 40, 10])], [1.0], 0, 64)
    parts = documents.packed_windows([0, 1, 2, 3], 60)
    assert [part.lengths for part in parts] == [(50,), (50,)]
    assert parts[0].ids[0].tolist() == list(range(50))
    assert parts[1].loss_mask[0].nonzero()[:, 0].tolist() == [*range(2, 40), *range(42, 50)]


def test_draft_starts_of_several_windows() -> None:
    loss_mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 0, 0, 1, 0]]).bool()
    starts = DraftStarts.of(loss_mask)
    assert starts.flat.tolist() == [0, 1, 3, 6 + 2] and starts.longest == 3
    assert starts.padded.tolist() == [0, 1, 2, 3]
    assert starts.position.tolist() == [0, 1, 3, 2]
    assert starts.index_ahead(2).tolist() == [2, 3, 5, 6 + 4]
    assert starts.index_ahead(4).tolist() == [4, 5, 5, 6 + 5]
    assert starts.in_window(3).tolist() == [True, True, False, True]


@pytest.mark.parametrize("tv_weight", [0.0, 0.3, 1.0])
def test_the_loss_and_its_gradient_are_those_of_autograd(tv_weight: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(150, 40, generator=generator, requires_grad=True)
    probs = torch.randn(30, 40, generator=generator).softmax(-1)
    index = torch.randint(30, (150,), generator=generator)
    weights = torch.rand(150, generator=generator)
    losses = -(probs[index] * logits.log_softmax(-1)).sum(-1)
    if tv_weight:
        overlap = torch.minimum(probs[index], logits.softmax(-1)).sum(-1)
        losses = (1 - tv_weight) * losses + tv_weight * (1 - overlap)
    expected = (losses * weights).sum()
    (wanted,) = torch.autograd.grad(2 * expected, logits)
    found = distribution_loss(logits, probs, index, weights, tv_weight)
    (gradient,) = torch.autograd.grad(2 * found, logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_laws_with_a_share_for_the_likeliest_token(share: float) -> None:
    logits = torch.randn(600, 11, generator=torch.Generator().manual_seed(1))
    probs = teacher_probs(torch.arange(600), lambda rows: logits[rows], share)
    best = torch.nn.functional.one_hot(logits.argmax(-1), 11)
    torch.testing.assert_close(probs, (1 - share) * logits.softmax(-1) + share * best)
