"""Texts against plain decoding, samples against the target's distributions, the rule enumerated."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from typing import cast

import torch

from paceline.core.params import SamplingParams
from paceline.core.sequence import DraftCounts
from paceline.draft.base import Drafter
from paceline.lab.certify.certificate import (
    DistributionTest,
    Prefix,
    Problem,
    TextCheck,
    TextDivergence,
)
from paceline.lab.certify.chisquare import ChiSquare, goodness, homogeneity
from paceline.lab.certify.decoding import Scorer, Start, String, decode, explain
from paceline.lab.certify.steps import enumerate_step
from paceline.lab.certify.subject import Subject
from paceline.model.target import CausalModel

Pair = tuple[Start, String]  # and plain decoding's output
_NEIGHBOURS = 3  # at least, of the texts in a mixed batch
_SHARE = 0.025  # of what is left of a budget, that one text at one setting may take
_SHORTEST = 16
_TIMED = 4  # tokens that are decoded to see how fast that is


def compare_texts(subject: Subject, numbers: Sequence[int]) -> None:
    """Each of the texts plainly, then under every setting; those in a batch come last. What has no
    plain text by then is left out."""
    plain = subject.evidence.plain
    for number, kind in product(numbers, subject.kinds):
        text, name = _text(subject, kind, number), f"{kind}/{number}"
        run, shown = partial(_decode_plainly, subject, name, text), f"{kind}: {text.name}"
        subject.do(kind, "text", 1, f"{shown}: plain decoding", run, name)
        for setting in subject.alone if name in plain else ():
            run = partial(_compare, subject, kind, [number], setting)
            subject.do(kind, "text", 1, f"{shown}: {setting}", run, f"{name}/{setting}")
    for kind in subject.kinds if numbers else ():
        if all(f"{kind}/{number}" in plain for number in numbers):
            run = partial(_compare, subject, kind, numbers, subject.mixed)
            name = f"{kind}/{'-'.join(map(str, numbers))}/{subject.mixed}"
            subject.do(kind, "mixed", len(numbers), f"{kind}: {subject.mixed}", run, name)


def decide_tokens(subject: Subject) -> None:
    """Shorter texts if those asked for would take too much of the budget each."""
    budget, most = subject.budget, subject.effort.max_tokens
    if subject.evidence.tokens or budget.seconds is None or most <= _SHORTEST:
        return
    for kind, tokens in (("warming up", 1), ("token", _TIMED)):
        with budget.piece(kind, tokens):
            decode(subject.plain, [subject.start(0, SamplingParams(max_tokens=tokens))], 0)
    seconds = budget.estimate("token")
    affordable = _SHARE * budget.left / seconds if seconds else most
    subject.evidence.tokens = min(most, max(_SHORTEST, int(affordable)))


def _text(subject: Subject, kind: str, number: int) -> Start:
    tokens = subject.evidence.tokens or subject.effort.max_tokens
    seed = (subject.effort.seed + number) % 2**63 if kind == "seeded" else None
    return subject.start(number, replace(subject.kinds[kind], max_tokens=tokens, seed=seed))


def _decode_plainly(subject: Subject, name: str, text: Start) -> None:
    ((subject.evidence.plain[name], _),) = decode(subject.plain, [text], 0)


def _compare(subject: Subject, kind: str, numbers: Sequence[int], setting: str) -> None:
    plain, others = subject.evidence.plain, list[Start]()
    texts = [(_text(subject, kind, number), plain[f"{kind}/{number}"]) for number in numbers]
    if setting == subject.mixed:
        # Requests of another kind, shorter and longer, that come and go while others decode.
        count = max(_NEIGHBOURS, len(numbers))
        for n, tokens in zip(range(count), cycle((5, 17, 40)), strict=False):
            params = SamplingParams(temperature=0.8, max_tokens=tokens)
            others.append(subject.start(numbers[0] + n, params))
    subject.evidence.add(check_texts(subject, kind, setting, texts, others))


def check_texts(
    subject: Subject, kind: str, setting: str, texts: Sequence[Pair], others: Sequence[Start] = ()
) -> TextCheck:
    """Decode ``texts`` in one batch under this setting and compare them with plain decoding's.
    ``others`` join the batch and are not compared."""
    length = subject.alone.get(setting, subject.lengths[-1])
    batch = [*(text for text, _ in texts), *others]
    outputs = decode(subject.llm.engine, batch, length)[: len(texts)]
    parted: dict[bool, list[TextDivergence]] = {True: [], False: []}  # by whether it is a tie
    for text, (tokens, _) in zip(texts, outputs, strict=True):
        for item, tie in _divergences(subject, *text, tokens, length):
            parted[tie].append(item)
    counts = sum((counts for _, counts in outputs), DraftCounts())
    compared = len(texts), sum(len(plain) for _, plain in texts), counts.drafted, counts.accepted
    return TextCheck(kind, setting, *compared, tuple(parted[True]), tuple(parted[False]))


def _divergences(
    subject: Subject, text: Start, expected: String, tokens: String, length: int | None
) -> Iterator[tuple[TextDivergence, bool]]:
    """All near ties between the two texts, and at their end perhaps one bug; which are ties (none
    on a backend of ``same_bits``). After a tie the rest is decoded anew behind the beginning of the
    ``expected`` text."""
    target, decoded = subject.llm.target, subject.llm.tokenizer.decode
    while difference := explain(target, text.prompt, expected, tokens, text.params):
        pair = difference.left, difference.right
        plain, other = (str(decoded([token])) if token >= 0 else "(end)" for token in pair)
        tie, known = difference.is_tie and not target.backend.same_bits, vars(difference)
        yield TextDivergence(**known, text=text.name, plain=plain, speculative=other), tie
        given = expected[: difference.at + 1]
        if not difference.is_tie or len(given) == len(expected):
            return
        ((tokens, _),) = decode(subject.llm.engine, [replace(text, output=given)], length)


DEPTH = 3  # tokens of a sample
_MOST_CELLS = 150
_LEAST_EXPECTED = 5.0  # samples in a cell, the usual rule for chi-square
_MOST_HEADS = 128  # beginnings whose next tokens are tested: those that occur most
# Next tokens are counted by how likely they were: first, second, third, fourth or fifth, ...
_RANKS = torch.tensor([0, 1, 2, 4, 8, 16, 64])
# Either sample may differ from the scored distribution by what two batch shapes differ by.
_MARGIN = 2.0
PORTIONS = 10  # in which the samples of a prefix are drawn
_BEYOND_BLOCK = 4  # tokens of a prefix that no full cache block shares: cheap to read again
_FURTHER = 16  # tokens behind a prefix in which the rule may be enumerated
_RANK = 0.75  # not the very most undecided prefix: sure ones have likelier second tokens


def sample(subject: Subject, number: int, samples: int) -> None:
    """Bring prefix ``number`` to so many samples, then enumerate the rule there."""
    prefixes = subject.evidence.prefixes
    if number >= len(prefixes):
        run = partial(_choose_prefix, subject, number)
        subject.do("sampling", "prefix", 1, "choosing a prefix", run)
    if number >= len(prefixes):
        return  # no text has been decoded to look in
    prefix, name = prefixes[number], prefixes[number].start.name
    while min(len(prefix.drawn), len(prefix.plain)) < samples:
        plainly = len(prefix.plain) <= len(prefix.drawn)
        strings, kind = (prefix.plain, "plain") if plainly else (prefix.drawn, "speculative")
        have = len(strings)
        size = min(-(-subject.effort.samples // PORTIONS), samples - have)
        run = partial(_draw, subject, prefix, number, size, plainly)
        subject.do("sampling", kind, size, f"{name}: {kind} sampling", run)
        if len(strings) == have:
            break  # there was no time for it, or it failed
    run = partial(_enumerate, subject, prefix)
    subject.do("rule", "rule", 1, f"{name}: the rule, enumerated", run, f"rule/{number}")


def samples_fit(subject: Subject, number: int, samples: int) -> bool:
    """Whether all of it will be done in time: a few samples would only be a weak spot."""
    budget, known = subject.budget, subject.evidence.prefixes[number : number + 1]
    missing = samples - sum(len(prefix.drawn) for prefix in known)
    kinds = {"plain": missing, "speculative": missing, "rule": 1}
    return sum((budget.estimate(kind) or 0.0) * n for kind, n in kinds.items()) < budget.left


def _choose_prefix(subject: Subject, number: int) -> None:
    """The beginning of a greedy text after which the target is undecided, by its entropy; a few
    tokens behind a full cache block, as thousands of samples start there."""
    start, evidence = subject.start(number, subject.params), subject.evidence
    output = evidence.plain.get(f"greedy/{number}")
    if output is None:
        return
    size, ends = subject.llm.engine.cache.block_size, range(len(output) + 1)
    close = [end for end in ends if 0 < (len(start.prompt) + end) % size <= _BEYOND_BLOCK]
    heads = [output[:end] for end in close or (len(output),)]
    probs = Scorer(subject.llm.target, start).at_once(heads)
    entropies = torch.special.entr(probs).sum(-1)
    head = heads[int(entropies.argsort()[round(_RANK * (len(heads) - 1))])]
    # Short drafts, whose bonus token is among those tested, and long ones in turn.
    longest = subject.lengths[-1]
    length = longest if number % 2 else min(2, longest)
    evidence.prefixes.append(Prefix(replace(start, output=head), length))


def _draw(subject: Subject, prefix: Prefix, number: int, size: int, plainly: bool) -> None:
    engine, start = subject.plain if plainly else subject.llm.engine, prefix.start
    generator = engine.verifier.generator
    if generator is not None:
        seed_parts = (subject.effort.seed, number, prefix.portions, plainly)
        digest = hashlib.blake2b(repr(seed_parts).encode(), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
    prefix.portions += 1
    texts = _continued(subject, start, 0 if plainly else prefix.length, size, DEPTH, plainly)
    strings = prefix.plain if plainly else prefix.drawn
    strings += [tokens[len(start.output) :] for tokens, _ in texts]
    prefix.drafted += sum(counts.drafted for _, counts in texts)


def _continued(
    subject: Subject, start: Start, length: int, samples: int, enough: int, plainly: bool = False
) -> list[tuple[String, DraftCounts]]:
    """So many samples of ``enough`` tokens each; drafts of ``length`` are recorded."""
    max_tokens = len(start.output) + max(DEPTH, enough) + length + 1
    starts = [replace(start, params=replace(start.params, max_tokens=max_tokens))] * samples
    engine = subject.llm.engine
    drafter, engine.drafter = engine.drafter, cast(Drafter, subject.recorder)
    try:
        return decode(subject.plain if plainly else engine, starts, length, enough)
    finally:
        engine.drafter = drafter


def _enumerate(subject: Subject, prefix: Prefix) -> None:
    """The step at this prefix, by enumeration, over each kind of tree that was proposed."""
    evidence, recorder, start = subject.evidence, subject.recorder, prefix.start
    length, omitted = min(2, subject.lengths[-1]), f"{start.name}: rule not enumerated:"
    # A lookup may find nothing at the prefix itself, but further on in what was drawn from it.
    for samples, enough in ((128, 1), (16, _FURTHER)):
        recorder.watch(start.tokens)
        _continued(subject, start, length, samples, enough)
        if recorder.trees:
            break
    else:
        evidence.notes.append(f"{omitted} nothing was drafted there")
    trees, distributions = list(recorder.trees.values()), recorder.distributions
    start = replace(start, output=(recorder.watched or ())[len(start.prompt) :])
    recorder.watch(None)
    target = Scorer(subject.llm.target, start).at_once
    for tree in trees[:2]:
        verifier = subject.llm.engine.verifier
        if (check := enumerate_step(verifier, tree, distributions, target, start.name)) is None:
            many = f"a tree of {len(tree)} nodes has too many outcomes"
            evidence.notes.append(f"{omitted} {many}")
            continue
        evidence.exact.append(check)
        if not check.passed:
            apart = f"{check.distance:.2g} from the target's (total variation, enumerated)"
            what = f"{start.name}: a step's distribution is {apart}"
            evidence.problems.append(Problem("rule", what))


@dataclass(frozen=True)
class Cells:
    """A cell for each of some ``groups`` of tokens, and one for all others, with their ``chances``.
    ``slack``: the effect w² that a test allows for rounding; ``rounding``: the total variation
    between two batch shapes."""

    groups: list[int]
    chances: list[float]
    slack: float
    rounding: float

    @classmethod
    def of(cls, probs: torch.Tensor, moved: torch.Tensor, samples: int) -> Cells:
        """So likely that enough of the samples are expected in each; [vocab] in both shapes."""
        least = max(_LEAST_EXPECTED / samples, 1 / _MOST_CELLS)
        order = probs.argsort(descending=True, stable=True)
        groups = order[probs[order] >= least].tolist()
        if groups and 1 - float(probs[groups].double().sum()) < least:
            groups.pop()  # too little is left for a cell: it takes the last of them in
        both = [row[groups].double().tolist() for row in (probs, moved)]
        chances, others = ([*named, max(0.0, 1 - sum(named))] for named in both)
        pairs = list(zip(chances, others, strict=True))
        effect = sum((a - b) ** 2 / a for a, b in pairs if a > 0)
        return cls(groups, chances, _MARGIN**2 * effect, sum(abs(a - b) for a, b in pairs) / 2)

    def counts(self, drawn: Counter[int]) -> list[int]:
        named = [drawn[group] for group in self.groups]
        return [*named, drawn.total() - sum(named)]

    def fit(self, drawn: Counter[int]) -> ChiSquare:
        return goodness(self.counts(drawn), self.chances, self.slack)


def judge(model: CausalModel, prefix: Prefix) -> list[DistributionTest]:
    """Tests of what was drawn with drafts and plainly; none where nothing is left to chance."""
    scorer, tests = Scorer(model, prefix.start), list[DistributionTest]()
    plain = Counter(string[0] for string in prefix.plain)
    (probs,), (moved,) = scorer.at_once([()]), scorer.stepwise([()])
    cells = Cells.of(probs, moved, min(len(prefix.drawn), len(prefix.plain)))
    for length, strings in ((prefix.length, prefix.drawn), (0, prefix.plain)):
        first = Counter(string[0] for string in strings)
        fits = {"first token / distribution": (cells.fit(first), cells)}
        if length:
            same = homogeneity(cells.counts(first), cells.counts(plain), cells.slack)
            fits["first token / plain"] = same, cells
        fits["next tokens / distribution"] = _next_tokens(scorer, strings)
        part, where = "sampling" if length else "plain sampling", (prefix.start.name, length)
        for what, (outcome, used) in fits.items():
            if outcome.df > 0:
                about = len(strings), outcome, *where, used.rounding
                tests.append(DistributionTest(part, what, *about))
    return tests


def _next_tokens(scorer: Scorer, strings: Sequence[String]) -> tuple[ChiSquare, Cells]:
    """Test of how likely the tokens behind the first were: of all beginnings together, by their
    ranks in the distribution behind their beginning. Which beginnings occur most depends on what
    came before the tokens, so it favours nothing."""
    following: defaultdict[String, Counter[int]] = defaultdict(Counter)
    for string in strings:
        for position in range(1, DEPTH):
            following[string[:position]][string[position]] += 1
    heads = sorted(following, key=lambda head: -following[head].total())[:_MOST_HEADS]
    drawn: Counter[int] = Counter()
    expected = torch.zeros(2, len(_RANKS) + 1, dtype=torch.float64)  # in both batch shapes
    rows = zip(heads, scorer.at_once(heads), scorer.stepwise(heads), strict=True)
    for head, *shapes in rows:
        ranks = shapes[0].argsort(descending=True, stable=True).argsort()
        groups = torch.bucketize(ranks, _RANKS)
        for token, count in following[head].items():
            drawn[int(groups[token])] += count
        both = torch.stack(shapes).double() * following[head].total()
        expected.index_add_(1, groups, both)
    probs, moved = expected / drawn.total()
    cells = Cells.of(probs, moved, drawn.total())
    return cells.fit(drawn), cells
