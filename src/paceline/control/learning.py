"""What steps teach: acceptance, prices, what exploration has cost, what a drafter has read.

Nothing here decides. ``StepLearner`` notes each step and learns from some at a time: between two
forwards this code is not in the processor's caches any more (48 microseconds a step one by one, 9
together).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from paceline.control.acceptance import GOES_ON, levels_tried
from paceline.control.cost import WARM, CostModel, DraftOption
from paceline.control.exploration import ExplorationBudget
from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState

_TOGETHER = 4  # steps that are learnt from at once
_PLAIN = 4  # of so many plain steps one is learnt from


class BatchDecision(NamedTuple):
    """What was decided for the sequences of a step."""

    drafts: Mapping[int, DraftOption] = {}  # by sequence; of requests without a length of their own
    # They are made to learn; else a token of each sequence would be gained in so many seconds.
    worth: float = 0.0
    measures: bool = False  # nothing is drafted, so that a plain step is measured
    fixed: bool = False  # a request's own length is among them


class _Step(NamedTuple):
    decision: BatchDecision
    tells: bool  # of one without drafts: whether its time is learnt from
    cold: bool  # soon after a drafter's passes
    commits: Sequence[Commit]
    seconds: float
    drafting: float | None


class StepLearner:
    """Corrects ``cost``, its acceptance, and the ``budget`` by steps. ``lookups``: the drafters
    whose acceptance is learnt elsewhere (following.py)."""

    def __init__(
        self, cost: CostModel, budget: ExplorationBudget, lookups: Collection[Hashable]
    ) -> None:
        self._cost, self._budget, self._lookups = cost, budget, lookups
        self._steps: list[_Step] = []  # that are yet to be learnt from
        self._count = 0
        self._since_passes = WARM  # steps since a drafter ran a model, or a prompt was read
        self._read: dict[int, dict[Hashable, int]] = {}  # tokens of a sequence, seen by a drafter

    def observe(
        self,
        decision: BatchDecision,
        commits: Sequence[Commit],
        seconds: float,
        drafting: float | None,
    ) -> None:
        """Note a step, of which ``drafting`` seconds went into drafts (None: not known)."""
        if decision.worth:
            self._budget.spend(self.aftermath(len(commits)))
        self._count += 1
        costs = self._cost.drafters
        cold = decision.fixed or any(not costs[d.name].costless for d in decision.drafts.values())
        cold = cold or any(commit.scheduled > 1 for commit in commits)
        self._since_passes = 0 if cold else self._since_passes + 1
        tells = self._since_passes > 0 and self._count % _PLAIN == 0
        what = decision.measures or tells, self._since_passes < WARM
        self._steps.append(_Step(decision, *what, commits, seconds, drafting))

    def learn(self, at_once: bool = False) -> None:
        """From what was noted; unless ``at_once``, only if that is worth it by now."""
        last = self._steps[-1].decision if self._steps else BatchDecision()
        if at_once or last.worth or last.measures or len(self._steps) >= _TOGETHER:
            while self._steps:
                self._learn(self._steps.pop(0))

    def aftermath(self, batch: int) -> float:
        """Seconds that the plain steps behind a drafter's passes take longer than others in all."""
        return self._cost.coldness(batch) * min(self._since_passes, WARM)

    def tokens_read(self, seq: SequenceState) -> dict[Hashable, int]:
        """By each drafter that must read a text before it drafts. One that follows the prefill has
        seen what a sequence came with."""
        if seq.seq_id not in self._read:
            known = {n: costs.follows for n, costs in self._cost.drafters.items() if costs.reads}
            self._read[seq.seq_id] = {n: len(seq.tokens) * follows for n, follows in known.items()}
        return self._read[seq.seq_id]

    def forget(self, seq_id: int) -> None:
        """A sequence is done, or begins anew."""
        self.learn(at_once=True)
        self._read.pop(seq_id, None)
        self._cost.acceptance.forget(seq_id)

    def _learn(self, step: _Step) -> None:
        batch, cost, commits, made = len(step.commits), self._cost, step.commits, step.decision[0]
        plain = cost.rest(batch)
        self._budget.earn(step.seconds, plain, batch)
        fixed = step.decision.fixed
        if not made:
            if step.tells:
                is_measure = not fixed and all(commit.scheduled == 1 for commit in commits)
                cost.learn_plain(batch, step.seconds if is_measure else None, step.cold)
            return
        tried = [commit for commit in commits if commit.drafted and commit.seq_id in made]
        unread = sum(self._learn_draft(commit, made[commit.seq_id], batch) for commit in tried)
        levels: dict[Hashable, list[int]] = {}
        for commit in commits:
            if (draft := made.get(commit.seq_id)) is not None:
                ended = cost.drafters[draft.name].ends_early
                length = min(draft.length, commit.levels) if ended else draft.length
                levels.setdefault(draft.name, []).append(length)
        for name, lengths in levels.items():
            cost.note(name, batch, max(lengths))
        if fixed or not all(commit.scheduled == 1 and commit.tokens for commit in commits):
            return  # a step that prefills is no measure
        passes = {name: cost.passes(name, lengths) for name, lengths in levels.items()}
        nodes = sum(commit.drafted for commit in commits) / batch
        foreseen = cost.drafting(batch, passes)
        if step.decision.worth:
            # One hiccup is not what was learnt: it counts with what was foreseen and half a step.
            most = cost.rest(batch, nodes) + foreseen + 0.5 * plain
            gained = step.decision.worth * min(len(commit.tokens) for commit in commits)
            self._budget.spend(min(step.seconds, most) - gained)
        if unread <= 4 * batch:
            cost.learn_drafts(batch, nodes, step.seconds, step.drafting, passes)
        elif len(passes) == 1 and step.drafting is not None:
            cost.learn_reading(next(iter(passes)), max(step.drafting - foreseen, 0.0), unread)

    def _learn_draft(self, commit: Commit, draft: DraftOption, batch: int) -> int:
        """What a draft showed. Returns the tokens that the drafter had to read for it."""
        name, costs, acceptance = draft.name, self._cost.drafters[draft.name], self._cost.acceptance
        length = min(draft.length, costs.longest)
        known = draft.certain  # nothing is learnt from what was forced
        if costs.ends_early:
            more = acceptance.everyone(name, GOES_ON)
            more.record(min(commit.levels + 1, length) - known, max(commit.levels - known, 0))
        full = commit.levels if costs.ends_early else length
        self._cost.record_fill(name, batch, commit.drafted, full)
        if name not in self._lookups:
            reached = levels_tried(commit, length) - known
            if reached > 0:
                accepted = len(commit.path) - known
                acceptance.record(commit.seq_id, name, reached, accepted, sampled=draft.sampled)
        if not costs.reads or commit.seq_id not in self._read:
            return 0
        read, end = self._read[commit.seq_id], commit.position + commit.scheduled
        unread = max(0, end - 1 - read[name])
        read[name] = end + len(commit.path)
        return unread
