"""The sampled part of a certification: places, what is drawn there, and the rule enumerated."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter
from paceline.lab.certify import exact, sampled
from paceline.lab.certify.decoding import Start
from paceline.lab.certify.draws import Recorder
from paceline.lab.certify.evidence import Place, Problem
from paceline.lab.certify.schedule import Asked, WorkItem
from paceline.lab.certify.scoring import Scorer

_FURTHER = 16  # tokens behind a place in which the rule may be enumerated
_RANK = 0.75  # not the very most undecided place: sure ones have likelier second tokens


class Sampler:
    """Draws at places and puts what comes into evidence."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._places = asked, asked.evidence.places
        self.recorder = Recorder(asked.engine.drafter, asked.effort.seed)
        self.recorder.resume(asked.evidence.draws, asked.evidence.impossible)
        self._undecided: dict[int, tuple[float, Place]] = {}

    def pieces(self, number: int, samples: int) -> Iterator[WorkItem]:
        """Everything that brings place ``number`` to so many samples."""
        if number >= len(self._places):
            what = f"place/{number}", "sampling", "place", 1, "looking for places"
            yield WorkItem(*what, self._find)
        if number >= len(self._places):
            return  # no text has been decoded to look in
        prefix = self._places[number]
        while len(prefix.drawn) < samples or len(prefix.plain) < samples:
            plainly = len(prefix.plain) <= len(prefix.drawn)
            strings, kind = (prefix.plain, "plain") if plainly else (prefix.drawn, "speculative")
            have = len(strings)
            size = min(self._portion(kind), samples - have)
            run = partial(self._draw, prefix, number, size, plainly)
            yield WorkItem("", "sampling", kind, size, f"{prefix.name}: {kind} sampling", run)
            if len(strings) == have:
                break  # there was no time for it, or it failed
        shown = f"{prefix.name}: the rule, enumerated"
        run = partial(self._enumerate, prefix)
        yield WorkItem(f"rule/{number}", "rule", "rule", 1, shown, run)

    def _portion(self, kind: str) -> int:
        """A tenth of the samples; less where time is short, a full batch at least."""
        budget = self._asked.budget
        whole = -(-self._asked.effort.samples // sampled.PORTIONS)
        batch = self._asked.engine.scheduler.config.max_batch_size
        if budget.seconds is None or whole <= batch:
            return whole
        known = budget.estimate(kind) is not None
        affordable = int(budget.affords(kind) / 2) if known else batch
        return max(batch, min(whole, affordable // batch * batch or batch))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The engine's drafter is watched in the block."""
        engine, evidence = self._asked.engine, self._asked.evidence
        drafter, engine.drafter = engine.drafter, cast(Drafter, self.recorder)
        try:
            yield
        finally:
            engine.drafter = drafter
            evidence.draws = list(self.recorder.counts)
            evidence.impossible = self.recorder.impossible

    # -- places -------------------------------------------------------------------------------

    def _find(self) -> None:
        """The most undecided place in the greedy texts that have none yet."""
        asked, taken = self._asked, {prefix.text for prefix in self._places}
        for key, output in asked.evidence.plain.items():
            kind, _, digits = key.partition("/")
            if kind == "greedy" and (number := int(digits)) not in self._undecided:
                name, prompt = asked.prompt(number)
                entropy, start = sampled.choose_start(
                    asked.engine.target, prompt, output, asked.params, _RANK
                )
                self._undecided[number] = entropy, Place(name, number, start, 0)
        open_places = [entry for text, entry in self._undecided.items() if text not in taken]
        if open_places:
            prefix = max(open_places, key=lambda entry: entry[0])[1]
            prefix.length = _sampling_length(asked.lengths, len(taken))
            self._places.append(prefix)

    def _draw(self, place: Place, number: int, size: int, plainly: bool) -> None:
        engine = self._asked.plain if plainly else self._asked.engine
        generator = engine.verifier.generator
        if generator is not None:
            seed_parts = (self._asked.effort.seed, number, place.portions, plainly)
            digest = hashlib.blake2b(repr(seed_parts).encode(), digest_size=7).digest()
            generator.manual_seed(int.from_bytes(digest, "little"))
        place.portions += 1
        length = 0 if plainly else place.length
        texts = sampled.continuations(engine, place.start, self._asked.params, length, size)
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
        recorder, asked = self.recorder, self._asked
        notes = asked.evidence.notes
        length = min(2, asked.lengths[-1])
        # A lookup may find nothing at the place itself, but further on in what was drawn from it.
        for samples, enough in ((128, 1), (16, _FURTHER)):
            recorder.watch(place.start.tokens, beyond=enough > 1)
            sampled.continuations(
                asked.engine, place.start, asked.params, length, samples, enough=enough
            )
            if recorder.trees:
                break
        else:
            notes.append(f"{place.name}: rule not enumerated: nothing was drafted there")
        trees, distributions = list(recorder.trees.values()), recorder.distributions
        prompt = place.start.prompt
        start = Start(prompt, (recorder.watched or ())[len(prompt) :])
        recorder.watch(None)
        scorer = Scorer(asked.engine.target, start, asked.params)
        for tree in trees[:2]:
            check = self._enumerated(place, scorer, tree, distributions)
            if check is None:
                what = f"{place.name}: rule not enumerated: a tree of {len(tree)} nodes"
                notes.append(f"{what} has too many outcomes")
                continue
            asked.evidence.exact.append(check)
            if not check.passed:
                what = f"{check.prefix}: a step's distribution is {check.distance:.2g} from the "
                what += "target's (total variation, enumerated)"
                asked.evidence.problems.append(Problem("rule", what))

    def _enumerated(
        self, place: Place, scorer: Scorer, tree: TokenTree, distributions: exact.Distributions
    ) -> exact.ExactCheck | None:
        verifier = self._asked.engine.verifier
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
