"""Decoding in simulated time: a text that is known, drafters that are right so and so often."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.costs import CostCurve, TargetCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree, children_of
from paceline.draft.base import Drafter, NoDrafter
from paceline.pace.controller import AdaptiveLength
from paceline.pace.cost import CostModel, Profile
from paceline.pace.hybrid import HybridDrafter

STEP = 1.0  # seconds of a target step over one token
TOKEN = 0.01  # of each further one
REST = 0.05  # outside the forwards
LONGEST = 8

Chance = Callable[[int], float | None]  # by position: of a right token; None proposes nothing


def always(chance: float | None) -> Chance:
    return lambda position: chance


class Guesser(NoDrafter):
    """Proposes chains out of the known text, in which every token is wrong by some chance."""

    def __init__(self, name: str, chance: Chance, pass_seconds: float = 0.0, seed: int = 0) -> None:
        self.name = name
        self.chance = chance
        self.pass_seconds = pass_seconds
        self.text: list[int] = []
        self.drafted = 0  # proposals asked for
        self._seed = seed

    def max_nodes(self, length: int) -> int:
        return length

    def passes(self, length: int) -> int:
        return length if self.pass_seconds else 0

    def propose(self, plan: Plan) -> list[TokenTree]:
        return [self._guess(item) for item in plan.slices]

    def _guess(self, item: Slice) -> TokenTree:
        position, length = len(item.seq.tokens), item.draft_length
        chance = self.chance(position)
        if chance is None or not length:
            return TokenTree.empty()
        self.drafted += 1
        right = self.text[position : position + length]
        # As with a look-up, a shorter draft is the beginning of a longer one.
        dice = random.Random(f"{self._seed} {item.seq.seq_id} {position}")
        return TokenTree.chain([token if dice.random() < chance else -1 for token in right])


def costs() -> TargetCosts:
    one = CostCurve((1, 101), (STEP, STEP + 100 * TOKEN))
    full = CostCurve((1, 101), (STEP + 7 * TOKEN, STEP + 807 * TOKEN))
    return TargetCosts((1, 8), (one, full))


def profile(drafter: Drafter, mistaken: float = 1.0) -> Profile:
    seconds = CostCurve((1,), (mistaken * getattr(drafter, "pass_seconds", 0.0),))
    return Profile.of(drafter, LONGEST, seconds)


def calibrated(hybrid: HybridDrafter, mistaken: float = 1.0) -> AdaptiveLength:
    """What a hybrid asks, whose members are known by their places."""
    profiles = {n: profile(member, mistaken) for n, member in enumerate(hybrid.members)}
    control = AdaptiveLength(CostModel(costs(), profiles), {"it": tuple(profiles)})
    hybrid.calibrate(control, tuple(profiles))
    return control


class Machine:
    """Decodes one sequence after another with a drafter; ``seconds`` is the simulated time."""

    def __init__(self, drafter: Drafter, mistaken: float = 1.0, parts: bool = True) -> None:
        """``mistaken``: what start-up took a pass for, relative to the truth. ``parts``: whether
        the controller is told what drafting took."""
        self.parts = parts
        self.drafter = drafter
        self.guessers = drafter.members if isinstance(drafter, HybridDrafter) else (drafter,)
        if isinstance(drafter, HybridDrafter):
            self.controller = calibrated(drafter, mistaken)
        else:
            cost = CostModel(costs(), {"it": profile(drafter, mistaken)})
            self.controller = AdaptiveLength(cost)
        self.seconds = 0.0
        self.tokens = 0
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
        lengths = self.controller.lengths(seqs)
        limited = [max(0, min(n, s.remaining - 1)) for n, s in zip(lengths, seqs, strict=True)]
        asked = [own.drafted for own in self.guessers]  # type: ignore[attr-defined]
        slices = tuple(Slice(seq, 1, n) for seq, n in zip(seqs, limited, strict=True))
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
        seconds = STEP + TOKEN * rows + passes + REST
        self.controller.observe(commits, seconds, passes if self.parts else None)
        self.seconds += seconds

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
