"""What steps teach: acceptance, prices, what exploration cost, what each drafter has read.

Nothing is decided here. ``StepLearner`` keeps a few steps and learns from them together: between
two forwards this code is not in the processor's caches any more (48 microseconds a step one by one,
9 together).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from paceline.control.acceptance import CONTINUES
from paceline.control.cost import WARM_UP, CostModel, DraftOption
from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState

_STEPS_TOGETHER = 4  # steps that are learnt from at once
_PLAIN_INTERVAL = 4  # one of so many plain steps is learnt from
_FEW_UNREAD = 4  # tokens of each sequence, read before drafting without changing the step's time


class ExplorationBudget:
    """Seconds that exploration may lose. It limits nothing else."""

    SHARE = 0.0075  # of the time of all steps
    MOST = 8.0  # plain steps that the budget may hold

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = False

    def earn(self, seconds: float, plain: float, batch: int = 1) -> None:
        """A step of ``batch`` sequences took ``seconds``; a plain one takes ``plain``. The very
        first step earns the time of a plain one (for several sequences a fraction, as learning wins
        less there)."""
        start = 0.0 if self._started else plain / batch**2
        self._started = True
        self.seconds = min(self.seconds + self.SHARE * seconds + start, self.MOST * plain)

    def spend(self, seconds: float) -> None:
        """Exploration has lost ``seconds`` by plain steps. A second of decoding pays any debt."""
        self.seconds = max(self.seconds - max(seconds, 0.0), -self.SHARE)


class BatchDecision(NamedTuple):
    """What was decided for the sequences of a step."""

    drafts: Mapping[int, DraftOption] = {}  # by sequence; without those of a fixed length
    # If the drafts are exploration: seconds per token of the best alternative. Else 0.
    alternative: float = 0.0
    measures_plain: bool = False  # nothing is drafted, to measure a plain step
    has_fixed: bool = False  # a request with a fixed draft length is among them


class _Step(NamedTuple):
    decision: BatchDecision
    is_measure: bool  # whether its time is learnt
    cold: bool  # whether it ran soon after a drafter's passes
    commits: Sequence[Commit]
    seconds: float
    drafting: float | None


class StepLearner:
    """Corrects ``cost``, its acceptance, and the ``budget`` by steps. ``lookups``: the drafters
    whose acceptance following.py learns."""

    def __init__(
        self, cost: CostModel, budget: ExplorationBudget, lookups: Collection[Hashable]
    ) -> None:
        self._cost, self._budget, self._lookups = cost, budget, lookups
        self._steps: list[_Step] = []  # not learnt from yet
        self._count = 0
        self._since_passes = WARM_UP  # steps since a drafter's passes, or since a prompt was read
        self._read: dict[int, dict[Hashable, int]] = {}  # tokens of a sequence, by drafter

    def observe(
        self,
        decision: BatchDecision,
        commits: Sequence[Commit],
        seconds: float,
        drafting: float | None,
    ) -> None:
        """Keep a step, of which ``drafting`` seconds went into drafts (None: not measured). A step
        that prefills, or has drafts of a fixed length, is no measure of time."""
        if decision.alternative:
            self._budget.spend(self.cold_seconds(len(commits)))
        self._count += 1
        costs = self._cost.drafters
        passes = any(not costs[draft.name].model_free for draft in decision.drafts.values())
        decodes = all(commit.scheduled == 1 and commit.tokens for commit in commits)
        is_measure = decodes and not decision.has_fixed
        self._since_passes = 0 if passes or not is_measure else self._since_passes + 1
        if not decision.drafts and not decision.measures_plain:
            is_measure = is_measure and self._count % _PLAIN_INTERVAL == 0
        cold = self._since_passes < WARM_UP
        self._steps.append(_Step(decision, is_measure, cold, commits, seconds, drafting))

    def learn(self, at_once: bool = False) -> None:
        """Learn from the steps kept, if there are enough of them or they matter now."""
        last = self._steps[-1].decision if self._steps else BatchDecision()
        matters = last.alternative or last.measures_plain
        if at_once or matters or len(self._steps) >= _STEPS_TOGETHER:
            while self._steps:
                self._learn(self._steps.pop(0))

    def cold_seconds(self, batch: int) -> float:
        """Seconds that a drafter's passes now add to the plain steps behind them, as the target's
        weights must be cached again."""
        return self._cost.cold_penalty(batch) * min(self._since_passes, WARM_UP)

    def tokens_read(self, seq: SequenceState) -> dict[Hashable, int]:
        """Tokens of the sequence that each drafter has read, of the drafters that must read a text
        before they draft. Some follow the prefill, and have read the prompt."""
        if seq.seq_id not in self._read:
            drafters, count = self._cost.drafters.items(), len(seq.tokens)
            self._read[seq.seq_id] = {
                n: count * c.sees_prompts for n, c in drafters if c.needs_prefill
            }
        return self._read[seq.seq_id]

    def forget(self, seq_id: int) -> None:
        """A sequence has ended, or starts anew."""
        self.learn(at_once=True)
        self._read.pop(seq_id, None)
        self._cost.acceptance.forget(seq_id)

    def _learn(self, step: _Step) -> None:
        commits, cost, drafts = step.commits, self._cost, step.decision.drafts
        batch = len(commits)
        plain = cost.verification(batch)
        self._budget.earn(step.seconds, plain, batch)
        if not drafts:
            if step.is_measure:
                cost.learn_plain(batch, step.seconds, step.cold)
            return
        unread, lengths = 0, dict[Hashable, list[int]]()
        for commit in commits:
            if (draft := drafts.get(commit.seq_id)) is not None:
                if commit.drafted:
                    unread += self._learn_draft(commit, draft, batch)
                early = cost.drafters[draft.name].stops_early
                length = min(draft.length, commit.levels) if early else draft.length
                lengths.setdefault(draft.name, []).append(length)
                cost.record_length(draft.name, batch, length)
        if not step.is_measure:
            return
        passes = {name: cost.passes_alone(name, levels) for name, levels in lengths.items()}
        nodes = sum(commit.drafted for commit in commits) / batch
        expected = cost.drafting(batch, passes)
        if step.decision.alternative:
            tokens = min(len(commit.tokens) for commit in commits)
            self._budget.spend(step.seconds - step.decision.alternative * tokens)
        if unread <= _FEW_UNREAD * batch:
            cost.learn_drafts(batch, nodes, step.seconds, step.drafting, passes)
        elif len(passes) == 1 and step.drafting is not None:
            cost.learn_reading(next(iter(passes)), max(step.drafting - expected, 0.0), unread)

    def _learn_draft(self, commit: Commit, draft: DraftOption, batch: int) -> int:
        """Learn from one draft. Returns the tokens that the drafter had to read for it."""
        name, costs, acceptance = draft.name, self._cost.drafters[draft.name], self._cost.acceptance
        length, forced = draft.length, draft.forced  # nothing is learnt of forced levels
        if costs.stops_early:
            continues = acceptance.of_all(name, CONTINUES)
            reached = min(commit.levels + 1, length) - forced
            continues.record(reached, max(commit.levels - forced, 0))
        if name not in self._lookups:
            full = commit.levels if costs.stops_early else length
            self._cost.record_fill(name, batch, commit.drafted, full)
            # A path that ends in a leaf above the last level counts as a failure of the next level,
            # as that gained nothing. Only the end of the request cuts the count short.
            ended, accepted = commit.finish_reason is not None, len(commit.path) - forced
            reached = commit.reached - forced if ended else min(accepted + 1, length - forced)
            if reached > 0:
                acceptance.record(commit.seq_id, name, reached, accepted, draft.kind)
        if not costs.needs_prefill or commit.seq_id not in self._read:
            return 0
        read, end = self._read[commit.seq_id], commit.position + commit.scheduled
        unread = max(0, end - 1 - read[name])
        read[name] = end + len(commit.path)
        return unread
