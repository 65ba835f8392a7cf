"""The sampled part of a certification: prefixes, what is drawn there, and the rule enumerated."""

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
from paceline.lab.certify.evidence import Prefix, Problem
from paceline.lab.certify.schedule import Asked, WorkItem
from paceline.lab.certify.scoring import Scorer

_FURTHER = 16  # tokens behind a prefix in which the rule may be enumerated
_RANK = 0.75  # not the very most undecided prefix: sure ones have likelier second tokens


class Sampler:
    """Draws at prefixes and puts what comes into evidence."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._prefixes = asked, asked.evidence.prefixes
        self.recorder = Recorder(asked.engine.drafter, asked.effort.seed)
        self.recorder.resume(asked.evidence.draws, asked.evidence.impossible)
        self._undecided: dict[int, tuple[float, Prefix]] = {}

    def pieces(self, number: int, samples: int) -> Iterator[WorkItem]:
        """Everything that brings prefix ``number`` to so many samples."""
        if number >= len(self._prefixes):
            what = f"prefix/{number}", "sampling", "prefix", 1, "looking for prefixes"
            yield WorkItem(*what, self._find)
        if number >= len(self._prefixes):
            return  # no text has been decoded to look in
        prefix = self._prefixes[number]
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

    # -- prefixes -------------------------------------------------------------------------------

    def _find(self) -> None:
        """The most undecided prefix in the greedy texts that have none yet."""
        asked, taken = self._asked, {prefix.text for prefix in self._prefixes}
        for key, output in asked.evidence.plain.items():
            kind, _, digits = key.partition("/")
            if kind == "greedy" and (number := int(digits)) not in self._undecided:
                name, prompt = asked.prompt(number)
                entropy, start = sampled.choose_start(
                    asked.engine.target, prompt, output, asked.params, _RANK
                )
                self._undecided[number] = entropy, Prefix(name, number, start, 0)
        open_prefixes = [entry for text, entry in self._undecided.items() if text not in taken]
        if open_prefixes:
            prefix = max(open_prefixes, key=lambda entry: entry[0])[1]
            prefix.length = _sampling_length(asked.lengths, len(taken))
            self._prefixes.append(prefix)

    def _draw(self, prefix: Prefix, number: int, size: int, plainly: bool) -> None:
        engine = self._asked.plain if plainly else self._asked.engine
        generator = engine.verifier.generator
        if generator is not None:
            seed_parts = (self._asked.effort.seed, number, prefix.portions, plainly)
            digest = hashlib.blake2b(repr(seed_parts).encode(), digest_size=7).digest()
            generator.manual_seed(int.from_bytes(digest, "little"))
        prefix.portions += 1
        length = 0 if plainly else prefix.length
        texts = sampled.continuations(engine, prefix.start, self._asked.params, length, size)
        given = len(prefix.start.output)
        strings = [text.tokens[given:] for text in texts]
        if plainly:
            prefix.plain += strings
        else:
            prefix.drawn += strings
            prefix.drafted += sum(text.drafted for text in texts)

    # -- the rule -----------------------------------------------------------------------------

    def _enumerate(self, prefix: Prefix) -> None:
        """The step at this prefix, by enumeration, over each kind of tree that was proposed."""
        recorder, asked = self.recorder, self._asked
        notes = asked.evidence.notes
        length = min(2, asked.lengths[-1])
        # A lookup may find nothing at the prefix itself, but further on in what was drawn from it.
        for samples, enough in ((128, 1), (16, _FURTHER)):
            recorder.watch(prefix.start.tokens, beyond=enough > 1)
            sampled.continuations(
                asked.engine, prefix.start, asked.params, length, samples, enough=enough
            )
            if recorder.trees:
                break
        else:
            notes.append(f"{prefix.name}: rule not enumerated: nothing was drafted there")
        trees, distributions = list(recorder.trees.values()), recorder.distributions
        prompt = prefix.start.prompt
        start = Start(prompt, (recorder.watched or ())[len(prompt) :])
        recorder.watch(None)
        scorer = Scorer(asked.engine.target, start, asked.params)
        for tree in trees[:2]:
            check = self._enumerated(prefix, scorer, tree, distributions)
            if check is None:
                what = f"{prefix.name}: rule not enumerated: a tree of {len(tree)} nodes"
                notes.append(f"{what} has too many outcomes")
                continue
            asked.evidence.exact.append(check)
            if not check.passed:
                what = f"{check.prefix}: a step's distribution is {check.distance:.2g} from the "
                what += "target's (total variation, enumerated)"
                asked.evidence.problems.append(Problem("rule", what))

    def _enumerated(
        self, prefix: Prefix, scorer: Scorer, tree: TokenTree, distributions: exact.Distributions
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
                prefix.name, draw, nodes, depth + 1, len(tokens), whole, outcomes, distance
            )
        return None


def _sampling_length(lengths: Sequence[int], number: int) -> int:
    """Short drafts, whose bonus token is among those tested, and long ones in turn."""
    return min(2, lengths[-1]) if number % 2 == 0 else lengths[-1]
