"""Decoding in simulated time: a text that is known, drafters that are right so and so often."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from paceline.control.adaptive import AdaptiveController
from paceline.control.cost import CostModel
from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree, chain_parents, children_of
from paceline.draft.base import Drafter, LookupDrafter, costs_of
from paceline.draft.hybrid import HybridDrafter

STEP = 1.0  # seconds of a target step over one token
TOKEN = 0.01  # of each further one
REST = 0.05  # outside the forwards
LONGEST = 8

Chance = Callable[[int], float | None]  # by position: of a right token; None proposes nothing


def always(chance: float | None) -> Chance:
    return lambda position: chance


class Guesser(LookupDrafter):
    """Proposes chains out of the known text, in which every token is wrong by some chance."""

    def __init__(self, name: str, chance: Chance, pass_seconds: float = 0.0, seed: int = 0) -> None:
        self.name = name
        self.chance = chance
        self.pass_seconds = pass_seconds
        self.text: list[int] = []
        self.drafted = 0  # proposals asked for
        self._seed = seed
        super().__init__()

    def max_nodes(self, length: int) -> int:
        return length

    def passes(self, length: int) -> int:
        return length if self.pass_seconds else 0

    @property
    def drafts_before_choice(self) -> bool:  # type: ignore[override]
        """One that takes no pass looks something up."""
        return not self.pass_seconds

    def propose(self, plan: Plan) -> list[TokenTree]:
        self.drafted += any(item.decodes and item.draft_length for item in plan.slices)
        return super().propose(plan)

    def propose_one(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
        position, length = len(item.seq.tokens), item.draft_length
        chance = self.chance(position)
        if chance is None:
            return (), ()
        right = self.text[position : position + length]
        # As with a lookup, a shorter draft is the beginning of a longer one.
        dice = random.Random(f"{self._seed} {item.seq.seq_id} {position}")
        tokens = [token if dice.random() < chance else -1 for token in right]
        return tokens, chain_parents(len(tokens))


def costs() -> TargetCosts:
    one = CostCurve((1, 101), (STEP, STEP + 100 * TOKEN))
    full = CostCurve((1, 101), (STEP + 7 * TOKEN, STEP + 807 * TOKEN))
    return TargetCosts((1, 8), (one, full))


def profile(drafter: Drafter, mistaken: float = 1.0) -> DrafterCosts:
    seconds = CostCurve((1,), (mistaken * getattr(drafter, "pass_seconds", 0.0),))
    return costs_of(drafter, LONGEST, seconds)


def controller_of(drafter: Drafter, mistaken: float = 1.0) -> AdaptiveController:
    """Of a drafter, or of a hybrid's members, which are known by their places."""
    members = drafter.members if isinstance(drafter, HybridDrafter) else (drafter,)
    profiles = {n: profile(member, mistaken) for n, member in enumerate(members)}
    if isinstance(drafter, HybridDrafter):
        drafter.names = tuple(profiles)
    looked = {n: m for n, m in enumerate(members) if getattr(m, "drafts_before_choice", False)}
    return AdaptiveController(CostModel(costs(), profiles), {"it": tuple(profiles)}, looked)


class Machine:
    """Decodes one sequence after another with a drafter; ``seconds`` is the simulated time."""

    def __init__(self, drafter: Drafter, mistaken: float = 1.0, parts: bool = True) -> None:
        """``mistaken``: what start-up took a pass for, relative to the truth. ``parts``: whether
        the controller is told what drafting took."""
        self.parts = parts
        self.drafter = drafter
        self.guessers = drafter.members if isinstance(drafter, HybridDrafter) else (drafter,)
        self.controller = controller_of(drafter, mistaken)
        self.seconds = 0.0
        self.tokens = 0
        self.steps = 0
        self.hiccups: dict[int, float] = {}  # by step: how many times longer it seems to take
        self.looking = 0.0  # seconds of a step's lookups
        # By how much a forward takes longer behind passes, which drive the target's weights out of
        # the caches; plain steps bring them back bit by bit.
        self.colder, self._cold = 0.0, 0.0
        self.warming = 0.88  # so much of it is left after a plain step
        self.commits: list[int] = []  # tokens of each commit
        self._next = 1_000_000

    def decode(self, count: int, seq_id: int = 0) -> float:
        """Tokens a second over ``count`` tokens."""
        text = list(range(1, count + 40))
        for guesser in self.guessers:
            guesser.text = text  # type: ignore[attr-defined]
        seq = SequenceState(seq_id, text[:1], 1, SamplingParams(max_tokens=count + 30))
        before = self.seconds
        while len(seq.tokens) <= count:
            self._step(seq, text)
        self.drafter.forget(seq_id)
        self.controller.forget(seq_id)
        self.tokens += len(seq.tokens) - 1
        return (len(seq.tokens) - 1) / (self.seconds - before)

    def prefill(self) -> None:
        """A step that reads a prompt."""
        self._cold = 1.0
        self.controller.observe([Commit(self._next, (1,), (), 0, scheduled=40)], 1.5 * STEP)

    def together(self, count: int, sequences: int) -> float:
        """So many requests at once, of ``count`` tokens each: plain decoding's time by theirs."""
        text = list(range(1, count + 40))
        for guesser in self.guessers:
            guesser.text = text  # type: ignore[attr-defined]
        params = SamplingParams(max_tokens=count)
        open_ = [SequenceState(self._next + n, text[:1], 1, params) for n in range(sequences)]
        self._next += sequences
        before = self.seconds
        while open_:
            self._advance(open_, text)
            for seq in [seq for seq in open_ if seq.remaining <= 0]:
                self.drafter.forget(seq.seq_id)
                self.controller.forget(seq.seq_id)
                open_.remove(seq)
        plain = count * (STEP + TOKEN * (sequences - 1) + REST)
        return plain / (self.seconds - before)

    def _step(self, seq: SequenceState, text: Sequence[int]) -> None:
        self._advance([seq], text)

    def _advance(self, seqs: Sequence[SequenceState], text: Sequence[int]) -> None:
        for seq in seqs:
            seq.cached = len(seq.tokens) - 1
        choices = self.controller.lengths(seqs)
        asked = [own.drafted for own in self.guessers]  # type: ignore[attr-defined]
        slices = tuple(
            Slice(seq.view(), 1, max(0, min(c.length, seq.remaining - 1)), True, c.drafter)
            for c, seq in zip(choices, seqs, strict=True)
        )
        trees = self.drafter.propose(Plan(slices))
        commits = [self._commit(seq, tree, text) for seq, tree in zip(seqs, trees, strict=True)]
        self.drafter.observe(commits, ModelOutput(None))  # type: ignore[arg-type]
        levels = max((max(tree.depths, default=0) for tree in trees), default=0)
        passes = sum(
            levels * own.pass_seconds  # type: ignore[attr-defined]
            for own, before in zip(self.guessers, asked, strict=True)
            if own.drafted > before  # type: ignore[attr-defined]
        )
        rows = len(seqs) - 1 + sum(map(len, trees))
        self._cold = 1.0 if passes else self.warming * self._cold
        seconds = (STEP + TOKEN * rows) * (1 + self.colder * self._cold) + passes + REST
        seconds += self.looking * len(seqs)
        slower = self.hiccups.get(self.steps, 1.0)
        self.controller.observe(commits, seconds * slower, passes if self.parts else None)
        self.seconds += seconds
        self.steps += 1
        self.commits += [len(commit.tokens) for commit in commits]

    def _commit(self, seq: SequenceState, tree: TokenTree, text: Sequence[int]) -> Commit:
        path: list[int] = []
        guesses, children = tree.tokens.tolist(), children_of(tree.parents)
        while True:
            following = text[len(seq.tokens) + len(path)]
            below = [c for c in children[path[-1] + 1 if path else 0] if guesses[c] == following]
            if not below:
                break
            path.append(below[0])
        new = text[len(seq.tokens) : len(seq.tokens) + len(path) + 1]
        seq.tokens.extend(new)
        levels = max(tree.depths, default=0)
        reached = min(len(path) + 1, levels)
        return Commit(
            seq.seq_id,
            tuple(new),
            tuple(path),
            len(tree),
            reached=reached,
            levels=levels,
            scheduled=1,
            last=seq.tokens[-len(new) - 1],
        )
