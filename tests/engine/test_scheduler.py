"""Who runs when: joining, waiting, sharing, giving way."""

from __future__ import annotations

import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.sequence import Sequence
from paceline.engine.scheduler import Scheduler, SchedulerConfig
from paceline.errors import CacheMemoryError
from paceline.model.cache import PagedCache


def scheduler(blocks: int = 16, forgotten: list[int] | None = None, **limits: int) -> Scheduler:
    cache = PagedCache([(1, 2, 2)], blocks, 4, torch.float32, "cpu")
    config = SchedulerConfig(**{"max_positions": 200, **limits})
    return Scheduler(
        config, cache, lambda n: n, (forgotten if forgotten is not None else []).append
    )


def seq(seq_id: int, length: int, max_tokens: int = 8, first: int = 0) -> Sequence:
    tokens = [100 * (first or seq_id + 1) + i for i in range(length)]
    return Sequence(seq_id, tokens, length, SamplingParams(max_tokens=max_tokens))


def advance(sched: Scheduler, wish: int = 0) -> dict[int, tuple[int, int]]:
    """Plan a step and pretend that it ran; every decoding sequence gains one token."""
    plan = sched.plan(lambda seqs: [wish] * len(seqs))
    done = {}
    for item in plan.slices:
        done[item.seq.seq_id] = (item.feed, item.draft_length)
        decodes = item.decodes
        item.seq.cached += item.feed
        if decodes:
            item.seq.tokens.append(1)
        sched.cache.commit(item.seq.seq_id, item.seq.tokens, item.seq.cached)
    sched.cache.check()
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
    assert advance(sched, wish=3) == {0: (5, 0)}
    assert advance(sched, wish=3) == {0: (2, 3)}


def test_drafts_stop_before_the_last_token_and_the_context() -> None:
    sched = scheduler()
    sched.add(seq(0, 3, max_tokens=3))
    assert advance(sched, wish=9)[0][1] == 2
    assert advance(sched, wish=9)[0][1] == 1
    assert advance(sched, wish=9)[0][1] == 0
    short = scheduler(max_positions=6)
    short.add(seq(0, 3, max_tokens=50))
    assert advance(short, wish=9)[0][1] == 2


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


def test_the_youngest_gives_way_and_comes_back() -> None:
    forgotten: list[int] = []
    sched = scheduler(blocks=6, forgotten=forgotten)
    sched.add(seq(0, 7, max_tokens=16))
    sched.add(seq(1, 6, max_tokens=16))
    while not forgotten:
        assert 0 in advance(sched)
    assert forgotten == [1] and [s.seq_id for s in sched.waiting] == [1]
    assert sched.waiting[0].cached == 0 and len(sched.waiting[0].tokens) > 6
    sched.remove(0)
    assert 1 in advance(sched)
    assert sched.preemptions == 1


def test_a_draft_is_given_up_before_a_sequence_is() -> None:
    sched = scheduler(blocks=4)
    sched.add(seq(0, 7, max_tokens=9))
    sched.add(seq(1, 7, max_tokens=9))
    done = advance(sched, wish=6)
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
