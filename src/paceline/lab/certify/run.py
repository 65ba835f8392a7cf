"""Certifies one LLM: texts, distributions and the rule itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product, zip_longest

from paceline.core.params import SamplingParams
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import (
    LEAST_PREFIXES,
    Certificate,
    DistributionTest,
    Problem,
    as_family,
    too_little,
)
from paceline.lab.certify.effort import FEWEST, Effort
from paceline.lab.certify.experiments import (
    PORTIONS,
    compare_texts,
    decide_tokens,
    judge,
    sample,
    samples_fit,
)
from paceline.lab.certify.subject import OnProgress, Subject
from paceline.llm import LLM

_ENDING = 0.1  # of the budget, kept for the tests at the end


def certify(
    model: LLM | str,
    prompts: Sequence[tuple[str, Sequence[int]]],
    params: SamplingParams | None = None,
    *,
    draft: str | None = "auto",
    effort: Effort | None = None,
    advance: OnProgress = lambda what: None,
    seconds: float | None = None,
) -> Certificate:
    """Compare an LLM's speculative decoding with plain decoding of the same target.

    ``model``: an LLM with a drafter, or the name of a target, with ``draft`` as for LLM.
    ``prompts``: (name, token ids). ``params``: sampling parameters to certify, by default
    temperature 1, but for seed, stop conditions and token limits; greedy decoding is tested in any
    case, with their penalties and bias. ``advance(what comes next)`` is called before each piece of
    work. After ``seconds`` it ends.

    Raises ConfigError for an engine without a drafter or with a lossy rule, PromptError, and what
    LLM raises.
    """
    llm = LLM(model, draft, max_batch_size=32) if isinstance(model, str) else model
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
        return comparing + self.prefixes * (2 * PORTIONS * self.evidence.tranche + 2)

    def run(self, advance: OnProgress = lambda what: None) -> None:
        """Test as much as the budget allows: round by round a few more texts under all settings,
        and more samples at one prefix until that has all. KeyboardInterrupt passes through."""
        self.budget.reserve = _ENDING * (self.budget.seconds or 0.0)
        self.advance = advance
        with self.guarded("greedy"):
            decide_tokens(self)
        portions = [(0, -(-self.samples * tenths // 10)) for tenths in (3, 5, 10)]
        portions += [(number, self.samples) for number in range(1, self.prefixes)]
        rounds = zip_longest(_groups(self.texts), portions if self.prefixes else ())
        for numbers, portion in rounds:
            compare_texts(self, numbers or ())
            if portion and (not portion[0] or samples_fit(self, *portion)):
                sample(self, *portion)
        self._ended = True

    def certificate(self) -> Certificate:
        """The verdict on the evidence so far."""
        llm, evidence, amounts = self.llm, self.evidence, self.amounts()
        # However often somebody goes on, a lossless engine fails with 2 alpha at most.
        alpha = self.effort.alpha / 2**evidence.verdicts
        tests = as_family(self._tests(), alpha)
        problems = [*evidence.problems]
        if evidence.draws.impossible:
            what = f"{evidence.draws.impossible} tokens were drawn that its declared distribution"
            problems.append(Problem("drafter", f"{what} rules out"))
        problems += [test.problem() for test in tests if test.adjusted_p_value < alpha]
        notes = [*evidence.notes]
        if self.params.greedy:
            notes.append("sampling was not tested: the temperature is 0")
        # Total variation from the target's distribution that would have shown at every prefix.
        scored = [test for test in tests if test.draft_length and "distribution" in test.what]
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
            if min(len(prefix.drawn), len(prefix.plain)) >= FEWEST:
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
            line += "; --continue goes on"
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
