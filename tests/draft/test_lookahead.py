"""The window is Jacobi iteration: its guesses converge to the target's choices."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.draft.lookahead import Lookahead, LookaheadDrafter, Pool, remember
from paceline.errors import ConfigError
from support.draft_steps import paths_of, request, run_step

VOCAB = 211


def after(token: int) -> int:
    """A long cycle through the vocabulary."""
    return (3 * token + 7) % VOCAB


def one_hot(token: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float()


def markov(tokens: list[int]) -> torch.Tensor:
    """The next token depends on the last one."""
    return one_hot(after(tokens[-1]))


def loop(tokens: list[int]) -> torch.Tensor:
    """Ten tokens over and over."""
    return one_hot((tokens[-1] + 1) % 10)


def placed(tokens: list[int]) -> torch.Tensor:
    """The next token depends only on its position, as noise does; tokens do not repeat soon."""
    return one_hot(len(tokens) * 17 % VOCAB)


def pooled(drafter: LookaheadDrafter) -> list[list[int]]:
    known = drafter.states[0].pool
    return [[head, *rest] for head, rests in known.items() for rest in rests]


@pytest.mark.parametrize("window, ngram", [(5, 3), (3, 4), (2, 3), (4, 2), (6, 5)])
def test_ngrams_are_what_the_target_says(window: int, ngram: int) -> None:
    """After the first guesses are replaced, every n-gram is part of the true cycle."""
    drafter = LookaheadDrafter("cpu", Lookahead(window=window, ngram=ngram, candidates=4))
    seq = request([5])
    for step in range(5 * ngram):
        if step == 2 * ngram:
            drafter.states[0].pool = {}
        run_step(drafter, markov, [seq], [window + ngram])
    ngrams = pooled(drafter)
    assert {len(tokens) for tokens in ngrams} == {ngram}
    assert all(y == after(x) for tokens in ngrams for x, y in pairwise(tokens))


def test_columns_stay_where_they_are_in_the_text() -> None:
    """The right token differs at each position: a guess that slipped by one is never accepted.

    One token a step without speculation; here nearly every step must accept the window's chain.
    """
    drafter = LookaheadDrafter("cpu", Lookahead(window=6, ngram=3, candidates=1))
    seq = request([1])
    steps = [run_step(drafter, placed, [seq], [8])[0] for _ in range(30)]
    late = [len(step.commit.tokens) for step in steps[10:]]
    assert sum(late) / len(late) > 2.5
    assert seq.tokens[1:] == [n * 17 % VOCAB for n in range(1, len(seq.tokens))]


def test_a_cycle_is_generated_several_tokens_at_a_time() -> None:
    """With n-grams of four the pool alone yields four tokens a step once it knows the text."""
    drafter = LookaheadDrafter("cpu", Lookahead(window=4, ngram=4, candidates=2))
    seq = request([5])
    lengths = [len(run_step(drafter, loop, [seq], [5])[0].commit.tokens) for _ in range(40)]
    assert lengths[0] == 1 and min(lengths[-20:]) >= 4


@pytest.mark.parametrize("window, ngram, candidates", [(5, 3, 3), (3, 4, 2), (2, 2, 1), (7, 5, 4)])
def test_trees_keep_to_their_length(window: int, ngram: int, candidates: int) -> None:
    torch.manual_seed(0)
    drafter = LookaheadDrafter("cpu", Lookahead(window=window, ngram=ngram, candidates=candidates))
    seq = request([1, 2, 3])
    largest = dict.fromkeys(range(10), 0)
    for step in range(600):
        length = step % 10
        # Few first tokens, so that pools fill; nothing else repeats, so that no nodes are shared.
        tree = run_step(
            drafter, lambda tokens: torch.rand(VOCAB) + (torch.arange(VOCAB) < 2), [seq], [length]
        )[0].tree
        assert max(tree.depths, default=0) <= length
        largest[length] = max(largest[length], len(tree))
        assert len(tree) <= drafter.max_nodes(length)
    assert largest[0] == drafter.max_nodes(0) == 0


def test_the_bound_on_nodes_is_reached() -> None:
    drafter = LookaheadDrafter("cpu", Lookahead(window=5, ngram=3, candidates=3))
    torch.manual_seed(0)
    seq = request(range(100, 110))
    for _ in range(5):
        run_step(drafter, lambda tokens: torch.rand(VOCAB), [seq], [8])
    for rest in ([11, 12], [13, 14], [15, 16]):
        remember(drafter.states[0].pool, [seq.tokens[-1], *rest], size=3)
    tree = run_step(drafter, lambda tokens: torch.rand(VOCAB), [seq], [8])[0].tree
    assert len(tree) == drafter.max_nodes(8) == 3 * 2 + 4 + 5
    assert paths_of(tree)[:2] == [[15], [15, 16]], "candidates of the pool first, the latest ahead"


def test_equal_paths_are_one_node() -> None:
    """A candidate that is in the window, too, adds no node."""
    drafter = LookaheadDrafter("cpu", Lookahead(window=5, ngram=4, candidates=3))
    seq = request([5])
    for _ in range(40):
        tree = run_step(drafter, loop, [seq], [8])[0].tree
    paths = [tuple(path) for path in paths_of(tree)]
    assert len(set(paths)) == len(paths)
    assert len(tree) < drafter.max_nodes(8)


def test_plain_steps_keep_window_and_pool() -> None:
    drafter = LookaheadDrafter("cpu", Lookahead(window=4, ngram=3, candidates=2))
    seq = request([5])
    for _ in range(30):
        run_step(drafter, loop, [seq], [5])
    before = pooled(drafter)
    for _ in range(20):
        assert len(run_step(drafter, loop, [seq], [0])[0].tree) == 0
    assert pooled(drafter) == before
    assert len(run_step(drafter, loop, [seq], [5])[0].commit.tokens) > 1


def test_a_proposal_may_be_withdrawn() -> None:
    """A second proposal, shorter or empty, replaces the first one completely."""
    drafter, once = LookaheadDrafter("cpu"), LookaheadDrafter("cpu")
    seq, same = request([5]), request([5])
    for length in (5, 0, 2, 5, 0, 1, 5, 5, 3):
        drafter.propose(Plan((Slice(seq, 1, 6),)))
        step, expected = (
            run_step(own, loop, [text], [length])[0] for own, text in ((drafter, seq), (once, same))
        )
        assert step.tree.tokens.equal(expected.tree.tokens)
        assert drafter.states[0].columns[1:] == once.states[0].columns[1:]


def test_sequences_do_not_mix_and_are_forgotten() -> None:
    drafter = LookaheadDrafter("cpu")
    first, second = request([5], 0), request([9], 1)
    alone = LookaheadDrafter("cpu")
    lonely = request([9], 1)
    for _ in range(20):
        run_step(drafter, markov, [first, second], [6, 4])
        run_step(alone, markov, [lonely], [4])
    assert second.tokens == lonely.tokens
    drafter.forget(0)
    drafter.forget(7)
    assert set(drafter.states) == {1}


def test_steps_of_other_trees_and_prompt_chunks_are_passed_over() -> None:
    drafter = LookaheadDrafter("cpu")
    seq = request([1, 2, 3, 4])
    seq.cached = 0
    assert len(drafter.propose(Plan((Slice(seq, 2, 4),)))[0]) == 0
    out = ModelOutput(torch.zeros(1, VOCAB))
    drafter.observe([Commit(0, (), scheduled=2)], out)
    seq.cached = 3
    drafter.propose(Plan((Slice(seq, 1, 4),)))
    columns = [list(column) for column in drafter.states[0].columns]
    drafter.observe([Commit(0, (9,), drafted=1, scheduled=1, choices=(9, 9))], out)
    assert drafter.states[0].columns == columns


def test_pool_keeps_the_latest() -> None:
    pool: Pool = {}
    for second in (1, 2, 1, 3):
        remember(pool, (7, second), size=2)
    assert pool == {7: [(1,), (3,)]}


@pytest.mark.parametrize("sizes", [(1, 3, 3), (5, 1, 3), (5, 3, 0)])
def test_sizes_that_make_no_window(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        Lookahead(**dict(zip(("window", "ngram", "candidates"), sizes, strict=True)))
