"""The scheduler: continuous batching, chunked prefill, preemption by recomputation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from paceline.control.controller import Decision
from paceline.core.batch import Plan, Slice
from paceline.core.sequence import SequenceState
from paceline.errors import CacheMemoryError
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import PagedCache


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step. Token budgets count pending tokens; draft nodes come on top."""

    max_batch_size: int = 8  # running sequences
    max_step_tokens: int = 2048  # token budget of all sequences together
    prefill_chunk: int = 512  # prefill tokens of one sequence
    max_positions: int = 2048  # context of target and draft model; drafts end before it
    max_scored_rows: int = 2048  # prompt tokens with log-probabilities: each has a row of logits


class Scheduler:
    """Keeps the waiting and running sequences, plans each step and reserves its cache blocks."""

    def __init__(self, config: SchedulerConfig, cache: PagedCache) -> None:
        self.config = config
        self.cache = cache
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.decisions: dict[int, Decision] = {}  # the controller's, of the step in progress
        self.preemptions = 0
        self.preempted: list[int] = []  # ids that the engine must still ``forget``

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def by_id(self) -> dict[int, SequenceState]:
        """The running sequences by id."""
        return {seq.seq_id: seq for seq in self.running}

    def add(self, seq: SequenceState) -> None:
        """Queue a sequence behind those of equal or lower ``priority``. Raises as ``check``."""
        self.check(seq)
        position = len(self.waiting)
        while position and self.waiting[position - 1].params.priority > seq.params.priority:
            position -= 1
        self.waiting.insert(position, seq)

    def check(self, seq: SequenceState) -> None:
        """Raise CacheMemoryError if the cache could not hold the sequence even alone."""
        longest = min(len(seq.tokens) + seq.remaining, self.config.max_positions)
        if -(-longest // self.cache.block_size) > self.cache.num_blocks:
            raise CacheMemoryError(
                f"the request may grow to {longest} tokens, but the cache holds "
                f"{self.cache.num_blocks * self.cache.block_size}; "
                "lower max_tokens or raise kv_cache_memory"
            )

    def remove(self, seq_id: int) -> bool:
        """Drop a waiting or running sequence and its blocks; False if the id is unknown."""
        for queue in (self.running, self.waiting):
            for seq in queue:
                if seq.seq_id == seq_id:
                    queue.remove(seq)
                    self.cache.free(seq_id)
                    return True
        return False

    def plan(
        self,
        select_drafts: Callable[[Sequence[SequenceState]], Sequence[Decision]],
        max_nodes: Callable[[int], int],
    ) -> Plan:
        """Plan the next step. ``select_drafts`` returns the wanted draft of each running sequence,
        ``max_nodes`` the most nodes of a draft of a given length."""
        for seq in list(self.running):
            if self.cache.outgrown(seq.seq_id, len(seq.tokens)):
                self._preempt(seq)  # prefilled again with the RoPE factors for long sequences
        self._admit()
        ids = [seq.seq_id for seq in self.running]
        self.decisions = dict(zip(ids, select_drafts(self.running), strict=True))
        scheduled: list[tuple[SequenceState, int]] = []  # with the number of pending tokens
        budget, score_budget = self.config.max_step_tokens, self.config.max_scored_rows
        # Oldest first: if blocks run out the youngest is preempted, so the oldest always finishes.
        for seq in list(self.running):
            count = self._count_to_schedule(seq, budget, score_budget)
            # An older sequence may have preempted this one in this loop.
            if count and seq in self.running and self._reserve(seq, count):
                budget -= count
                score_budget -= min(count, seq.unscored)
                scheduled.append((seq, count))
        # Drafts get the blocks that are left.
        slices: list[Slice] = []
        for seq, count in scheduled:
            decision = self.decisions[seq.seq_id]
            length = self._draft_length(seq, count, decision.length, max_nodes)
            slices.append(Slice(seq.view(), count, length, seq.drafts, decision.drafter))
        # Sequences with the same adapter are neighbours, so that one product serves their rows.
        return Plan(tuple(sorted(slices, key=lambda item: item.seq.adapter_number)))

    def plan_alone(self, seq: SequenceState) -> Plan:
        """Plan a step of one running sequence without a draft; empty if it had to be preempted."""
        config = self.config
        count = self._count_to_schedule(seq, config.max_step_tokens, config.max_scored_rows)
        fits = self._reserve(seq, count)
        return Plan((Slice(seq.view(), count, 0, seq.drafts),) if fits else ())

    def _count_to_schedule(self, seq: SequenceState, budget: int, score_budget: int) -> int:
        """How many pending tokens of a sequence to schedule: at most ``budget`` in all, and at most
        ``score_budget`` that need log-probabilities."""
        count = min(seq.num_pending, self.config.prefill_chunk, budget)
        return min(count, score_budget) if seq.unscored > score_budget else count

    def _draft_length(
        self, seq: SequenceState, scheduled: int, requested: int, max_nodes: Callable[[int], int]
    ) -> int:
        """The requested draft length, limited by the request, the context and the free blocks;
        reserves the blocks of the draft's nodes. The last token of ``max_tokens`` and of the
        context is the target's own, so it is not drafted."""
        if scheduled < seq.num_pending or seq.params.drafter == "none" or not seq.drafts:
            return 0
        if seq.params.draft_length is not None:
            requested = seq.params.draft_length
        left = self.config.max_positions - len(seq.tokens) - 1
        switch = self.cache.rope_switch
        if switch is not None and len(seq.tokens) <= switch:
            left = min(left, switch - len(seq.tokens))  # later nodes need other RoPE factors
        length = max(0, min(requested, seq.remaining - 1, left))
        while length and (nodes := max_nodes(length)):
            try:
                self.cache.reserve(seq.seq_id, seq.cached + scheduled + nodes, nodes)
                return length
            except OutOfBlocksError:
                # Recurrent states are scarce, and a shorter draft may still get some.
                length = length // 2 if self.cache.states is not None else 0
        return 0

    def _admit(self) -> None:
        """Start waiting sequences in order while there is room. A sequence whose prefix another one
        is prefilling keeps waiting for that prefix; its place in the batch and its blocks stay
        reserved, and later sequences may start before it."""
        reserved: list[int] = []  # blocks that each sequence waiting for a prefix will need
        while len(reserved) < len(self.waiting) and (
            len(self.running) + len(reserved) < self.config.max_batch_size
        ):
            seq = self.waiting[len(reserved)]
            if self.running and not self._fits(seq, sum(reserved)):
                return
            shares = seq.params.prompt_logprobs is None
            shared = self._prefix_in_progress(seq) if shares and self.cache.shares else 0
            if shared:
                reserved.append(self._num_blocks(seq) - shared // self.cache.block_size)
                continue
            seq.cached = self.cache.admit(seq.seq_id, seq.tokens, shares, seq.adapter_number)
            del self.waiting[len(reserved)]  # only now: a failure above must not lose the sequence
            if not seq.started:
                seq.started, seq.prefix_hit_tokens = time.perf_counter(), seq.cached
            self.running.append(seq)

    def _prefix_in_progress(self, seq: SequenceState) -> int:
        """How many leading tokens, in whole blocks, an earlier running sequence is prefilling for
        ``seq`` as well; 0 if none. Waiting for them lets n samples of one prompt prefill it once.
        Requests with prompt_logprobs are not asked: waiting for them as well might never end."""
        size = self.cache.block_size
        for other in self.running:
            earlier = other.seq_id < seq.seq_id
            if earlier and other.num_pending > size and other.adapter is seq.adapter:
                shared = _common_prefix(other.tokens, seq.tokens, size)
                # At least the last token must be computed.
                shared = min(shared, len(seq.tokens) - 1) // size * size
                if other.cached < shared:
                    return shared
        return 0

    def _num_blocks(self, seq: SequenceState) -> int:
        """Blocks for the sequence's tokens, and one for the tokens to come."""
        return -(-len(seq.tokens) // self.cache.block_size) + 1

    def _fits(self, seq: SequenceState, reserved: int = 0) -> bool:
        """Whether all tokens of ``seq`` fit beside what the running sequences will need: the blocks
        of prompts still being prefilled and one more block each. ``reserved`` blocks belong to
        sequences queued before it. Blocks that running sequences use can be shared."""
        pool = self.cache.pool
        promised = reserved + len(self.running)
        promised += sum(
            self.cache.blocks_missing(other.seq_id, len(other.tokens)) for other in self.running
        )
        needed = self._num_blocks(seq)
        if needed + promised <= pool.available:
            return True
        # Block hashes take time, so they are computed only where they can change the answer.
        tokens, adapter = seq.tokens, seq.adapter_number
        shared = self.cache.shared_blocks(tokens, adapter) if self.running else ()
        return needed - sum(map(pool.in_use, shared)) + promised <= pool.available

    def _reserve(self, seq: SequenceState, count: int) -> bool:
        """Reserve blocks for the next ``count`` pending tokens, preempting the youngest sequences
        if blocks run out; False if ``seq`` itself was preempted."""
        while True:
            try:
                self.cache.reserve(seq.seq_id, seq.cached + count)
                return True
            except OutOfBlocksError:
                victim = self.running[-1]
            if len(self.running) == 1:
                raise CacheMemoryError(
                    "the cache cannot hold one sequence; raise kv_cache_memory or lower max_tokens"
                )
            self._preempt(victim)
            if victim is seq:
                return False

    def _preempt(self, seq: SequenceState) -> None:
        """Free a sequence's blocks and queue it first; its tokens will be prefilled again."""
        self.running.remove(seq)
        self.cache.free(seq.seq_id)
        seq.cached = 0
        self.waiting.appendleft(seq)
        self.preemptions += 1
        self.preempted.append(seq.seq_id)


def _common_prefix(one: Sequence[int], other: Sequence[int], size: int) -> int:
    """How many leading tokens two sequences share, in whole blocks of ``size``."""
    starts = range(0, min(len(one), len(other)) - size + 1, size)
    same = takewhile(lambda start: one[start : start + size] == other[start : start + size], starts)
    return size * sum(1 for _ in same)
