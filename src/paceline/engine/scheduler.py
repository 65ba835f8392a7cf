"""Who runs in a step: continuous batching, chunked prefill, preemption by recomputation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.batch import Plan, Slice
from paceline.core.sequence import SequenceState
from paceline.errors import CacheMemoryError
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import PagedCache


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step. Tokens are pending tokens; draft nodes come on top."""

    max_batch_size: int = 8
    max_step_tokens: int = 2048  # prefill tokens of all sequences in one step
    prefill_chunk: int = 512  # of one sequence in one step
    max_positions: int = 2048  # of target and draft: a draft must not reach beyond


class Scheduler:
    """Waiting and running sequences; decides each step's plan and reserves its cache blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PagedCache,
        max_nodes: Callable[[int], int],
        on_preempt: Callable[[int], None] = lambda seq_id: None,
    ) -> None:
        self.config = config
        self.cache = cache
        self._max_nodes = max_nodes
        self._on_preempt = on_preempt
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def by_id(self) -> dict[int, SequenceState]:
        """The running sequences."""
        return {seq.seq_id: seq for seq in self.running}

    def add(self, seq: SequenceState) -> None:
        """Queue a sequence. Raises CacheMemoryError if it could not run even alone."""
        longest = min(len(seq.tokens) + seq.remaining, self.config.max_positions)
        if -(-longest // self.cache.block_size) > self.cache.num_blocks:
            raise CacheMemoryError(
                f"the request may grow to {longest} tokens, but the cache holds "
                f"{self.cache.num_blocks * self.cache.block_size}; "
                "lower max_tokens or raise kv_cache_memory"
            )
        self.waiting.append(seq)

    def remove(self, seq_id: int) -> bool:
        """Drop a sequence wherever it is (finished or cancelled); False if it is unknown."""
        for queue in (self.running, self.waiting):
            for seq in queue:
                if seq.seq_id == seq_id:
                    queue.remove(seq)
                    self.cache.free(seq_id)
                    return True
        return False

    def plan(self, draft_lengths: Callable[[Sequence[SequenceState]], Sequence[int]]) -> Plan:
        """The next step; ``draft_lengths`` gives the requested length of each decoding sequence."""
        self._admit()
        requested = dict(
            zip(
                (seq.seq_id for seq in self.running),
                draft_lengths(self.running),
                strict=True,
            )
        )
        scheduled_parts: list[tuple[SequenceState, int]] = []
        budget = self.config.max_step_tokens
        # Oldest first: if blocks run out, the youngest gives way, so the oldest always finishes.
        for seq in list(self.running):
            scheduled = min(seq.num_pending, self.config.prefill_chunk, budget)
            # A sequence may have been preempted by an older one in this very loop.
            if scheduled and seq in self.running and self._reserve(seq, scheduled):
                budget -= scheduled
                scheduled_parts.append((seq, scheduled))
        # Drafts take what is left: they are worth a block, but not another sequence's.
        return Plan(
            tuple(
                Slice(
                    seq.view(),
                    scheduled,
                    self._draft_length(seq, scheduled, requested[seq.seq_id]),
                    seq.drafts,
                )
                for seq, scheduled in scheduled_parts
            )
        )

    def alone(self, seq: SequenceState) -> Plan:
        """A step of one running sequence, without a draft; empty if it had to give way."""
        scheduled = min(seq.num_pending, self.config.prefill_chunk, self.config.max_step_tokens)
        fits = self._reserve(seq, scheduled)
        return Plan((Slice(seq.view(), scheduled, 0, seq.drafts),) if fits else ())

    def _draft_length(self, seq: SequenceState, scheduled: int, requested: int) -> int:
        """The requested length, limited by the request, its context and the free cache blocks."""
        if scheduled < seq.num_pending:
            return 0
        length = self._draft_limit(seq, requested)
        try:
            self.cache.reserve(seq.seq_id, seq.cached + scheduled + self._max_nodes(length))
        except OutOfBlocksError:
            return 0
        return length

    def _draft_limit(self, seq: SequenceState, requested: int) -> int:
        """The last token of the budget and of the context is the target's own: never draft it."""
        if seq.params.drafter == "none" or not seq.drafts:
            return 0
        if seq.params.draft_length is not None:
            requested = seq.params.draft_length
        context_left = self.config.max_positions - len(seq.tokens)
        return max(0, min(requested, seq.remaining - 1, context_left - 1))

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_batch_size:
            seq = self.waiting[0]
            if self.running and (not self._fits(seq) or self._prefilled_by_another(seq)):
                return
            seq.cached = self.cache.admit(seq.seq_id, seq.tokens)
            self.waiting.popleft()  # only now: what fails must not lose the sequence
            if not seq.started:
                seq.started, seq.shared = time.perf_counter(), seq.cached
            self.running.append(seq)

    def _prefilled_by_another(self, seq: SequenceState) -> bool:
        """Whether a running sequence is just now prefilling the same beginning.

        Waiting for it lets this one share the blocks: n samples of a prompt read it once.
        """
        size = self.cache.block_size
        return (
            self.cache.shares
            and len(seq.tokens) > size
            and any(
                other.num_pending > size and other.tokens[:size] == seq.tokens[:size]
                for other in self.running
            )
        )

    def _fits(self, seq: SequenceState) -> bool:
        """Whether all of it fits beside what was promised to those that run.

        Promised are the blocks of prompts that are still being read, chunk by chunk, and one more
        block for each sequence, to grow. Blocks that others use already are there to be shared.
        """
        pool, size = self.cache.pool, self.cache.block_size
        promised = len(self.running) + sum(
            self.cache.blocks_missing(other.seq_id, len(other.tokens)) for other in self.running
        )
        needed = -(-len(seq.tokens) // size) + 1
        if needed + promised <= pool.available:
            return True
        # Digests take time: they are asked for only if they can make the difference.
        shared = self.cache.shared_blocks(seq.tokens) if self.running else ()
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
        """Give up a sequence's blocks; its tokens stay and will be prefilled again."""
        self.running.remove(seq)
        self.cache.free(seq.seq_id)
        seq.cached = 0
        self.waiting.appendleft(seq)
        self.preemptions += 1
        self._on_preempt(seq.seq_id)
