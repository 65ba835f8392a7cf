"""The sampled part of a certification: places, what is drawn there, and the rule enumerated."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from paceline.budget import Budget
from paceline.core.params import SamplingParams
from paceline.core.tree import TokenTree
from paceline.engine.engine import Engine
from paceline.tools.certify import exact, sampled
from paceline.tools.certify.comparing import NamedPrompt, WorkItem
from paceline.tools.certify.draws import Recorder
from paceline.tools.certify.evidence import Evidence, Place
from paceline.tools.certify.findings import Problem
from paceline.tools.certify.schedule import Effort
from paceline.tools.certify.scoring import Scorer

_RANK = 0.75  # not the very most undecided place: sure ones have likelier second tokens


class Sampler:
    """Draws at places and puts what comes into evidence."""

    def __init__(
        self,
        engine: Engine,
        plain: Engine,
        prompts: Sequence[NamedPrompt],
        params: SamplingParams,
        effort: Effort,
        lengths: Sequence[int],
        evidence: Evidence,
        budget: Budget,
    ) -> None:
        self._budget = budget
        self._engine, self._plain, self._prompts = engine, plain, prompts
        self._params, self._effort, self._lengths = params, effort, lengths
        self._evidence = evidence
        self.recorder = Recorder(engine.drafter, effort.seed)
        self.recorder.resume(evidence.draws, evidence.impossible)
        self._undecided: dict[int, tuple[float, Place]] = {}

    def pieces(self, number: int, samples: int) -> Iterator[WorkItem]:
        """Everything that brings place ``number`` to so many samples."""
        evidence = self._evidence
        if number >= len(evidence.places):
            yield WorkItem(
                f"place/{number}", "sampling", "place", 1, "looking for places", self._find
            )
        if number >= len(evidence.places):
            return  # no text has been decoded to look in
        place = evidence.places[number]
        while len(place.drawn) < samples or len(place.plain) < samples:
            plainly = len(place.plain) <= len(place.drawn)
            have = len(place.plain if plainly else place.drawn)
            what = "plain" if plainly else "speculative"
            size = min(self._portion(what), samples - have)
            run = partial(self._draw, place, number, size, plainly)
            yield WorkItem("", "sampling", what, size, f"{place.name}: {what} sampling", run)
            if len(place.plain if plainly else place.drawn) == have:
                break  # there was no time for it, or it failed
        shown = f"{place.name}: the rule, enumerated"
        run = partial(self._enumerate, place)
        yield WorkItem(f"rule/{number}", "rule", "rule", 1, shown, run)

    def _portion(self, kind: str) -> int:
        """A tenth of the samples; less where time is short, a full batch at least."""
        whole = -(-self._effort.samples // sampled.PORTIONS)
        batch = self._engine.scheduler.config.max_batch_size
        if self._budget.seconds is None or whole <= batch:
            return whole
        known = self._budget.estimate(kind) is not None
        affordable = int(self._budget.affords(kind) / 2) if known else batch
        return max(batch, min(whole, affordable // batch * batch or batch))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The engine's drafter is watched in the block."""
        drafter = self._engine.drafter
        self._engine.drafter = self.recorder
        try:
            yield
        finally:
            self._engine.drafter = drafter
            self._evidence.draws = list(self.recorder.counts)
            self._evidence.impossible = self.recorder.impossible

    # -- places -------------------------------------------------------------------------------

    def _find(self) -> None:
        """The most undecided place in the greedy texts that have none yet."""
        taken = {place.text for place in self._evidence.places}
        for key, output in self._evidence.plain.items():
            kind, _, number = key.partition("/")
            if kind == "greedy" and int(number) not in self._undecided:
                self._undecided[int(number)] = self._place_in(int(number), output)
        open_places = [entry for text, entry in self._undecided.items() if text not in taken]
        if open_places:
            place = max(open_places, key=lambda entry: entry[0])[1]
            place.length = _sampling_length(self._lengths, len(taken))
            self._evidence.places.append(place)

    def _place_in(self, number: int, output: Sequence[int]) -> tuple[float, Place]:
        name, prompt = self._prompts[number % len(self._prompts)]
        model = self._engine.target
        entropy, start = sampled.choose_start(model, prompt, output, self._params, _RANK)
        return entropy, Place(name, number, start, 0)

    def _draw(self, place: Place, number: int, size: int, plainly: bool) -> None:
        engine = self._plain if plainly else self._engine
        generator = engine.verifier.generator
        if generator is not None:
            own = (self._effort.seed, number, place.portions, plainly)
            digest = hashlib.blake2b(repr(own).encode(), digest_size=7).digest()
            generator.manual_seed(int.from_bytes(digest, "little"))
        place.portions += 1
        length = 0 if plainly else place.length
        texts = sampled.continuations(engine, place.start, self._params, length, size)
        given = len(place.start.output)
        strings = [text.tokens[given:] for text in texts]
        if plainly:
            place.plain += strings
        else:
            place.drawn += strings
            place.drafted += sum(text.drafted for text in texts)

    # -- the rule -----------------------------------------------------------------------------

    def _enumerate(self, place: Place) -> None:
        """The step at this place, by enumeration, over each kind of tree that was proposed."""
        recorder, notes = self.recorder, self._evidence.notes
        recorder.watch(place.start.tokens)
        length = min(2, self._lengths[-1])
        engine, params, start = self._engine, self._params, place.start
        sampled.continuations(engine, start, params, length, 128, enough=1)
        trees, distributions = list(recorder.trees.values()), recorder.distributions
        recorder.watch(None)
        if not trees:
            notes.append(f"{place.name}: rule not enumerated: nothing was drafted there")
        scorer = Scorer(engine.target, start, params)
        for tree in trees[:2]:
            check = self._enumerated(place, scorer, tree, distributions)
            if check is None:
                what = f"{place.name}: rule not enumerated: a tree of {len(tree)} nodes"
                notes.append(f"{what} has too many outcomes")
                continue
            self._evidence.exact.append(check)
            if not check.passed:
                far = f"{check.distance:.2g} from the target's"
                what = f"{check.prefix}: a step's distribution is {far}"
                problem = Problem("rule", f"{what} (total variation, enumerated)")
                self._evidence.problems.append(problem)

    def _enumerated(
        self, place: Place, scorer: Scorer, tree: TokenTree, distributions: exact.Distributions
    ) -> exact.ExactCheck | None:
        verifier = self._engine.verifier
        (root,) = scorer.at_once([()])
        for depth in (2, 1):
            part = exact.cut(tree, depth)
            if part is None:
                return None
            tokens = exact.small_tokens(part, root, distributions)
            case = exact.make_case(part, distributions, scorer.at_once, tokens)
            try:
                distance, outcomes = exact.step_error(verifier, case)
            except exact.TooManyOutcomes:
                continue
            whole = bool(float(root[tokens].sum()) > 1 - 1e-9)
            draw, nodes = part.draw.value, len(part)
            return exact.ExactCheck(
                place.name, draw, nodes, depth + 1, len(tokens), whole, outcomes, distance
            )
        return None


def _sampling_length(lengths: Sequence[int], number: int) -> int:
    """Short drafts, whose bonus token is among those tested, and long ones in turn."""
    return min(2, lengths[-1]) if number % 2 == 0 else lengths[-1]
