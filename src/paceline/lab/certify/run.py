"""Certifies one LLM: its texts, samples beside the target's distributions, and the rule itself."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product, zip_longest
from typing import cast

import torch

from paceline.core.params import SamplingParams
from paceline.draft.base import Drafter
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import (
    LEAST_PREFIXES,
    Certificate,
    DistributionTest,
    Prefix,
    Problem,
    as_family,
    too_little,
)
from paceline.lab.certify.chisquare import ChiSquare, goodness
from paceline.lab.certify.decoding import Scorer, String, decode
from paceline.lab.certify.effort import FEWEST, Effort
from paceline.lab.certify.exact import enumerate_step
from paceline.lab.certify.subject import OnProgress, Subject
from paceline.llm import LLM
from paceline.model.target import CausalModel

DEPTH = 3  # tokens of a sample
_MOST_CELLS = 150
_LEAST_EXPECTED = 5.0  # samples in a cell, the usual rule for chi-square
_MOST_HEADS = 128  # beginnings whose next tokens are tested: those that occur most
# Next tokens are counted by how likely they were: first, second, third, fourth or fifth, ...
_RANKS = torch.tensor([0, 1, 2, 4, 8, 16, 64])
# A sample may differ from the scored distribution by what two batch shapes differ by.
_MARGIN = 2.0
PORTIONS = 10  # in which the samples of a prefix are drawn
_BEYOND_BLOCK = 4  # tokens of a prefix that no full cache block shares: cheap to read again
_RANK = 0.75  # not the very most undecided prefix: sure ones have likelier second tokens


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
    """Tests of what was drawn; none where nothing is left to chance."""
    scorer, strings = Scorer(model, prefix.start), prefix.drawn
    (probs,), (moved,) = scorer.at_once([()]), scorer.stepwise([()])
    cells = Cells.of(probs, moved, len(strings))
    first = cells.fit(Counter(string[0] for string in strings))
    fits = {
        "first token / distribution": (first, cells),
        "next tokens / distribution": _next_tokens(scorer, strings),
    }
    where = prefix.start.name, prefix.length
    return [
        DistributionTest("sampling", what, len(strings), outcome, *where, used.rounding)
        for what, (outcome, used) in fits.items()
        if outcome.df > 0
    ]


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


_ENDING = 0.1  # of the budget, kept for the tests at the end


def certify(
    llm: LLM,
    prompts: Sequence[tuple[str, Sequence[int]]],
    params: SamplingParams | None = None,
    *,
    effort: Effort | None = None,
    advance: OnProgress = lambda what: None,
    seconds: float | None = None,
) -> Certificate:
    """Compare an LLM's speculative decoding with plain decoding of the same target.

    ``llm`` has a drafter. ``prompts``: (name, token ids). ``params``: sampling parameters to
    certify, by default temperature 1, but for seed, stop conditions and token limits; greedy
    decoding is tested in any case, with their penalties and bias. ``advance(what comes next)`` is
    called before each piece of work. After ``seconds`` it ends.

    Raises ConfigError for an engine without a drafter, and PromptError.
    """
    certifier = Certifier(llm, prompts, params, effort, budget=Budget(seconds))
    certifier.run(advance)
    return certifier.certificate()


class Certifier(Subject):
    """One certification; ``certificate`` may be asked for at any time, also after Ctrl-C."""

    _ended = False

    @property
    def pieces(self) -> int:
        """How often ``run`` calls ``advance`` at most."""
        of_text, batches = 1 + len(self.alone), len(_groups(self.texts))
        comparing = len(self.kinds) * (self.texts * of_text + batches)
        return comparing + self.prefixes * (PORTIONS + 2)

    def run(self, advance: OnProgress = lambda what: None) -> None:
        """Test as much as the budget allows: round by round a few more texts under all settings,
        and more samples at one prefix until that has all. KeyboardInterrupt passes through."""
        self.budget.reserve = _ENDING * (self.budget.seconds or 0.0)
        self.advance = advance
        with self.guarded("greedy"):
            self.decide_tokens()
        samples = self.effort.samples
        portions = [(0, -(-samples * tenths // 10)) for tenths in (3, 5, 10)]
        portions += [(number, samples) for number in range(1, self.prefixes)]
        rounds = zip_longest(_groups(self.texts), portions if self.prefixes else ())
        for numbers, portion in rounds:
            self.compare_texts(numbers or ())
            if portion and (not portion[0] or self.samples_fit(*portion)):
                self.sample(*portion)
        self._ended = True

    def sample(self, number: int, samples: int) -> None:
        """Bring prefix ``number`` to so many samples, and enumerate the rule on their drafts."""
        prefixes = self.evidence.prefixes
        if number >= len(prefixes):
            run = partial(self._choose_prefix, number)
            self.do("sampling", "prefix", 1, "choosing a prefix", run)
        if number >= len(prefixes):
            return  # no text has been decoded to look in
        prefix = prefixes[number]
        while (have := len(prefix.drawn)) < samples:
            size = min(-(-self.effort.samples // PORTIONS), samples - have)
            run = partial(self._draw, prefix, number, size)
            self.do("sampling", "sample", size, f"{prefix.start.name}: sampling", run)
            if len(prefix.drawn) == have:
                break  # there was no time for it, or it failed
        if prefix.examples:
            run, shown = (
                partial(self._enumerate, prefix),
                f"{prefix.start.name}: the rule, enumerated",
            )
            self.do("rule", "rule", 1, shown, run, f"rule/{number}")

    def samples_fit(self, number: int, samples: int) -> bool:
        """Whether all of it will be done in time: a few samples would only be a weak spot."""
        missing = samples - sum(len(p.drawn) for p in self.evidence.prefixes[number : number + 1])
        wanted = {"sample": missing, "rule": int(f"rule/{number}" not in self.evidence.done)}
        seconds = sum((self.budget.estimate(kind) or 0.0) * n for kind, n in wanted.items())
        return seconds < self.budget.left

    def _choose_prefix(self, number: int) -> None:
        """The beginning of a greedy text after which the target is undecided, by its entropy; a few
        tokens behind a full cache block, as thousands of samples start there."""
        start, evidence = self.start(number, self.params), self.evidence
        output = evidence.plain.get(f"greedy/{number}")
        if output is None:
            return
        size, ends = self.llm.engine.cache.block_size, range(len(output) + 1)
        close = [end for end in ends if 0 < (len(start.prompt) + end) % size <= _BEYOND_BLOCK]
        heads = [output[:end] for end in close or (len(output),)]
        probs = Scorer(self.llm.target, start).at_once(heads)
        entropies = torch.special.entr(probs).sum(-1)
        head = heads[int(entropies.argsort()[round(_RANK * (len(heads) - 1))])]
        # Short drafts, whose bonus token is among those tested, and long ones in turn.
        longest = self.lengths[-1]
        length = longest if number % 2 else min(2, longest)
        evidence.prefixes.append(Prefix(replace(start, output=head), length))

    def _draw(self, prefix: Prefix, number: int, size: int) -> None:
        """So many more samples, of ``DEPTH`` tokens each, and what was drafted for them."""
        engine, start = self.llm.engine, prefix.start
        seed_parts = (self.effort.seed, number, len(prefix.drawn))
        digest = hashlib.blake2b(repr(seed_parts).encode(), digest_size=7).digest()
        engine.verifier.reseed(int.from_bytes(digest, "little"))
        given = len(start.output)
        max_tokens = given + DEPTH + prefix.length + 1
        starts = [replace(start, params=replace(start.params, max_tokens=max_tokens))] * size
        self.recorder.examples = prefix.examples
        drafter, engine.drafter = engine.drafter, cast(Drafter, self.recorder)
        try:
            texts = decode(engine, starts, prefix.length, DEPTH)
        finally:
            engine.drafter = drafter
        prefix.drawn += [tokens[given:] for tokens, _ in texts]
        prefix.drafted += sum(counts.drafted for _, counts in texts)

    def _enumerate(self, prefix: Prefix) -> None:
        """A step behind this prefix, or in what was drawn there, with each kind of draft."""
        llm, start, evidence = self.llm, prefix.start, self.evidence
        for tokens, tree in prefix.examples.values():
            behind = replace(start, output=tokens[len(start.prompt) :])
            target, device = Scorer(llm.target, behind).at_once, llm.target.device
            check = enumerate_step(llm.engine.verifier, tree, target, start.name, device)
            evidence.exact.append(check)
            if not check.passed:
                apart = f"{check.distance:.2g} from the target's (total variation, enumerated)"
                what = f"{start.name}: a step's distribution is {apart}"
                evidence.problems.append(Problem("rule", what))

    def certificate(self) -> Certificate:
        """The verdict on the evidence so far."""
        llm, evidence, amounts = self.llm, self.evidence, self.amounts()
        alpha = self.effort.alpha
        tests = as_family(self._tests(), alpha)
        problems = [*evidence.problems]
        if evidence.draws.impossible:
            what = f"{evidence.draws.impossible} tokens were drawn that its declared distribution"
            problems.append(Problem("drafter", f"{what} rules out"))
        problems += [test.problem() for test in tests if test.adjusted_p_value < alpha]
        notes = [*evidence.notes]
        unknown = [prefix for prefix in evidence.prefixes if not prefix.examples]
        notes += [f"{p.start.name}: rule not enumerated: nothing was drafted" for p in unknown]
        if self.params.greedy:
            notes.append("sampling was not tested: the temperature is 0")
        # Total variation from the target's distribution that would have shown at every prefix.
        scored = [test for test in tests if test.part == "sampling"]
        bias = max((test.smallest_bias for test in scored), default=1.0)
        draft = ", ".join(llm.drafters) or llm.engine.drafter.name
        return Certificate(
            title=f"Is {draft} on {llm.target.name} lossless?",
            alpha=alpha,
            facts={
                "target": llm.target.name,
                "draft": draft,
                "dtype": llm.target.numbers,
                "backend": llm.target.backend_reason,
                "complete": self._ended and self.complete,
                "smallest_bias": bias,
                "budget": amounts,
            },
            tables=tuple(evidence.tables(tests)),
            problems=tuple(dict.fromkeys(problems)),
            lacks=tuple(self._lacks(tests, amounts["texts"], bias)),
            notes=tuple(dict.fromkeys(notes)),
            interrupted=not self._ended,
            completed=self._completed(bias if tests else None),
            certified=self._certified(tests, bias),
        )

    def _tests(self) -> list[DistributionTest]:
        tests: list[DistributionTest] = []
        for prefix in self.evidence.prefixes:
            if len(prefix.drawn) >= FEWEST:
                with self.guarded("sampling"):
                    tests += judge(self.llm.target, prefix)
        draws = self.evidence.draws
        if (outcome := draws.test()) is not None:
            about = "drafter", "draws / declared distribution", draws.total
            tests.append(DistributionTest(*about, outcome))
        return tests

    def _lacks(self, tests: Sequence[DistributionTest], texts: int, bias: float) -> list[str]:
        """What the evidence must have, or it says too little to certify anything."""
        evidence, sampled = self.evidence, bool(self.prefixes)
        seen = {(check.kind, check.setting) for check in evidence.checks}
        wanted = product(self.kinds, [*self.alone, self.mixed])
        unseen = [f"no {kind} text at {name}" for kind, name in wanted if (kind, name) not in seen]
        # A test of nothing must not pass.
        drafting = {check.kind for check in evidence.checks if check.drafted}
        drafting |= {"sampled" for prefix in evidence.prefixes if prefix.drafted}
        idle = [k for k in (*self.kinds, *["sampled"] * sampled) if k not in drafting]
        proposed = "the drafter proposed nothing for {} requests; try other prompts (--prompts)"
        lacks = unseen[:1] or [proposed.format(kind) for kind in idle]
        lacks += too_little(texts, bias if tests else 0.0)
        if sampled and not tests:
            lacks.append("no prefix has enough samples for a test; draw more, or at other prompts")
        whole = sum(len(prefix.drawn) >= self.effort.samples for prefix in evidence.prefixes)
        if sampled and whole < LEAST_PREFIXES:
            lacks.append(f"{whole} prefixes have all their samples, not {LEAST_PREFIXES}")
        if sampled and not evidence.exact:
            lacks.append("the rule was not enumerated")
        return lacks

    def _completed(self, bias: float | None) -> str:
        """What the time was spent on, for people; ``bias``: the smallest, if any could be seen."""
        line = "{spent:.0f} s completed {texts} of {texts_wanted} texts of {tokens} tokens"
        if self.prefixes:
            line += ", {prefixes} of {prefixes_wanted} prefixes"
            line += ", {samples} of {samples_wanted} samples"
        if not self.complete:
            line += "; more --seconds test the rest"
        if bias is not None:
            line += f"; the smallest bias that it could have seen is {bias:.1%}"
        return line.format(**self.amounts())

    def _certified(self, tests: Sequence[DistributionTest], bias: float) -> str:
        checks, target = self.evidence.checks, self.llm.target
        ties = sum(len(check.ties) for check in checks)
        how = "bit for bit" if target.backend.same_bits else f"but for {ties} near ties"
        tokens = sum(check.tokens for check in checks)
        parts = [f"{tokens} tokens equal to plain decoding's {how} on {target.backend_reason}"]
        if tests:
            sees = f"which see {bias:.1%} or more"
            parts.append(f"no bias in {len(tests)} distribution tests, {sees}")
        if not self.prefixes:
            parts.append("greedy decoding only, no samples were drawn")
        if self.evidence.exact:
            distance = max(check.distance for check in self.evidence.exact)
            parts.append(f"the rule is exact to {distance:.0e}")
        return "; ".join(parts)


def _groups(texts: int) -> list[range]:
    """1, 1, 2, 4, 8 ... texts, so that the first verdict comes soon."""
    ends = [0]
    while ends[-1] < texts:
        ends.append(min(texts, max(1, 2 * ends[-1])))
    return [range(*pair) for pair in pairwise(ends)]
