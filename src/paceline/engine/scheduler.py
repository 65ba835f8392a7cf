"""Who runs in a step: continuous batching, chunked prefill, preemption by recomputation."""

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
    """Limits of a step, in pending tokens; draft nodes come on top."""

    max_batch_size: int = 8
    max_step_tokens: int = 2048  # prefill tokens of all sequences in one step
    prefill_chunk: int = 512  # of one sequence in one step
    max_positions: int = 2048  # of target and draft: a draft must not reach beyond
    max_scored_rows: int = 2048  # of one step: each row of a scored prompt has a row of logits


class Scheduler:
    """Waiting and running sequences; makes each step's plan and reserves its cache blocks."""

    def __init__(self, config: SchedulerConfig, cache: PagedCache) -> None:
        self.config = config
        self.cache = cache
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.requested: dict[int, Decision] = {}  # for the present step
        self.preemptions = 0
        self.preempted: list[int] = []  # ids that drafter and controller must still forget

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def by_id(self) -> dict[int, SequenceState]:
        """The running sequences."""
        return {seq.seq_id: seq for seq in self.running}

    def add(self, seq: SequenceState) -> None:
        """Queue a sequence after those of its priority. Raises CacheMemoryError, as ``check``."""
        self.check(seq)
        position = len(self.waiting)
        while position and self.waiting[position - 1].params.priority > seq.params.priority:
            position -= 1
        self.waiting.insert(position, seq)

    def check(self, seq: SequenceState) -> None:
        """Raises CacheMemoryError if it could not run even alone."""
        longest = min(len(seq.tokens) + seq.remaining, self.config.max_positions)
        if -(-longest // self.cache.block_size) > self.cache.num_blocks:
            raise CacheMemoryError(
                f"the request may grow to {longest} tokens, but the cache holds "
                f"{self.cache.num_blocks * self.cache.block_size}; "
                "lower max_tokens or raise kv_cache_memory"
            )

    def remove(self, seq_id: int) -> bool:
        """Drop a waiting or running sequence; False if it is unknown."""
        for queue in (self.running, self.waiting):
            for seq in queue:
                if seq.seq_id == seq_id:
                    queue.remove(seq)
                    self.cache.free(seq_id)
                    return True
        return False

    def plan(
        self,
        choices: Callable[[Sequence[SequenceState]], Sequence[Decision | int]],
        max_nodes: Callable[[int], int],
    ) -> Plan:
        """The next step. ``choices``: the draft requested for each sequence; ``max_nodes``: most
        nodes of a draft by length."""
        for seq in list(self.running):
            if self.cache.outgrown(seq.seq_id, len(seq.tokens)):
                self._preempt(seq)  # it is prefilled again with the rotations of a long sequence
        self._admit()
        ids = [seq.seq_id for seq in self.running]
        decisions = (c if isinstance(c, Decision) else Decision(c) for c in choices(self.running))
        self.requested = dict(zip(ids, decisions, strict=True))
        scheduled_parts: list[tuple[SequenceState, int]] = []
        budget, rows = self.config.max_step_tokens, self.config.max_scored_rows
        # Oldest first: if blocks run out the youngest is preempted, so the oldest always finishes.
        for seq in list(self.running):
            scheduled = self._chunk(seq, budget, rows)
            # An older one may have preempted it in this loop.
            if scheduled and seq in self.running and self._reserve(seq, scheduled):
                budget -= scheduled
                rows -= min(scheduled, seq.unscored)
                scheduled_parts.append((seq, scheduled))
        # Drafts get the blocks that are left.
        slices: list[Slice] = []
        for seq, scheduled in scheduled_parts:
            choice = self.requested[seq.seq_id]
            length = self._draft_length(seq, scheduled, choice.length, max_nodes)
            slices.append(Slice(seq.view(), scheduled, length, seq.drafts, choice.drafter))
        # Rows of one adapter are neighbours, for one product.
        return Plan(tuple(sorted(slices, key=lambda item: item.seq.adapter_number)))

    def alone(self, seq: SequenceState) -> Plan:
        """A step of one running sequence without a draft; empty if it had to give way."""
        scheduled = self._chunk(seq, self.config.max_step_tokens, self.config.max_scored_rows)
        fits = self._reserve(seq, scheduled)
        return Plan((Slice(seq.view(), scheduled, 0, seq.drafts),) if fits else ())

    def _chunk(self, seq: SequenceState, budget: int, rows: int) -> int:
        """Pending tokens to schedule, of which at most ``rows`` are scored."""
        scheduled = min(seq.num_pending, self.config.prefill_chunk, budget)
        return min(scheduled, rows) if seq.unscored > rows else scheduled

    def _draft_length(
        self, seq: SequenceState, scheduled: int, requested: int, max_nodes: Callable[[int], int]
    ) -> int:
        """The requested length, limited by request, context and free cache blocks."""
        if scheduled < seq.num_pending:
            return 0
        length = self._draft_limit(seq, requested)
        while length and (nodes := max_nodes(length)):
            try:
                self.cache.reserve(seq.seq_id, seq.cached + scheduled + nodes, nodes)
                return length
            except OutOfBlocksError:
                # States are few, and a shorter draft may still get some.
                length = length // 2 if self.cache.states is not None else 0
        return 0  # also where nobody drafts

    def _draft_limit(self, seq: SequenceState, requested: int) -> int:
        """The last token of the budget and of the context is the target's own, so it is not
        drafted."""
        if seq.params.drafter == "none" or not seq.drafts:
            return 0
        if seq.params.draft_length is not None:
            requested = seq.params.draft_length
        left = self.config.max_positions - len(seq.tokens) - 1
        switch = self.cache.rope_switch
        if switch is not None and len(seq.tokens) <= switch:
            left = min(left, switch - len(seq.tokens))  # nodes beyond have other rotations
        return max(0, min(requested, seq.remaining - 1, left))

    def _admit(self) -> None:
        """Start waiting sequences in order while there is room. Those that wait for a shared prefix
        keep their share of batch and cache, but let later ones pass."""
        reserved: list[int] = []  # blocks that each sequence waiting for a prefix will need
        while len(reserved) < len(self.waiting) and (
            len(self.running) + len(reserved) < self.config.max_batch_size
        ):
            seq = self.waiting[len(reserved)]
            if self.running and not self._fits(seq, sum(reserved)):
                return
            shares = seq.params.prompt_logprobs is None
            coming = self._prefix_to_come(seq) if shares and self.cache.shares else 0
            if coming:
                reserved.append(self._blocks_of(seq) - coming // self.cache.block_size)
                continue
            seq.cached = self.cache.admit(seq.seq_id, seq.tokens, shares, seq.adapter_number)
            del self.waiting[len(reserved)]  # only now: a failure above must not lose the sequence
            if not seq.started:
                seq.started, seq.shared = time.perf_counter(), seq.cached
            self.running.append(seq)

    def _prefix_to_come(self, seq: SequenceState) -> int:
        """Tokens of whole blocks that this sequence shares with a running one, queued before it,
        which is prefilling them; 0 if none. Waiting for them lets n samples of a prompt read it
        once. Scored prompts pass it: waiting for those, too, might never end."""
        size = self.cache.block_size
        for other in self.running:
            earlier = other.seq_id < seq.seq_id
            if earlier and other.num_pending > size and other.adapter is seq.adapter:
                shared = _common_length(other.tokens, seq.tokens, size)
                # At least the last token must be computed.
                shared = min(shared, len(seq.tokens) - 1) // size * size
                if other.cached < shared:
                    return shared
        return 0

    def _blocks_of(self, seq: SequenceState) -> int:
        """Blocks of its tokens, and one to grow."""
        return -(-len(seq.tokens) // self.cache.block_size) + 1

    def _fits(self, seq: SequenceState, reserved: int = 0) -> bool:
        """Whether all of it fits beside what is promised to running sequences: the blocks of
        prompts still being read, one more each to grow, and ``reserved`` ones for sequences before
        it. Blocks in use by others can be shared."""
        pool = self.cache.pool
        promised = reserved + len(self.running)
        promised += sum(
            self.cache.blocks_missing(other.seq_id, len(other.tokens)) for other in self.running
        )
        needed = self._blocks_of(seq)
        if needed + promised <= pool.available:
            return True
        # Digests take time, so they are computed only if they can decide.
        tokens, adapter = seq.tokens, seq.adapter_number
        shared = self.cache.shared_blocks(tokens, adapter) if self.running else ()
        return needed - sum(map(pool.in_use, shared)) + promised <= pool.available

    def _reserve(self, seq: SequenceState, scheduled: int) -> bool:
        """Reserve cache indices for the pending tokens; False if ``seq`` itself had to go."""
        while True:
            try:
                self.cache.reserve(seq.seq_id, seq.cached + scheduled)
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
        """Free a sequence's blocks; its tokens stay and are prefilled again."""
        self.running.remove(seq)
        self.cache.free(seq.seq_id)
        seq.cached = 0
        self.waiting.appendleft(seq)
        self.preemptions += 1
        self.preempted.append(seq.seq_id)


def _common_length(one: Sequence[int], other: Sequence[int], size: int) -> int:
    """Leading tokens that two texts share, in whole blocks of ``size``."""
    starts = range(0, min(len(one), len(other)) - size + 1, size)
    same = takewhile(lambda start: one[start : start + size] == other[start : start + size], starts)
    return size * sum(1 for _ in same)
