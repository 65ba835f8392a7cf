"""The one decoding loop, for every method, batch size and temperature.

A step commits for all its sequences or is undone. What touches a sequence itself comes last, and
there each is on its own: one whose text or grammar fails ends alone. Before that only cache blocks
and the drafter have moved, and both can be put back. What to do about a failed step: recovery.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from paceline.core.batch import Batch, Check, Commit, ModelOutput, Plan, Verdict
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree, children_of
from paceline.draft.base import Drafter
from paceline.engine.clock import PhaseClock
from paceline.engine.recovery import Failure, failed, log, recover, undraft
from paceline.engine.scheduler import Scheduler
from paceline.model.paged.cache import Feed, PagedCache, path_moves
from paceline.model.target import CausalModel
from paceline.pace.controller import Controller
from paceline.verify.verifier import Verifier


class Engine:
    """Advances all its sequences step by step.

    An empty tree is plain decoding, so there is no other path: prefill chunks, plain and
    speculative sequences ride in the same ragged batch.
    """

    def __init__(
        self,
        target: CausalModel,
        cache: PagedCache,
        drafter: Drafter,
        verifier: Verifier,
        scheduler: Scheduler,
        controller: Controller,
    ) -> None:
        self.target = target
        self.cache = cache
        self.drafter = drafter
        self.verifier = verifier
        self.scheduler = scheduler
        self.controller = controller
        self.clock = PhaseClock(target.device)
        self.steps = 0
        self.ready: list[Commit] = []  # made, but not yet returned by a step
        self._empty = TokenTree.empty(target.device)

    def add(self, seq: SequenceState) -> None:
        """Queue a sequence; it joins at the next step with room. Raises CacheMemoryError."""
        self.scheduler.add(seq)
        seq.queued = time.perf_counter()

    def abort(self, seq_id: int) -> None:
        """Drop a sequence and free what it holds; unknown ids are ignored."""
        if self.scheduler.remove(seq_id):
            self._forget(seq_id)

    def _forget(self, seq_id: int) -> None:
        for keeper in (self.drafter, self.controller):
            try:
                keeper.forget(seq_id)
            except Exception as error:
                log.error("forgetting request %d failed: %s", seq_id, Failure.of(error))

    @property
    def has_work(self) -> bool:
        return bool(self.ready) or self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[Commit]:
        """Advance every scheduled sequence; each decoding one gains at least one token.

        A sequence that fails ends with a commit that says so, and the others go on. Raises
        EngineLostError where no forward succeeds any more; all sequences are then dropped.
        """
        if not self.ready:
            failure = self.attempt(self.plan)
            if failure is not None:
                recover(self, failure)
        return self._claimed()

    def plan(self) -> Plan:
        """The next step, with the draft lengths that the controller requests."""
        return self.scheduler.plan(self._lengths)

    def _lengths(self, seqs: Sequence[SequenceState]) -> Sequence[int]:
        if any(seq.drafts for seq in seqs):
            return self.controller.lengths(seqs)
        return [0] * len(seqs)

    def attempt(self, planned: Callable[[], Plan]) -> Failure | None:
        """Take a step; its commits are then ``ready``. If it fails it is undone, and says why.

        What is no Exception, such as a KeyboardInterrupt, is raised once all is undone; what had
        been committed by then is returned by the next step.
        """
        before = len(self.ready)
        try:
            self._advance(planned)
        except BaseException as error:
            self._undo()
            if not isinstance(error, Exception):
                raise
            failure = Failure.of(error)
            if len(self.ready) == before:
                return failure
            undraft(self.scheduler.running, failure)  # who looks at commits is the drafting
        return None

    def _undo(self) -> None:
        """All sequences as before the step; the drafter begins anew with them."""
        for seq in self.scheduler.waiting:
            self.cache.free(seq.seq_id)  # it may have been on its way in
        for seq in self.scheduler.running:
            self.cache.commit(seq.seq_id, seq.tokens, seq.cached)
            self._forget(seq.seq_id)

    def _advance(self, planned: Callable[[], Plan]) -> None:
        start = time.perf_counter()
        lap = self.clock.lap
        self.clock.start()
        plan = planned()
        if not plan.slices:
            return
        lap("other")
        trees = self._propose(plan)
        lap("draft")
        batch, checks = self._batch_of(plan, trees)
        lap("other")
        out = self.target(batch, self.cache, self.drafter.features)
        lap("target")
        verdicts = self.verifier(out.logits, checks)  # the step's one device synchronisation
        lap("verify")
        commits = self._commit(plan, batch, checks, verdicts)
        lap("other")
        try:
            self._observe(plan, commits, out)
            lap("draft")
        finally:
            self._account(plan, commits, start)
        lap("other")

    def _claimed(self) -> list[Commit]:
        """What is ready; sequences that have ended leave."""
        commits, self.ready = self.ready, []
        for commit in commits:
            if commit.finish_reason is not None:
                self.abort(commit.seq_id)
        return commits

    # -- the drafter: sequences that drafting failed for are kept from it -----------------------

    def _propose(self, plan: Plan) -> list[TokenTree]:
        if all(seq.drafts for seq in plan.seqs):
            return self.drafter.propose(plan)
        part = Plan(tuple(item for item in plan.slices if item.seq.drafts))
        trees = iter(self.drafter.propose(part) if part.slices else ())
        return [next(trees) if seq.drafts else self._empty for seq in plan.seqs]

    def _observe(self, plan: Plan, commits: Sequence[Commit], out: ModelOutput) -> None:
        pairs = zip(plan.seqs, commits, strict=True)
        seen = [commit for seq, commit in pairs if seq.drafts and commit.error is None]
        if seen:
            self.drafter.observe(seen, out)

    # -- batch: pending tokens and tree nodes -> ids, positions, slots ------------------------

    def _batch_of(self, plan: Plan, trees: Sequence[TokenTree]) -> tuple[Batch, list[Check]]:
        feeds: list[Feed] = []
        checks: list[Check] = []
        row = 0
        for item, tree in zip(plan.slices, trees, strict=True):
            seq = item.seq
            feeds.append(
                Feed(
                    seq.seq_id,
                    seq.cached,
                    seq.tokens[seq.cached : seq.cached + item.scheduled],
                    tree.parents,
                    tree.tokens if len(tree) else None,
                    wants_logits=item.decodes,
                )
            )
            if item.decodes:
                checks.append(Check(seq, row, tree))
                row += checks[-1].rows
        return self.cache.batch_of(feeds), checks

    # -- commit: verdicts -> tokens, cache rows ----------------------------------------------

    def _commit(
        self, plan: Plan, batch: Batch, checks: Sequence[Check], verdicts: Sequence[Verdict]
    ) -> list[Commit]:
        moves: list[tuple[int, int, int]] = []
        for check, verdict in zip(checks, verdicts, strict=True):
            # All that was accepted, even if a stop condition then cuts it: what lies beyond the
            # end is given back. So nothing that may fail for all comes after the first token.
            moves += path_moves(check.seq.seq_id, len(check.seq.tokens), verdict.path)
        self.cache.move(moves)
        first = len(self.ready)
        remaining = iter(zip(checks, verdicts, strict=True))
        for item, span in zip(plan.slices, batch.spans, strict=True):
            seq = item.seq
            commit = Commit(
                seq.seq_id, (), scheduled=item.scheduled, position=seq.cached, row=span.start
            )
            self.ready.append(self._settled(seq, commit, next(remaining) if item.decodes else None))
        return self.ready[first:]

    def _settled(
        self, seq: SequenceState, commit: Commit, judged: tuple[Check, Verdict] | None
    ) -> Commit:
        """One sequence's commit, all of it; or none, and the sequence ends with an error."""
        before = len(seq.tokens)
        try:
            if judged is not None and judged[1].error is not None:
                return failed(seq, judged[1].error)
            if judged is not None:
                commit = self._accept(seq, commit, *judged)
            cached = seq.cached + commit.scheduled + len(commit.path)
            self.cache.commit(seq.seq_id, seq.tokens, cached)
        except BaseException as error:
            del seq.tokens[before:]
            ended = failed(seq, Failure.of(error))
            if not isinstance(error, Exception):
                self.ready.append(ended)  # its text or grammar may have gone on without it
                raise
            return ended
        seq.cached = cached
        return commit

    def _accept(self, seq: SequenceState, commit: Commit, check: Check, verdict: Verdict) -> Commit:
        """Append the verdict's tokens up to the first stop condition."""
        reason = None
        taken = 0
        for token in verdict.tokens:
            seq.tokens.append(token)
            if seq.constraint is not None:
                seq.constraint.advance(token)
            taken += 1
            reason = self._finish_reason(seq, token)
            if reason is not None:
                break
        tree = check.tree
        path = verdict.path[:taken]
        leaf = path[-1] if path else -1
        tried = bool(len(tree)) and bool(children_of(tree.parents)[leaf + 1])
        commit = replace(
            commit,
            tokens=verdict.tokens[:taken],
            path=path,
            drafted=len(tree),
            levels=max(tree.depths, default=0),
            reached=len(path) + (tried and taken > len(path)),
            logit_row=check.start,
            choices=verdict.choices,
            finish_reason=reason,
            logprobs=None if verdict.logprobs is None else verdict.logprobs[:taken],
        )
        seq.counts.record(commit.drafted, commit.levels, len(path), commit.reached)
        return commit

    def _finish_reason(self, seq: SequenceState, token: int) -> str | None:
        stopped = seq.text is not None and seq.text.push(token)
        if token in seq.stop_ids and seq.generated >= seq.params.min_tokens:
            return "stop"
        if stopped or (seq.constraint is not None and seq.constraint.finished):
            return "stop"
        if seq.remaining <= 0 or len(seq.tokens) >= self.scheduler.config.max_positions:
            return "length"
        return None

    # -- after the step ----------------------------------------------------------------------

    def _account(self, plan: Plan, commits: Sequence[Commit], start: float) -> None:
        now = time.perf_counter()
        self.steps += 1
        for seq, commit in zip(plan.seqs, commits, strict=True):
            seq.seconds += now - start
            if commit.tokens:
                seq.arrivals.append((now, len(commit.tokens)))
        if any(seq.drafts for seq in plan.seqs):
            self.controller.observe(commits, now - start, self.clock.current("draft"))
