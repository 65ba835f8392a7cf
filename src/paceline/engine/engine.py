"""The one decoding loop, for every method, batch size and temperature."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from paceline.core.batch import Batch, Check, Commit, Plan, Slice, Verdict
from paceline.core.sequence import Sequence as Request
from paceline.core.tree import TokenTree, children_of
from paceline.draft.base import Drafter
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
        self.steps = 0

    def add(self, seq: Request) -> None:
        """Queue a sequence; it joins at the next step with room. Raises CacheMemoryError."""
        self.scheduler.add(seq)

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
        plan = self.scheduler.plan(self.controller.lengths)
        trees = self.drafter.propose(plan)
        batch, checks = self._pack(plan, trees)
        out = self.target(batch, self.cache, self.drafter.features)
        verdicts = self.verifier(out.logits, checks)  # the step's one device synchronisation
        commits = self._commit(plan, trees, verdicts)
        self.drafter.observe(commits, out.features)
        self._account(plan, commits, time.perf_counter() - start)
        self._retire(commits)
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
        self, plan: Plan, trees: Sequence[TokenTree], verdicts: Sequence[Verdict]
    ) -> list[Commit]:
        remaining = iter(verdicts)
        commits: list[Commit] = []
        moves: list[tuple[int, int, int]] = []
        for item, tree in zip(plan.slices, trees, strict=True):
            if item.decodes:
                commit = self._accept(item, tree, next(remaining))
            else:
                commit = Commit(item.seq.seq_id, (), fed=item.feed)
            commits.append(commit)
            base = item.seq.cached + item.feed
            moves.extend(path_moves(item.seq.seq_id, base, commit.path))
        self.cache.move(moves)
        for item, commit in zip(plan.slices, commits, strict=True):
            seq = item.seq
            seq.cached += commit.fed + len(commit.path)
            self.cache.commit(seq.seq_id, seq.tokens, seq.cached)
        return commits

    def _accept(self, item: Slice, tree: TokenTree, verdict: Verdict) -> Commit:
        """Append the verdict's tokens up to the first stop condition."""
        seq = item.seq
        reason = None
        taken = 0
        for token in verdict.tokens:
            seq.tokens.append(token)
            taken += 1
            reason = self._finish_reason(seq, token)
            if reason is not None:
                break
        path = verdict.path[:taken]
        leaf = path[-1] if path else -1
        tried = bool(len(tree)) and bool(children_of(tree.parents)[leaf + 1])
        commit = Commit(
            seq.seq_id,
            verdict.tokens[:taken],
            path,
            drafted=len(tree),
            reached=len(path) + (tried and taken > len(path)),
            fed=item.feed,
            finish_reason=reason,
            logprobs=None if verdict.logprobs is None else verdict.logprobs[:taken],
        )
        seq.counts.record(commit.drafted, len(path), commit.reached)
        return commit

    def _finish_reason(self, seq: Request, token: int) -> str | None:
        stopped = seq.text is not None and seq.text.push(token)
        if token in seq.stop_ids and seq.generated >= seq.params.min_tokens:
            return "stop"
        if stopped:
            return "stop"
        if seq.room <= 0 or len(seq.tokens) >= self.scheduler.config.max_positions:
            return "length"
        return None

    # -- after the step ----------------------------------------------------------------------

    def _account(self, plan: Plan, commits: Sequence[Commit], seconds: float) -> None:
        self.steps += 1
        self.controller.observe(commits, seconds)
        for seq in plan.seqs:
            seq.seconds += seconds

    def _retire(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            if commit.finish_reason is not None:
                self.abort(commit.seq_id)
