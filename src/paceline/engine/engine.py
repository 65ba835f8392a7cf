"""The one decoding loop, for every method, batch size and temperature.

A step commits for all its sequences or is undone. Only cache blocks and the drafter change before
the commits, and both can be undone; a sequence whose grammar or stop strings fail ends alone.
Failed steps: recovery.py; timing: clock.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from paceline.control.controller import NO_DRAFT, PLAIN, Controller, Decision
from paceline.core.batch import Batch, Commit, ModelOutput, Plan, Span, Verdict
from paceline.core.draws import draws_unseeded
from paceline.core.params import TokenLogprob
from paceline.core.sampling import needs_logits
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree, children_of
from paceline.draft.base import Drafter, check_trees, runs_torch
from paceline.draft.collapse import CollapseWatch
from paceline.draft.text_index import Predictions
from paceline.engine.clock import PhaseClock
from paceline.engine.recovery import Failure, failed, log, recovered
from paceline.engine.scheduler import Scheduler
from paceline.errors import ConfigError
from paceline.model.paged.cache import PagedCache, path_moves
from paceline.model.target import CausalModel
from paceline.verify.logprobs import prompt_logprobs
from paceline.verify.verifier import Verifier

_NOTHING = nullcontext()


@dataclass(eq=False, repr=False)
class Engine:
    """Advances all its sequences step by step. An empty tree is plain decoding: prefill chunks,
    plain and speculative sequences share one ragged batch."""

    target: CausalModel
    cache: PagedCache
    drafter: Drafter
    verifier: Verifier
    scheduler: Scheduler
    controller: Controller
    draw_seed: Callable[[], int] | None  # for sampled requests without a seed
    predictions: Predictions  # those that the controller uses
    watch: CollapseWatch
    strict: bool = False  # raise what a step raises, and check what drafters propose

    def __post_init__(self) -> None:
        self.clock = PhaseClock(self.target.device)
        self.steps = 0
        self.ready: list[Commit] = []  # made, but not yet returned by a step
        self._empty = TokenTree.empty(self.target.device)
        self._inference = torch.inference_mode()
        self._drafts_by_torch = runs_torch(self.drafter)

    def add(self, seq: SequenceState) -> None:
        """Queue a sequence; it joins at the next step with room. Raises CacheMemoryError."""
        if self.draw_seed is not None and draws_unseeded(seq.params):
            seq.params = replace(seq.params, seed=self.draw_seed())
        self.scheduler.add(seq)
        seq.queued = time.perf_counter()

    def abort(self, seq_id: int) -> None:
        """Drop a sequence, and its commits of an interrupted step, and free its blocks; unknown ids
        are ignored."""
        if self.scheduler.remove(seq_id):
            self.forget(seq_id)
        self.ready = [commit for commit in self.ready if commit.seq_id != seq_id]

    def forget(self, seq_id: int) -> None:
        """Drop the drafting state of a sequence: it has ended, or starts over."""
        for keeper in (self.drafter, self.controller, self.predictions, self.watch):
            try:
                keeper.forget(seq_id)
            except Exception as error:
                log.error("forgetting request %d failed: %s", seq_id, Failure.of(error))

    @property
    def has_work(self) -> bool:
        return bool(self.ready) or self.scheduler.has_work

    def step(self) -> list[Commit]:
        """Advance every scheduled sequence; each decoding one gains at least one token. Returns the
        commits.

        A sequence that fails ends with a commit that says so. Raises EngineLostError if no forward
        succeeds any more; all sequences are then dropped. A KeyboardInterrupt or the like is raised
        after the step is undone; the next step returns what had been committed."""
        commits = self.ready = self.ready or recovered(self, self._step)
        for commit in commits:
            if commit.finish_reason is not None:  # again if an interrupt ended the last call
                self.scheduler.remove(commit.seq_id)
                self.forget(commit.seq_id)
        self.ready = []
        return commits

    def _step(self, planned: Callable[[], Plan]) -> None:
        """One step of what is ``planned``; its commits are then ``ready``."""
        lap = self.clock.lap
        plan = self.plan(planned)
        lap("other")
        if not plan.slices:
            return
        trees = self.draft(plan)
        lap("draft")
        batch = self.batch(plan, trees)
        lap("other")
        out = self.forward(batch)
        lap("target")
        verdicts = self.verify(batch, out)  # the step's one device synchronisation
        scores = self.score(batch, out)
        lap("verify")
        commits = self.commit(batch, verdicts, scores)
        lap("other")
        self.observe(plan, commits, out)
        lap("draft")

    def max_nodes(self, length: int) -> int:
        """Most nodes of a draft of ``length`` levels; predictions are chains."""
        most = self.drafter.max_nodes(length)
        return max(most, length) if most else 0

    def choices(self, seqs: Sequence[SequenceState]) -> Sequence[Decision | int]:
        """The controller's drafts. Raises ConfigError unless there is one for each sequence."""
        if not any(seq.drafts for seq in seqs):
            return [PLAIN] * len(seqs)
        choices = self.controller.lengths(seqs)
        if len(choices) != len(seqs):
            raise ConfigError(
                f"{type(self.controller).__name__}: lengths must return one draft for each "
                f"sequence, in their order; there are {len(seqs)} sequences, and {len(choices)} "
                "drafts"
            )
        return choices

    def account(self, commits: Sequence[Commit], start: float) -> None:
        """Record a step that began at ``start``, for statistics and the controller."""
        now = time.perf_counter()
        self.steps += 1
        known = self.scheduler.by_id()
        seqs = [known[commit.seq_id] for commit in commits]
        for seq, commit in zip(seqs, commits, strict=True):
            seq.seconds += now - start
            if commit.tokens:
                seq.arrivals.append((now, len(commit.tokens)))
                choice = self.scheduler.requested.get(seq.seq_id, PLAIN)
                seq.counts.record(
                    *(commit.drafted, commit.levels, len(commit.path), commit.reached),
                    commit.drafter,
                    choice.reason or NO_DRAFT,
                )
                self.watch.record(choice.drafter, seq, commit)
        if any(seq.drafts for seq in seqs):
            self.controller.observe(commits, now - start, self.clock.current("draft"))
        self.clock.lap("other")

    # -- the phases of a step, in their order --------------------------------------------------

    def plan(self, planned: Callable[[], Plan]) -> Plan:
        """Who runs, and how long drafts may be. Drafting state of preempted sequences is
        dropped."""
        try:
            return planned()
        finally:
            while self.scheduler.preempted:
                self.forget(self.scheduler.preempted.pop())

    def draft(self, plan: Plan) -> list[TokenTree]:
        """A tree for every slice, empty for sequences for which drafting failed."""
        part = plan
        if not all(item.drafts for item in plan.slices):
            part = Plan(tuple(item for item in plan.slices if item.drafts))
            if not part.slices:
                return [self._empty] * len(plan.slices)
        with self._inferring(self._drafts_by_torch):
            trees = self.predictions.propose_with(self.drafter, part)
        if self.strict:
            check_trees(self.drafter, part, trees, self.target.vocab_size)
        if part is plan:
            return trees
        drafted = iter(trees)
        return [next(drafted) if item.drafts else self._empty for item in plan.slices]

    def batch(self, plan: Plan, trees: Sequence[TokenTree]) -> Batch:
        """Pending tokens and tree nodes as rows of one forward, with logits only if they are
        read."""
        drafted = zip(plan.slices, trees, strict=True)
        spans = [Span.of_request(item.seq, tree, item.scheduled) for item, tree in drafted]
        reads_logits = (
            getattr(self.drafter, "reads_logits", True)
            or any(span.scored for span in spans)
            or needs_logits(span.seq for span in spans if span.wants_logits)
        )
        return self.cache.batch_of(spans, self.drafter.features, not reads_logits)

    def forward(self, batch: Batch) -> ModelOutput:
        """The target's only full forward."""
        with self._inferring(self.target.backend.runs_torch):
            return self.target(batch, self.cache)

    def verify(self, batch: Batch, out: ModelOutput) -> list[Verdict]:
        """Verdicts on the decoding sequences, in order."""
        decoding = [span for span in batch.spans if span.wants_logits]
        return self.verifier(out.logits, decoding, out.greedy)

    def score(self, batch: Batch, out: ModelOutput) -> dict[int, tuple[TokenLogprob, ...]]:
        """Log-probabilities of prompt tokens that this step has read, where asked for."""
        return {
            span.seq_id: prompt_logprobs(
                out.logits[span.logit_row - span.scored : span.logit_row],
                span.seq.tokens[span.context + 1 : span.context + 1 + span.scored],
                span.seq.params.prompt_logprobs or 0,
            )
            for span in batch.spans
            if span.scored
        }

    def commit(
        self,
        batch: Batch,
        verdicts: Sequence[Verdict],
        scores: Mapping[int, tuple[TokenLogprob, ...]],
    ) -> list[Commit]:
        """Move accepted cache rows, then make a commit for each sequence (``ready``)."""
        moves: list[tuple[int, int, int]] = []
        decoding = (span for span in batch.spans if span.wants_logits)
        judged = dict(zip([span.seq_id for span in decoding], verdicts, strict=True))
        for span in batch.spans:
            # The whole accepted path, even if a stop condition cuts it (the rest is freed): after
            # the first commit nothing can fail for all sequences.
            if span.wants_logits:
                path = judged[span.seq_id].path
                moves += path_moves(span.seq_id, span.context + span.pending, path)
        self.cache.move(moves)
        first, seqs = len(self.ready), self.scheduler.by_id()
        for span in batch.spans:
            seq = seqs[span.seq_id]
            try:
                made = self._made(seq, span, judged.get(span.seq_id))
                if seq.seq_id in scores:
                    made = replace(made, prompt_logprobs=scores[seq.seq_id])
                self._settle(seq, made)
            except BaseException as error:
                made = failed(seq, Failure.of(error))
                if not isinstance(error, Exception):
                    self.ready.append(made)  # its grammar may have advanced
                    raise
            self.ready.append(made)
        return self.ready[first:]

    def _made(self, seq: SequenceState, span: Span, verdict: Verdict | None) -> Commit:
        """What the step adds to a sequence, up to the first stop condition."""
        position, last = span.context, seq.tokens[span.context + span.pending - 1]
        if verdict is None:
            return Commit(
                *(seq.seq_id, ()),
                scheduled=span.pending,
                last=last,
                position=position,
                row=span.start,
            )
        if verdict.error is not None:
            return failed(seq, verdict.error)
        room = min(seq.remaining, self.scheduler.config.max_positions - len(seq.tokens))
        taken, reason = seq.ending(verdict.tokens, room)
        path, tree = verdict.path[:taken], span.tree
        below = children_of(tree.parents)[path[-1] + 1 if path else 0]
        return Commit(
            seq.seq_id,
            verdict.tokens[:taken],
            path,
            drafted=len(tree),
            levels=max(tree.depths, default=0),
            reached=len(path) + (taken > len(path) and bool(below)),
            scheduled=span.pending,
            last=last,
            position=position,
            row=span.start,
            logit_row=span.logit_row,
            choices=verdict.choices,
            finish_reason=reason,
            logprobs=None if verdict.logprobs is None else verdict.logprobs[:taken],
            drafter=str(
                self.scheduler.requested.get(seq.seq_id, PLAIN).drafter or self.drafter.name
            ),
        )

    def _settle(self, seq: SequenceState, made: Commit) -> None:
        """Update a sequence's tokens and cache by its commit; neither if that fails."""
        if made.error is not None:
            return
        before, cached = len(seq.tokens), made.position + made.scheduled + len(made.path)
        try:
            seq.tokens += made.tokens
            self.cache.commit(seq.seq_id, seq.tokens, cached)
        except BaseException:
            del seq.tokens[before:]
            raise
        seq.cached = cached

    def observe(self, plan: Plan, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Show the drafter the commits."""
        pairs = zip(plan.slices, commits, strict=True)
        seen = [commit for item, commit in pairs if item.drafts and commit.error is None]
        if seen:
            with self._inferring(self._drafts_by_torch):
                self.drafter.observe(seen, out)

    def _inferring(self, computes: bool) -> AbstractContextManager[object]:
        """Torch's inference mode if torch ``computes``; entering it takes 10 to 35 us, which steps
        of the native kernels with lookups or without drafts do not need."""
        return self._inference if computes else _NOTHING
