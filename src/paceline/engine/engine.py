"""The one decoding loop, for every drafter, batch size and temperature.

A step either commits tokens for all its sequences or is undone. Before the first commit a step
changes only cache blocks and the drafter's state, and both can be undone. If the grammar or the
stop strings of one sequence raise an error, only that sequence ends. recovery.py handles failed
steps, clock.py measures the phases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from paceline.control.controller import NO_DRAFT, PLAIN, Controller, Decision, log_decisions
from paceline.core.batch import Batch, Commit, ModelOutput, Plan, Span, Verdict
from paceline.core.draws import draws_unseeded
from paceline.core.params import TokenLogprob
from paceline.core.sampling import needs_logits
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree, children_of
from paceline.draft.base import Drafter, DrafterTraits, check_trees, runs_torch
from paceline.draft.hybrid import member_that_drafted
from paceline.draft.text_index import Predictions
from paceline.engine.clock import PhaseClock
from paceline.engine.recovery import Failure, error_commit, log, step_with_recovery
from paceline.engine.scheduler import Scheduler
from paceline.errors import ConfigError
from paceline.model.paged.cache import PagedCache, path_moves
from paceline.model.target import CausalModel
from paceline.verify.logprobs import prompt_logprobs
from paceline.verify.verifier import Verifier

_NO_CONTEXT = nullcontext()


@dataclass(eq=False, repr=False)
class Engine:
    """Advances all its sequences step by step. Plain decoding is a draft with an empty tree, so
    prefill chunks, plain and speculative sequences share one ragged batch."""

    target: CausalModel
    cache: PagedCache
    drafter: Drafter
    verifier: Verifier
    scheduler: Scheduler
    controller: Controller
    draw_seed: Callable[[], int] | None  # makes seeds for sampled requests that have none
    predictions: Predictions  # drafts from the requests' own ``prediction``
    strict: bool = False  # errors in a step are raised, and every proposed tree is checked
    logs_decisions: bool = False  # the controller's decisions are logged

    def __post_init__(self) -> None:
        self.clock = PhaseClock(self.target.device)
        self.steps = 0
        self.ready: list[Commit] = []  # commits made but not yet returned by ``step``
        # Called with the plan and the trees of every draft.
        self.on_drafts: Callable[[Plan, Sequence[TokenTree]], None] | None = None
        self._empty = TokenTree.empty(self.target.device)
        self._inference = torch.inference_mode()
        self._drafter_runs_torch = runs_torch(self.drafter)
        self._drafter_reads_logits = DrafterTraits.of(self.drafter).reads_logits

    def add(self, seq: SequenceState) -> None:
        """Queue a sequence; it starts in the next step that has room. Raises CacheMemoryError if
        the cache could not hold it even alone."""
        if self.draw_seed is not None and draws_unseeded(seq.params):
            seq.params = replace(seq.params, seed=self.draw_seed())
        self.scheduler.add(seq)
        seq.queued = time.perf_counter()

    def abort(self, seq_id: int) -> None:
        """Drop a sequence, its blocks and its unreturned commits. Unknown ids are ignored."""
        if self.scheduler.remove(seq_id):
            self.forget(seq_id)
        self.ready = [commit for commit in self.ready if commit.seq_id != seq_id]

    def forget(self, seq_id: int) -> None:
        """Drop the drafting state of a sequence that has ended or will be prefilled again. An error
        is logged, and raised if the engine is strict."""
        for part in (self.drafter, self.controller, self.predictions):
            try:
                part.forget(seq_id)
            except Exception as error:
                if self.strict:
                    raise
                log.error("forgetting request %d failed: %s", seq_id, Failure.of(error))

    @property
    def has_work(self) -> bool:
        return bool(self.ready) or self.scheduler.has_work

    def step(self) -> list[Commit]:
        """Advance every scheduled sequence and return the commits. Each decoding sequence gains at
        least one token.

        A sequence that fails ends with a commit whose ``error`` says why. Raises EngineLostError if
        no forward succeeds any more; all sequences are then dropped. KeyboardInterrupt and similar
        exceptions are raised after the step is undone; commits made before the interrupt are
        returned by the next call."""
        commits = self.ready = self.ready or step_with_recovery(self, self._step)
        for commit in commits:
            # Repeated harmlessly if an interrupt ended the previous call here.
            if commit.finish_reason is not None:
                self.scheduler.remove(commit.seq_id)
                self.forget(commit.seq_id)
        self.ready = []
        return commits

    def _step(self, make_plan: Callable[[], Plan]) -> None:
        """Run one step; its commits are appended to ``ready``."""
        lap = self.clock.lap
        plan = self.plan(make_plan)
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
        prompt_scores = self.score_prompts(batch, out)
        lap("verify")
        commits = self.commit(batch, verdicts, prompt_scores)
        lap("other")
        self.observe(plan, commits, out)
        lap("draft")

    def max_nodes(self, length: int) -> int:
        """Most nodes of a draft of ``length`` levels. Predictions are chains of that length."""
        most = self.drafter.max_nodes(length)
        return max(most, length) if most else 0

    def select_drafts(self, seqs: Sequence[SequenceState]) -> Sequence[Decision]:
        """The controller's decision for each sequence. Raises ConfigError if some are missing."""
        if not any(seq.drafts for seq in seqs):
            return [PLAIN] * len(seqs)
        drafts = self.controller.lengths(seqs)
        if len(drafts) != len(seqs):
            raise ConfigError(
                f"{type(self.controller).__name__}: lengths must return one draft for each "
                f"sequence, in their order; there are {len(seqs)} sequences, and {len(drafts)} "
                "drafts"
            )
        decisions = [d if isinstance(d, Decision) else Decision(d) for d in drafts]
        if self.logs_decisions:
            log_decisions(self.steps + 1, seqs, decisions, self.scheduler.decisions)
        return decisions

    def record_step(self, commits: Sequence[Commit], start: float) -> None:
        """Add a step that began at ``start`` to the statistics and show it to the controller."""
        now = time.perf_counter()
        self.steps += 1
        running = self.scheduler.by_id()
        seqs = [running[commit.seq_id] for commit in commits]
        for seq, commit in zip(seqs, commits, strict=True):
            seq.seconds += now - start
            if commit.tokens:
                seq.arrivals.append((now, len(commit.tokens)))
                decision = self.scheduler.decisions.get(seq.seq_id, PLAIN)
                seq.counts.record(
                    *(commit.drafted, commit.levels, len(commit.path), commit.reached),
                    commit.drafter,
                    decision.reason or NO_DRAFT,
                )
        if any(seq.drafts for seq in seqs):
            self.controller.observe(commits, now - start, self.clock.current("draft"))
        self.clock.lap("other")

    # -- the phases of a step, in their order --------------------------------------------------

    def plan(self, make_plan: Callable[[], Plan]) -> Plan:
        """Choose which sequences run, with how many pending tokens and draft levels each. The
        drafting state of preempted sequences is dropped."""
        try:
            return make_plan()
        finally:
            while self.scheduler.preempted:
                self.forget(self.scheduler.preempted.pop())

    def draft(self, plan: Plan) -> list[TokenTree]:
        """Propose a tree for each slice; an empty one once drafting has failed for a sequence."""
        drafting = Plan(tuple([item for item in plan.slices if item.drafts]))
        if not drafting.slices:
            return [self._empty] * len(plan.slices)
        with self._inference_mode(self._drafter_runs_torch):
            trees = self.predictions.propose_with(self.drafter, drafting)
        if self.strict:
            check_trees(self.drafter, drafting, trees, self.target.vocab_size)
        if self.on_drafts is not None:
            self.on_drafts(drafting, trees)
        proposed = iter(trees)
        return [next(proposed) if item.drafts else self._empty for item in plan.slices]

    def batch(self, plan: Plan, trees: Sequence[TokenTree]) -> Batch:
        """Lay out pending tokens and tree nodes as rows of one forward, with logits if needed."""
        drafts = zip(plan.slices, trees, strict=True)
        spans = [Span.of_request(item.seq, tree, item.scheduled) for item, tree in drafts]
        reads_logits = (
            self._drafter_reads_logits
            or any(span.scored for span in spans)
            or needs_logits(span.seq for span in spans if span.wants_logits)
        )
        return self.cache.batch_of(spans, self.drafter.features, not reads_logits)

    def forward(self, batch: Batch) -> ModelOutput:
        """Run the target over the batch: the only full forward of a step."""
        with self._inference_mode(self.target.backend.runs_torch):
            return self.target(batch, self.cache)

    def verify(self, batch: Batch, out: ModelOutput) -> list[Verdict]:
        """Decide which draft nodes are accepted: one verdict per decoding sequence, in order."""
        decoding = [span for span in batch.spans if span.wants_logits]
        return self.verifier(out.logits, decoding, out.greedy)

    def score_prompts(self, batch: Batch, out: ModelOutput) -> dict[int, tuple[TokenLogprob, ...]]:
        """Log-probabilities of the prompt tokens of this step, by id, if asked for."""
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
        prompt_scores: Mapping[int, tuple[TokenLogprob, ...]],
    ) -> list[Commit]:
        """Build and apply one Commit per sequence; each is appended to ``ready``.

        The keys and values of accepted nodes are moved first, for the whole accepted path even if a
        stop condition will cut it (the rest is freed). So once the first commit is made, nothing
        can fail for all sequences."""
        decoding = [span for span in batch.spans if span.wants_logits]
        verdict_of = dict(zip([span.seq_id for span in decoding], verdicts, strict=True))
        moves: list[tuple[int, int, int]] = []
        for span in decoding:
            path = verdict_of[span.seq_id].path
            moves += path_moves(span.seq_id, span.context + span.pending, path)
        self.cache.move(moves)
        first, seqs = len(self.ready), self.scheduler.by_id()
        for span in batch.spans:
            seq = seqs[span.seq_id]
            try:
                commit = self._build_commit(seq, span, verdict_of.get(span.seq_id))
                if seq.seq_id in prompt_scores:
                    commit = replace(commit, prompt_logprobs=prompt_scores[seq.seq_id])
                self._apply_commit(seq, commit)
            except BaseException as error:
                commit = error_commit(seq, Failure.of(error))
                if not isinstance(error, Exception):
                    # The sequence's grammar may have advanced, so it cannot be decoded further.
                    self.ready.append(commit)
                    raise
            self.ready.append(commit)
        return self.ready[first:]

    def _build_commit(self, seq: SequenceState, span: Span, verdict: Verdict | None) -> Commit:
        """What a step adds to a sequence up to a stop condition; prefill chunks have no verdict."""
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
            return error_commit(seq, verdict.error)
        room = min(seq.remaining, self.scheduler.config.max_positions - len(seq.tokens))
        kept, reason = seq.check_stop(verdict.tokens, room)
        path, tree = verdict.path[:kept], span.tree
        children = children_of(tree.parents)[path[-1] + 1 if path else 0]
        chosen = self.scheduler.decisions.get(seq.seq_id, PLAIN).drafter
        if seq.seq_id in self.predictions.drafted:
            chosen = self.predictions.name
        elif chosen == self.predictions.name:  # it found nothing, and the drafter drafted
            chosen = None
        if chosen is None and len(tree):
            chosen = member_that_drafted(self.drafter, seq.seq_id)
        return Commit(
            seq.seq_id,
            verdict.tokens[:kept],
            path,
            drafted=len(tree),
            levels=max(tree.depths, default=0),
            reached=len(path) + (kept > len(path) and bool(children)),
            scheduled=span.pending,
            last=last,
            position=position,
            row=span.start,
            logit_row=span.logit_row,
            choices=verdict.choices,
            finish_reason=reason,
            logprobs=None if verdict.logprobs is None else verdict.logprobs[:kept],
            drafter=str(chosen or seq.params.drafter or self.drafter.name),
        )

    def _apply_commit(self, seq: SequenceState, commit: Commit) -> None:
        """Append a commit's tokens and keep their cache rows; no tokens are added if that fails."""
        if commit.error is not None:
            return
        before, cached = len(seq.tokens), commit.position + commit.scheduled + len(commit.path)
        try:
            seq.tokens += commit.tokens
            self.cache.commit(seq.seq_id, seq.tokens, cached)
        except BaseException:
            del seq.tokens[before:]
            raise
        seq.cached = cached

    def observe(self, plan: Plan, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Let the drafter learn from the commits of the sequences it drafts for."""
        pairs = zip(plan.slices, commits, strict=True)
        observed = [commit for item, commit in pairs if item.drafts and commit.error is None]
        if observed:
            with self._inference_mode(self._drafter_runs_torch):
                self.drafter.observe(observed, out)

    def _inference_mode(self, runs_torch: bool) -> AbstractContextManager[object]:
        """Torch's inference mode where torch operators run. Entering it takes 10 to 35 us, which
        steps of the native kernels without a torch drafter save."""
        return self._inference if runs_torch else _NO_CONTEXT
