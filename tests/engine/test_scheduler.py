"""Who runs when: joining, waiting, sharing, giving way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.controller import Decision
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.engine.scheduler import Scheduler, SchedulerConfig
from paceline.errors import CacheMemoryError
from paceline.model.paged.cache import PagedCache
from support.cache_invariants import check_cache


def scheduler(blocks: int = 16, **limits: int) -> Scheduler:
    cache = PagedCache([(1, 2, 2)], blocks, 4, torch.float32, "cpu")
    config = SchedulerConfig(**{"max_positions": 200, **limits})
    return Scheduler(config, cache)


def seq(seq_id: int, length: int, max_tokens: int = 8, first: int = 0) -> SequenceState:
    tokens = [100 * (first or seq_id + 1) + i for i in range(length)]
    return SequenceState(seq_id, tokens, length, SamplingParams(max_tokens=max_tokens))


def advance(sched: Scheduler, asked: int = 0) -> dict[int, tuple[int, int]]:
    """Plan a step and pretend that it ran; every decoding sequence gains one token."""
    plan = sched.plan(lambda seqs: [Decision(asked)] * len(seqs), lambda length: length)
    done = {}
    for item in plan.slices:
        done[item.seq.seq_id] = (item.scheduled, item.draft_length)
        seq = sched.by_id()[item.seq.seq_id]
        seq.cached += item.scheduled
        if item.decodes:
            seq.tokens.append(1)
        sched.cache.commit(seq.seq_id, seq.tokens, seq.cached)
    check_cache(sched.cache)
    return done


def test_prompts_are_fed_in_chunks_beside_decoding() -> None:
    sched = scheduler(prefill_chunk=5, max_step_tokens=7)
    sched.add(seq(0, 2))
    assert advance(sched) == {0: (2, 0)}
    sched.add(seq(1, 12))
    assert advance(sched) == {0: (1, 0), 1: (5, 0)}
    assert advance(sched) == {0: (1, 0), 1: (5, 0)}
    assert advance(sched) == {0: (1, 0), 1: (2, 0)}
    assert advance(sched) == {0: (1, 0), 1: (1, 0)}


def test_a_chunk_does_not_draft_but_the_last_one_does() -> None:
    sched = scheduler(prefill_chunk=5)
    sched.add(seq(0, 7))
    assert advance(sched, asked=3) == {0: (5, 0)}
    assert advance(sched, asked=3) == {0: (2, 3)}


def test_drafts_stop_before_the_last_token_and_the_context() -> None:
    sched = scheduler()
    sched.add(seq(0, 3, max_tokens=3))
    assert advance(sched, asked=9)[0][1] == 2
    assert advance(sched, asked=9)[0][1] == 1
    assert advance(sched, asked=9)[0][1] == 0
    short = scheduler(max_positions=6)
    short.add(seq(0, 3, max_tokens=50))
    assert advance(short, asked=9)[0][1] == 2


def test_the_batch_limit_makes_others_wait() -> None:
    sched = scheduler(max_batch_size=2)
    for number in range(3):
        sched.add(seq(number, 2))
    assert set(advance(sched)) == {0, 1}
    sched.remove(0)
    assert set(advance(sched)) == {1, 2}


def test_samples_of_one_prompt_share_its_blocks() -> None:
    sched = scheduler()
    for number in range(3):
        sched.add(seq(number, 10, first=7))
    assert advance(sched) == {0: (10, 0)}  # the others wait for the blocks
    assert advance(sched) == {0: (1, 0), 1: (2, 0), 2: (2, 0)}


def beginning(seq_id: int, *parts: tuple[int, int], **params: Any) -> SequenceState:
    """A sequence of ``(first token, how many)``."""
    tokens = [first + place for first, many in parts for place in range(many)]
    return SequenceState(seq_id, tokens, len(tokens), SamplingParams(max_tokens=8, **params))


@pytest.mark.parametrize(("common", "steps"), [(0, 0), (3, 0), (4, 1), (20, 3), (60, 8)])
def test_a_prefix_is_waited_for_until_it_has_been_read(common: int, steps: int) -> None:
    """And not for the rest of the prompt that brings it; who is behind waits for neither."""
    sched = scheduler(blocks=64, prefill_chunk=8)
    sched.add(beginning(0, (1000, common), (2000, 90)))
    sched.add(beginning(1, (1000, common), (3000, 6)))
    sched.add(seq(2, 5))
    for step in range(steps):
        assert set(advance(sched)) == {0, 2}, step
    done = advance(sched)
    assert set(done) == {0, 1, 2} and sched.by_id()[1].cached == common + min(6, 8 - common % 4)
    assert sched.by_id()[1].prefix_hit_tokens == common // 4 * 4


def test_who_waits_for_a_prefix_keeps_its_place() -> None:
    sched = scheduler(blocks=64, prefill_chunk=8, max_batch_size=3)
    sched.add(beginning(0, (1000, 20), (2000, 40)))
    sched.add(beginning(1, (1000, 20), (3000, 6)))
    for number in (2, 3):
        sched.add(seq(number, 5))
    for _ in range(3):
        assert set(advance(sched)) == {0, 2}
    assert set(advance(sched)) == {0, 1, 2}
    # In the cache, too: 12 blocks would be enough for the first and the last one.
    tight = scheduler(blocks=14, prefill_chunk=8)
    tight.add(beginning(0, (1000, 20)))
    tight.add(beginning(1, (1000, 17), (3000, 7)))
    tight.add(seq(2, 18))
    assert set(advance(tight)) == {0}


def test_what_shares_nothing_waits_for_nothing() -> None:
    """A prompt that is scored is read as a whole."""
    sched = scheduler(blocks=64, prefill_chunk=8)
    sched.add(beginning(0, (1000, 60)))
    sched.add(beginning(1, (1000, 60), prompt_logprobs=1))
    assert set(advance(sched)) == {0, 1}


def test_scored_prompts_that_keep_coming_do_not_hold_up_who_shares_their_beginning() -> None:
    sched = scheduler(blocks=64, prefill_chunk=8)
    sched.add(beginning(0, (1000, 30), prompt_logprobs=0))
    sched.add(beginning(1, (1000, 20), (3000, 6)))
    for number in range(2, 6):
        sched.add(beginning(number, (1000, 30), prompt_logprobs=0))
        done = advance(sched)
    assert 1 in done and sched.by_id()[1].prefix_hit_tokens == 20


def test_rows_of_logits_are_bounded() -> None:
    """Scored tokens of a step; what is not scored is read as ever."""
    sched = scheduler(blocks=64, prefill_chunk=8, max_scored_rows=10)
    for number in range(2):
        sched.add(beginning(number, (1000 * number, 12), prompt_logprobs=0))
    sched.add(seq(2, 12))
    done = [advance(sched) for _ in range(4)]
    assert [{n: fed for n, (fed, _) in step.items()} for step in done] == [
        {0: 8, 1: 2, 2: 8},
        {0: 4, 1: 7, 2: 4},
        {0: 1, 1: 3, 2: 1},
        {0: 1, 1: 1, 2: 1},
    ]


def test_the_youngest_gives_way_and_comes_back() -> None:
    sched = scheduler(blocks=6)
    sched.add(seq(0, 7, max_tokens=16))
    sched.add(seq(1, 6, max_tokens=16))
    while not sched.preempted:
        assert 0 in advance(sched)
    assert sched.preempted == [1] and [s.seq_id for s in sched.waiting] == [1]
    assert sched.waiting[0].cached == 0 and len(sched.waiting[0].tokens) > 6
    sched.remove(0)
    assert 1 in advance(sched)
    assert sched.preemptions == 1


def test_a_draft_is_given_up_before_a_sequence_is() -> None:
    sched = scheduler(blocks=6)
    sched.add(seq(0, 7, max_tokens=12))
    sched.add(seq(1, 7, max_tokens=12))
    done = advance(sched, asked=10)
    assert done == {0: (7, 0), 1: (7, 0)}
    assert sched.preemptions == 0


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(CacheMemoryError, match="max_tokens"):
        scheduler(blocks=2).add(seq(0, 7, max_tokens=9))


def test_remove_frees_blocks_and_ignores_strangers() -> None:
    sched = scheduler()
    sched.add(seq(0, 9))
    advance(sched)
    assert sched.cache.pool.available < 16
    assert sched.remove(0) and not sched.remove(0)
    assert sched.cache.pool.available == 16 and not sched.has_work


def run(sched: Scheduler, asked: int = 0) -> tuple[int, int]:
    """Decode all that waits; tokens read, and the most that ran at once."""
    read = most = 0
    while sched.has_work:
        read += sum(feed for feed, _ in advance(sched, asked).values())
        most = max(most, len(sched.running))
        for done in [other for other in sched.running if other.remaining <= 0]:
            sched.remove(done.seq_id)
    return read, most


@pytest.mark.parametrize("chunk", [3, 8, 100])
@pytest.mark.parametrize("asked", [0, 5])
def test_prompts_of_half_the_cache_run_two_at_a_time_and_are_read_once(
    chunk: int, asked: int
) -> None:
    """What is promised to a prompt that is still being read is not promised again."""
    sched = scheduler(blocks=16, prefill_chunk=chunk, max_step_tokens=2 * chunk)
    for number in range(4):
        sched.add(seq(number, 28, max_tokens=4))
    read, most = run(sched, asked)
    assert sched.preemptions == 0
    assert read == 4 * (28 + 3)  # the last token of each is never computed
    assert most == 2


def test_shared_blocks_are_counted_once() -> None:
    """Samples of a prompt of more than half the cache run beside each other."""
    sched = scheduler(blocks=17)
    for number in range(4):
        sched.add(seq(number, 38, max_tokens=4, first=1))
    read, most = run(sched)
    assert sched.preemptions == 0 and most == 4
    assert read == 38 + 3 + 3 * (2 + 3)  # nine whole blocks are read once


REQUESTS = st.lists(
    # stem, tokens of it, tokens of its own, tokens to be generated
    st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 30), st.integers(1, 4)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(REQUESTS, st.integers(1, 20), st.integers(0, 6), st.integers(1, 5), st.integers(0, 3))
def test_admission_never_costs_a_prompt_its_blocks(
    requests: list[tuple[int, int, int, int]], chunk: int, asked: int, batch: int, apart: int
) -> None:
    """Answers of at most a block fit into the block that each is promised to grow into: whoever
    was let in stays, and every token is read once. ``advance`` checks the pool each step."""
    sched = scheduler(
        blocks=24, prefill_chunk=chunk, max_step_tokens=2 * chunk, max_batch_size=batch
    )
    live = []
    for number, (stem, shared, own, answer) in enumerate(requests):
        tokens = [1000 * stem + i for i in range(shared)]
        tokens += [5000 + 100 * number + i for i in range(own)]
        live.append(SequenceState(number, tokens, len(tokens), SamplingParams(max_tokens=answer)))
    read = 0
    coming = list(live)
    while coming or sched.has_work:
        for _ in range(apart or len(coming)):
            if coming:
                sched.add(coming.pop(0))
        read += sum(feed for feed, _ in advance(sched, asked).values())
        pool = sched.cache.pool
        used = sum(pool.in_use(block) for block in range(pool.total))
        assert pool.available + used == pool.total
        for done in [other for other in sched.running if other.remaining <= 0]:
            sched.remove(done.seq_id)
    assert sched.preemptions == 0
    assert read == sum(len(done.tokens) - 1 - done.prefix_hit_tokens for done in live)
    assert sched.cache.pool.available == sched.cache.pool.total
