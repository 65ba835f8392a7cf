"""The one decoding loop, for every method, batch size and temperature."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.core.batch import Batch, Check, Commit, Plan, Verdict
from paceline.core.sequence import Sequence as Request
from paceline.core.tree import TokenTree, children_of
from paceline.draft.base import Drafter
from paceline.engine.clock import PhaseClock
from paceline.engine.controller import Controller
from paceline.engine.scheduler import Scheduler
from paceline.model.cache import Feed, PagedCache, path_moves
from paceline.model.target import CausalModel
from paceline.verify.rule import Verifier


class Engine:
    """Advances all its sequences step by step.

    An empty tree is plain decoding, so there is no other path: prefill chunks, plain and
    speculative sequences ride in the same packed batch.
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

    def add(self, seq: Request) -> None:
        """Queue a sequence; it joins at the next step with room. Raises CacheMemoryError."""
        self.scheduler.add(seq)
        seq.queued = time.perf_counter()

    def abort(self, seq_id: int) -> None:
        """Drop a sequence and free what it holds; unknown ids are ignored."""
        if self.scheduler.remove(seq_id):
            self.drafter.forget(seq_id)
            self.controller.forget(seq_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[Commit]:
        """Advance every scheduled sequence; each decoding one gains at least one token."""
        start = time.perf_counter()
        lap = self.clock.lap
        self.clock.start()
        plan = self.scheduler.plan(self.controller.lengths)
        if not plan.slices:
            return []
        lap("other")
        trees = self.drafter.propose(plan)
        lap("draft")
        batch, checks = self._pack(plan, trees)
        lap("other")
        out = self.target(batch, self.cache, self.drafter.features)
        lap("target")
        verdicts = self.verifier(out.logits, checks)  # the step's one device synchronisation
        lap("verify")
        commits = self._commit(plan, batch, checks, verdicts)
        lap("other")
        self.drafter.observe(commits, out)
        lap("draft")
        self._account(plan, commits, start)
        self._retire(commits)
        lap("other")
        return commits

    # -- pack: pending tokens and tree nodes -> ids, positions, slots ------------------------

    def _pack(self, plan: Plan, trees: Sequence[TokenTree]) -> tuple[Batch, list[Check]]:
        feeds: list[Feed] = []
        checks: list[Check] = []
        row = 0
        for item, tree in zip(plan.slices, trees, strict=True):
            seq = item.seq
            feeds.append(
                Feed(
                    seq.seq_id,
                    seq.cached,
                    seq.tokens[seq.cached : seq.cached + item.feed],
                    tree.parents,
                    tree.tokens if len(tree) else None,
                    wants_logits=item.decodes,
                )
            )
            if item.decodes:
                checks.append(Check(seq, row, tree))
                row += checks[-1].rows
        return self.cache.pack(feeds), checks

    # -- commit: verdicts -> tokens, cache rows ----------------------------------------------

    def _commit(
        self, plan: Plan, batch: Batch, checks: Sequence[Check], verdicts: Sequence[Verdict]
    ) -> list[Commit]:
        remaining = iter(zip(checks, verdicts, strict=True))
        commits: list[Commit] = []
        moves: list[tuple[int, int, int]] = []
        for item, span in zip(plan.slices, batch.spans, strict=True):
            commit = Commit(
                item.seq.seq_id, (), fed=item.feed, position=item.seq.cached, row=span.start
            )
            if item.decodes:
                commit = self._accept(item.seq, commit, *next(remaining))
            commits.append(commit)
            base = item.seq.cached + item.feed
            moves.extend(path_moves(item.seq.seq_id, base, commit.path))
        self.cache.move(moves)
        for item, commit in zip(plan.slices, commits, strict=True):
            seq = item.seq
            seq.cached += commit.fed + len(commit.path)
            self.cache.commit(seq.seq_id, seq.tokens, seq.cached)
        return commits

    def _accept(self, seq: Request, commit: Commit, check: Check, verdict: Verdict) -> Commit:
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

    def _finish_reason(self, seq: Request, token: int) -> str | None:
        stopped = seq.text is not None and seq.text.push(token)
        if token in seq.stop_ids and seq.generated >= seq.params.min_tokens:
            return "stop"
        if stopped or (seq.constraint is not None and seq.constraint.finished):
            return "stop"
        if seq.room <= 0 or len(seq.tokens) >= self.scheduler.config.max_positions:
            return "length"
        return None

    # -- after the step ----------------------------------------------------------------------

    def _account(self, plan: Plan, commits: Sequence[Commit], start: float) -> None:
        now = time.perf_counter()
        self.steps += 1
        self.controller.observe(commits, now - start, self.clock.current("draft"))
        for seq, commit in zip(plan.seqs, commits, strict=True):
            seq.seconds += now - start
            if commit.tokens:
                seq.arrivals.append((now, len(commit.tokens)))

    def _retire(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            if commit.finish_reason is not None:
                self.abort(commit.seq_id)
