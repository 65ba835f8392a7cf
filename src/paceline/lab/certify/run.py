"""Certifies one LLM: compares texts token for token, tests samples against the target's
distributions, and enumerates the verification rule."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product, zip_longest

import torch

from paceline.core.params import SamplingParams
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import (
    MIN_PREFIXES,
    Certificate,
    DistributionTest,
    Prefix,
    Problem,
    missing_evidence,
    with_holm_correction,
)
from paceline.lab.certify.chisquare import ChiSquare, goodness_of_fit
from paceline.lab.certify.decoding import Scorer, TokenIds, decode
from paceline.lab.certify.effort import MIN_SAMPLES, Effort
from paceline.lab.certify.exact import enumerate_step
from paceline.lab.certify.texts import OnProgress, TextCertifier
from paceline.llm import LLM
from paceline.model.target import CausalModel

SAMPLE_TOKENS = 3
_MAX_CELLS = 150
_MIN_EXPECTED = 5.0  # samples per cell: the usual rule for chi-square tests
_MAX_CONTEXTS = 128  # contexts whose next tokens are tested: the most frequent ones
# Upper edges of the bins in which next tokens are counted by rank: 0, 1, 2, 3-4, 5-8, ...
_RANK_EDGES = torch.tensor([0, 1, 2, 4, 8, 16, 64])
# The test allows this many times the difference that two batch shapes make to the distribution.
_ROUNDING_MARGIN = 2.0
SAMPLE_BATCHES = 10  # in which the samples of a prefix are drawn
# Tokens of a prefix after its last full cache block: few, as each sample prefills them again.
_MAX_PARTIAL_BLOCK = 4
# Quantile of the entropy at which a prefix is chosen. Not the maximum: at less uncertain prefixes
# second tokens have higher probabilities, so more of them can be tested.
_ENTROPY_QUANTILE = 0.75


def cell_test(
    at_once: torch.Tensor, stepwise: torch.Tensor, drawn: Counter[int]
) -> tuple[ChiSquare, float]:
    """Chi-square test that tokens (or bins) follow the distribution [vocab], as it was computed in
    two batch shapes; and the total variation between these, which the test allows for. Each token
    of which enough are expected has a cell, all others share one."""
    least = max(_MIN_EXPECTED / drawn.total(), 1 / _MAX_CELLS)
    order = at_once.argsort(descending=True, stable=True)
    likely = order[at_once[order] >= least].tolist()
    if likely and 1 - float(at_once[likely].double().sum()) < least:
        likely.pop()  # the rest is too small for a cell of its own, so it joins the last one
    listed = [row[likely].double().tolist() for row in (at_once, stepwise)]
    probs, other_probs = ([*row, max(0.0, 1 - sum(row))] for row in listed)
    pairs = list(zip(probs, other_probs, strict=True))
    effect = _ROUNDING_MARGIN**2 * sum((a - b) ** 2 / a for a, b in pairs if a > 0)
    counts = [drawn[token] for token in likely]
    outcome = goodness_of_fit([*counts, drawn.total() - sum(counts)], probs, effect)
    return outcome, sum(abs(a - b) for a, b in pairs) / 2


def sampling_tests(model: CausalModel, prefix: Prefix) -> list[DistributionTest]:
    """Chi-square tests of the samples at a prefix; none where the next token is certain."""
    scorer, samples = Scorer(model, prefix.start), prefix.drawn
    (at_once,), (stepwise,) = scorer.at_once([()]), scorer.stepwise([()])
    tests = {
        "first token": cell_test(at_once, stepwise, Counter(sample[0] for sample in samples)),
        "next tokens": _test_next_tokens(scorer, samples),
    }
    where = prefix.start.name, prefix.draft_length
    return [
        DistributionTest(
            "sampling", f"{what} / distribution", len(samples), outcome, *where, rounding
        )
        for what, (outcome, rounding) in tests.items()
        if outcome.df > 0
    ]


def _test_next_tokens(scorer: Scorer, samples: Sequence[TokenIds]) -> tuple[ChiSquare, float]:
    """Test the tokens after the first. A token's context is the part of its sample before it; the
    tokens of all contexts are counted together, by their rank in the distribution after their
    context. Testing only the most frequent contexts is no bias, because how often a context occurs
    does not depend on the tokens that follow it."""
    following: defaultdict[TokenIds, Counter[int]] = defaultdict(Counter)
    for sample in samples:
        for position in range(1, SAMPLE_TOKENS):
            following[sample[:position]][sample[position]] += 1
    contexts = sorted(following, key=lambda c: -following[c].total())[:_MAX_CONTEXTS]
    drawn: Counter[int] = Counter()
    expected = torch.zeros(2, len(_RANK_EDGES) + 1, dtype=torch.float64)  # in both batch shapes
    rows = zip(contexts, scorer.at_once(contexts), scorer.stepwise(contexts), strict=True)
    for context, *distributions in rows:
        ranks = distributions[0].argsort(descending=True, stable=True).argsort()
        bins = torch.bucketize(ranks, _RANK_EDGES)
        for token, count in following[context].items():
            drawn[int(bins[token])] += count
        weighted = torch.stack(distributions).double() * following[context].total()
        expected.index_add_(1, bins, weighted)
    at_once, stepwise = expected / drawn.total()
    return cell_test(at_once, stepwise, drawn)


_RESERVED = 0.1  # share of the budget that is kept for the tests at the end


def certify(
    llm: LLM,
    prompts: Sequence[tuple[str, Sequence[int]]],
    params: SamplingParams | None = None,
    *,
    effort: Effort | None = None,
    seconds: float | None = None,
) -> Certificate:
    """Compare an LLM's speculative decoding with plain decoding of the same target.

    ``llm`` must have a drafter. ``prompts``: (name, token ids). ``params``: the sampling parameters
    to certify, by default temperature 1; their seed, stop conditions and token limits are ignored.
    Greedy decoding is always tested, with their penalties and bias. ``seconds`` limits the time.
    Raises ConfigError for an engine without a drafter, and PromptError for prompts that are missing
    or do not fit."""
    certifier = Certifier(llm, prompts, params, effort, budget=Budget(seconds))
    certifier.run()
    return certifier.certificate()


class Certifier(TextCertifier):
    """One certification. ``certificate`` can be called at any time, also after Ctrl-C."""

    _ended = False

    @property
    def num_tasks(self) -> int:
        """How often ``run`` calls ``advance`` at most."""
        comparisons = len(self.kinds) * self.num_texts * (1 + len(self.settings))
        return comparisons + self.num_prefixes * (SAMPLE_BATCHES + 2)

    def run(self, advance: OnProgress = lambda description: None) -> None:
        """Test as much as the budget allows. Each round compares one more text under all settings
        and draws more samples at one prefix, until that has all. ``advance`` is called before each
        task. Ctrl-C is passed on."""
        self.budget.reserve = _RESERVED * (self.budget.seconds or 0.0)
        self.advance = advance
        self.llm.engine.verifier.reseed(self.effort.seed)
        self.choose_text_length()
        samples = self.effort.samples
        goals = [(0, -(-samples * tenths // 10)) for tenths in (3, 5, 10)]
        goals += [(number, samples) for number in range(1, self.num_prefixes)]
        rounds = zip_longest(range(self.num_texts), goals if self.num_prefixes else ())
        for text, goal in rounds:
            if text is not None:
                self.compare_text(text)
            if goal and (not goal[0] or self.prefix_fits()):
                self.sample(*goal)
        self._ended = True

    def sample(self, number: int, samples: int) -> None:
        """Draw up to ``samples`` samples at a prefix, then enumerate the rule on their drafts."""
        prefixes = self.evidence.prefixes
        if number >= len(prefixes):
            choose = partial(self._choose_prefix, number)
            self.do_task("sampling", "prefix", 1, "choosing a prefix", choose)
        if number >= len(prefixes):
            return  # there is no greedy text yet to choose one from
        prefix = prefixes[number]
        name, batch = prefix.start.name, -(-self.effort.samples // SAMPLE_BATCHES)
        while (missing := samples - len(prefix.drawn)) > 0:
            size = min(batch, missing)
            draw = partial(self._draw, prefix, size)
            if not self.do_task("sampling", "sample", size, f"{name}: sampling", draw):
                break
        if prefix.examples and not prefix.exact:
            enumerate_rule = partial(self._enumerate, prefix)
            self.do_task("rule", "rule", 1, f"{name}: enumerating the rule", enumerate_rule)

    def prefix_fits(self) -> bool:
        """Whether all samples of one more prefix can be drawn in time. If not, it is not begun: a
        test of few samples detects only large biases."""
        sample, rule = (self.budget.estimate(kind) or 0.0 for kind in ("sample", "rule"))
        return self.effort.samples * sample + rule < self.budget.left

    def _choose_prefix(self, number: int) -> None:
        """Choose a prefix: a beginning of greedy text ``number`` after which the target's entropy
        is high. It ends a few tokens after a full cache block, so that the thousands of samples
        that start there have little to prefill."""
        start, evidence = self.start(number, self.params), self.evidence
        output = evidence.plain.get(("greedy", number))
        if output is None:
            return
        size, given = self.llm.engine.cache.block_size, len(start.prompt)
        partial_blocks = {end: (given + end) % size for end in range(len(output) + 1)}
        cheap = [end for end, n in partial_blocks.items() if 0 < n <= _MAX_PARTIAL_BLOCK]
        outputs = [output[:end] for end in cheap or (len(output),)]
        probs = Scorer(self.llm.target, start).at_once(outputs)
        entropies = torch.special.entr(probs).sum(-1)
        chosen = outputs[int(entropies.argsort()[round(_ENTROPY_QUANTILE * (len(outputs) - 1))])]
        # Short drafts, whose bonus token is among the tokens tested, and long ones in turn.
        longest = self.lengths[-1]
        length = longest if number % 2 else min(2, longest)
        evidence.prefixes.append(Prefix(replace(start, output=chosen), length))

    def _draw(self, prefix: Prefix, size: int) -> None:
        """Draw ``size`` more samples of ``SAMPLE_TOKENS`` tokens, recording their drafts."""
        engine, start = self.llm.engine, prefix.start
        given = len(start.output)
        max_tokens = given + SAMPLE_TOKENS + prefix.draft_length + 1
        starts = [replace(start, params=replace(start.params, max_tokens=max_tokens))] * size
        engine.on_drafts = partial(self.evidence.draws.record, prefix.examples)
        try:
            texts = decode(engine, starts, prefix.draft_length, SAMPLE_TOKENS)
        finally:
            engine.on_drafts = None
        prefix.drawn += [tokens[given:] for tokens, _ in texts]
        prefix.drafted += sum(counts.drafted for _, counts in texts)

    def _enumerate(self, prefix: Prefix) -> None:
        """Enumerate a step with an example draft of each kind that was proposed for the samples."""
        llm, start = self.llm, prefix.start
        for tokens, tree in prefix.examples.values():
            context = replace(start, output=tokens[len(start.prompt) :])
            target, device = Scorer(llm.target, context).at_once, llm.target.device
            check = enumerate_step(llm.engine.verifier, tree, target, start.name, device)
            prefix.exact.append(check)
            if not check.passed:
                what = (
                    f"{start.name}: the distribution of a step differs from the target's by "
                    f"{check.distance:.2g} (total variation, enumerated)"
                )
                self.evidence.problems.append(Problem("rule", what))

    def certificate(self) -> Certificate:
        llm, evidence, amounts = self.llm, self.evidence, self.amounts()
        alpha = self.effort.alpha
        tests = with_holm_correction(self._tests(), alpha)
        problems = [*evidence.problems]
        if evidence.draws.impossible:
            what = f"it drafted {evidence.draws.impossible} tokens to which its declared"
            problems.append(Problem("drafter", f"{what} distribution gives probability 0"))
        problems += [test.problem() for test in tests if test.adjusted_p_value < alpha]
        undrafted = [prefix for prefix in evidence.prefixes if not prefix.examples]
        notes = [f"{p.start.name}: rule not enumerated: nothing was drafted" for p in undrafted]
        if self.params.greedy:
            notes.append("sampling was not tested: the temperature is 0")
        # The total variation distance that the tests would have detected at every prefix.
        scored = [test for test in tests if test.part == "sampling"]
        bias = max((test.smallest_bias for test in scored), default=1.0)
        draft = ", ".join(llm.drafters) or llm.engine.drafter.name
        return Certificate(
            title=f"Is {draft} on {llm.target.name} lossless?",
            alpha=alpha,
            facts={
                "target": llm.target.name,
                "draft": draft,
                "dtype": llm.target.dtype_text,
                "backend": llm.target.backend_reason,
                "complete": self._ended and self.complete,
                "smallest_bias": bias,
                "budget": amounts,
            },
            tables=tuple(evidence.tables(tests)),
            problems=tuple(dict.fromkeys(problems)),
            missing_evidence=tuple(self._lacks(tests, amounts["texts"], bias)),
            notes=tuple(notes),
            interrupted=not self._ended,
            completed=self._completed(bias if tests else None),
            certified=self._certified(tests, bias),
        )

    def _tests(self) -> list[DistributionTest]:
        tests: list[DistributionTest] = []
        for prefix in self.evidence.prefixes:
            if len(prefix.drawn) >= MIN_SAMPLES:
                tests += sampling_tests(self.llm.target, prefix)
        draws = self.evidence.draws
        if (outcome := draws.test()) is not None:
            about = "drafter", "draws / declared distribution", draws.total
            tests.append(DistributionTest(*about, outcome))
        return tests

    def _lacks(self, tests: Sequence[DistributionTest], texts: int, bias: float) -> list[str]:
        evidence, sampled = self.evidence, bool(self.num_prefixes)
        wanted = product(self.kinds, self.settings)
        missing = [
            f"no {pair[0]} text at {pair[1]}" for pair in wanted if pair not in evidence.checks
        ]
        # Without any drafts, speculative decoding was not tested at all.
        drafting = {check.kind for check in evidence.checks.values() if check.drafted}
        drafting |= {"sampled" for prefix in evidence.prefixes if prefix.drafted}
        idle = [k for k in (*self.kinds, *["sampled"] * sampled) if k not in drafting]
        proposed = "the drafter proposed nothing for {} requests; try other prompts (--prompts)"
        lacks = missing[:1] or [proposed.format(kind) for kind in idle]
        lacks += missing_evidence(texts, bias if tests else 0.0)
        if sampled and not tests:
            lacks.append("no prefix has enough samples for a test; draw more, or at other prompts")
        sampled_prefixes = sum(len(p.drawn) >= self.effort.samples for p in evidence.prefixes)
        if sampled and sampled_prefixes < MIN_PREFIXES:
            lacks.append(f"{sampled_prefixes} prefixes have all their samples, not {MIN_PREFIXES}")
        if sampled and not evidence.exact:
            lacks.append("the rule was not enumerated")
        return lacks

    def _completed(self, bias: float | None) -> str:
        """What was completed, in a line. ``bias``: the smallest detectable; None without tests."""
        line = "{spent:.0f} s completed {texts} of {texts_wanted} texts of {tokens} tokens"
        if self.num_prefixes:
            line += ", {prefixes} of {prefixes_wanted} prefixes"
            line += ", {samples} of {samples_wanted} samples"
        if not self.complete:
            line += "; more --seconds test the rest"
        if bias is not None:
            line += f"; the smallest bias that it could have detected is {bias:.1%}"
        return line.format(**self.amounts())

    def _certified(self, tests: Sequence[DistributionTest], bias: float) -> str:
        checks, target = self.evidence.checks.values(), self.llm.target
        ties = sum(len(check.ties) for check in checks)
        how = "bit for bit" if target.backend.batch_invariant else f"except for {ties} near ties"
        tokens = sum(check.tokens for check in checks)
        parts = [f"{tokens} tokens equal to plain decoding's {how} on {target.backend_reason}"]
        if tests:
            detected = f"which detect {bias:.1%} or more"
            parts.append(f"no bias in {len(tests)} distribution tests, {detected}")
        if not self.num_prefixes:
            parts.append("greedy decoding only, no samples were drawn")
        if self.evidence.exact:
            distance = max(check.distance for check in self.evidence.exact)
            parts.append(f"the rule is exact to {distance:.0e}")
        return "; ".join(parts)
