"""Certifies one LLM: texts, distributions and the rule itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product, zip_longest
from typing import Any

from paceline.control.controller import FixedLength
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError, PromptError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import (
    LEAST_PREFIXES,
    Certificate,
    DistributionTest,
    Problem,
    as_family,
    too_little,
)
from paceline.lab.certify.distributions import judge
from paceline.lab.certify.draws import Recorder
from paceline.lab.certify.effort import FEWEST, Effort
from paceline.lab.certify.evidence import Evidence, OnProgress, Subject
from paceline.lab.certify.samples import PORTIONS, sample, samples_fit
from paceline.lab.certify.texts import compare_texts, compared, decide_tokens
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
    temperature 1; greedy decoding is tested in any case, with their penalties and bias. Their
    seed, stop conditions and token limits are not used: ``effort`` says how much is decoded.
    ``advance(what comes next)`` is called before each piece of work. After ``seconds`` it ends with
    what it has seen; a certificate says if that was not enough.

    Raises ConfigError for an engine without a drafter or with a lossy rule, PromptError, and what
    LLM raises.
    """
    llm = LLM(model, draft, max_batch_size=32) if isinstance(model, str) else model
    certifier = Certifier(llm, prompts, params, effort, budget=Budget(seconds))
    certifier.run(advance)
    return certifier.certificate()


class Certifier:
    """One certification; ``certificate`` may be asked for at any time, also after Ctrl-C.

    ``evidence`` is what an earlier one with the same model, drafter, prompts, parameters and
    effort has seen; it is added to. Where that had all it wanted, as much again is wanted now.
    Prompts beyond the effort's number of texts are for that.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[tuple[str, Sequence[int]]],
        params: SamplingParams | None = None,
        effort: Effort | None = None,
        *,
        budget: Budget | None = None,
        evidence: Evidence | None = None,
    ) -> None:
        self.effort, self.budget = effort or Effort(), budget or Budget()
        self.evidence = evidence or Evidence()
        lengths, adapts = _lengths_of(llm)
        checked = _checked(llm, prompts, self.effort)
        # No larger a cache: by default it would be a share of the memory that is left.
        layers = map(llm.engine.cache.kv, range(llm.target.num_layers))
        plain = llm.beside(
            max_batch_size=llm.engine.scheduler.config.max_batch_size,
            seed=self.effort.seed + 1,
            kv_cache_memory=sum(tensor.nbytes for pair in layers for tensor in pair),
        )
        unused: dict[str, Any] = {"stop": (), "stop_token_ids": (), "min_tokens": 0}
        asked = params or SamplingParams(temperature=1.0)
        self.subject = Subject(
            llm=llm,
            plain=plain.engine,
            prompts=checked,
            params=replace(asked, seed=None, n=1, logprobs=None, **unused),
            lengths=lengths,
            adapts=adapts,
            effort=self.effort,
            budget=self.budget,
            evidence=self.evidence,
            recorder=Recorder(llm.engine.drafter, self.evidence.draws, self.effort.seed),
        )
        self._ended = False
        self._before = self.evidence.spent
        if evidence is not None and _complete(self._amounts()):
            self.evidence.tranche += 1

    # -- how much -----------------------------------------------------------------------------

    @property
    def texts(self) -> int:
        """Texts wanted by now. Prompts are not repeated within one run."""
        return self.evidence.tranche * min(self.effort.texts, len(self.subject.prompts))

    @property
    def prefixes(self) -> int:
        """Prefixes wanted; none if only greedy decoding is tested."""
        most = min(self.effort.prefixes, self.effort.texts, len(self.subject.prompts))
        return 0 if self.subject.params.greedy else most

    @property
    def samples(self) -> int:
        """Samples wanted at each of them by now."""
        return self.evidence.tranche * self.effort.samples

    @property
    def pieces(self) -> int:
        """How often ``run`` calls ``advance`` at most."""
        of_text, batches = 1 + len(self.subject.alone), len(_groups(self.texts))
        comparing = len(self.subject.kinds) * (self.texts * of_text + batches)
        return comparing + self.prefixes * (2 * PORTIONS * self.evidence.tranche + 2)

    def _amounts(self) -> dict[str, Any]:
        """What the time was spent on, of how much that is wanted: JSON's "budget"."""
        evidence, drawn = self.evidence, [len(prefix.drawn) for prefix in self.evidence.prefixes]
        evidence.spent = self._before + self.budget.spent
        return {
            "seconds": self.budget.seconds,
            "spent": evidence.spent,
            "tokens": evidence.tokens or self.effort.max_tokens,
            "texts": compared(self.subject, range(self.texts)),
            "texts_wanted": self.texts,
            "prefixes": sum(count >= self.samples for count in drawn),
            "prefixes_wanted": self.prefixes,
            "samples": sum(min(count, self.samples) for count in drawn),
            "samples_wanted": self.prefixes * self.samples,
            "verdicts": evidence.verdicts + 1,
        }

    # -- testing ------------------------------------------------------------------------------

    def run(self, advance: OnProgress = lambda what: None) -> None:
        """Test as much as the budget allows, in an order of which any beginning has seen a little
        of everything.

        Round by round a few more texts are compared, each under all settings, and more is drawn at
        one prefix until that has all its samples; only then comes the next prefix.
        KeyboardInterrupt passes through.
        """
        self.budget.reserve = _ENDING * (self.budget.seconds or 0.0)
        self.subject.advance = advance
        with self.subject.guarded("greedy"):
            decide_tokens(self.subject)
        portions = [(0, -(-self.samples * tenths // 10)) for tenths in (3, 5, 10)]
        portions += [(number, self.samples) for number in range(1, self.prefixes)]
        rounds = zip_longest(_groups(self.texts), portions if self.prefixes else ())
        for numbers, portion in rounds:
            compare_texts(self.subject, numbers or ())
            if portion and (not portion[0] or samples_fit(self.subject, *portion)):
                sample(self.subject, *portion)
        self._ended = True

    # -- judging ------------------------------------------------------------------------------

    def certificate(self) -> Certificate:
        """The verdict on the evidence so far."""
        llm, evidence, amounts = self.subject.llm, self.evidence, self._amounts()
        # However often somebody goes on, a lossless engine fails with 2 alpha at most.
        alpha = self.effort.alpha / 2**evidence.verdicts
        tests = as_family(self._tests(), alpha)
        problems = [*evidence.problems]
        if evidence.draws.impossible:
            what = f"{evidence.draws.impossible} tokens were drawn that its declared distribution"
            problems.append(Problem("drafter", f"{what} rules out"))
        problems += [test.problem() for test in tests if test.adjusted_p_value < alpha]
        notes = [*evidence.notes]
        if self.subject.params.greedy:
            notes.append("sampling was not tested: the temperature is 0")
        draft, bias = ", ".join(llm.drafters) or llm.engine.drafter.name, _smallest_bias(tests)
        return Certificate(
            title=f"Is {draft} on {llm.target.name} lossless?",
            alpha=alpha,
            facts={
                "target": llm.target.name,
                "draft": draft,
                "dtype": llm.target.numbers,
                "backend": llm.target.backend_reason,
                "complete": self._ended and _complete(amounts),
                "smallest_bias": bias,
                "budget": amounts,
            },
            tables=tuple(evidence.tables(tests)),
            problems=tuple(dict.fromkeys(problems)),
            lacks=tuple(self._lacks(tests, amounts["texts"])),
            notes=tuple(dict.fromkeys(notes)),
            interrupted=not self._ended,
            completed=_completed(amounts, f"{bias:.1%}" if tests else ""),
            certified=self._certified(tests, bias),
        )

    def _tests(self) -> list[DistributionTest]:
        """Of all prefixes that have enough samples, and of the drafter's draws."""
        tests: list[DistributionTest] = []
        for prefix in self.evidence.prefixes:
            if min(len(prefix.drawn), len(prefix.plain)) >= FEWEST:
                with self.subject.guarded("sampling"):
                    tests += judge(self.subject.llm.target, prefix)
        draws = self.evidence.draws
        if (outcome := draws.test()) is not None:
            about = "drafter", "draws / declared distribution", draws.total
            tests.append(DistributionTest(*about, outcome))
        return tests

    def _lacks(self, tests: Sequence[DistributionTest], texts: int) -> list[str]:
        """What the evidence must have, or it says too little to certify anything."""
        evidence, sampled = self.evidence, bool(self.prefixes)
        seen = {(check.kind, check.setting) for check in evidence.checks}
        wanted = product(self.subject.kinds, [*self.subject.alone, self.subject.mixed])
        unseen = [f"no {kind} text at {name}" for kind, name in wanted if (kind, name) not in seen]
        drafting = {check.kind for check in evidence.checks if check.drafted}
        drafting |= {"sampled" for prefix in evidence.prefixes if prefix.drafted}
        kinds = [*self.subject.kinds, *(["sampled"] if sampled else [])]
        # A test of nothing must not pass.
        proposed = "the drafter proposed nothing for {} requests; try other prompts (--prompts)"
        idle = [proposed.format(kind) for kind in kinds if kind not in drafting]
        lacks = unseen[:1] or idle
        lacks += too_little(texts, _smallest_bias(tests) if tests else 0.0)
        if not sampled:
            return lacks
        if not tests:
            lacks.append("no prefix has enough samples for a test; draw more, or at other prompts")
        whole = sum(len(prefix.drawn) >= self.effort.samples for prefix in evidence.prefixes)
        if whole < LEAST_PREFIXES:
            lacks.append(f"{whole} prefixes have all their samples, not {LEAST_PREFIXES}")
        if not evidence.exact:
            lacks.append("the rule was not enumerated")
        return lacks

    def _certified(self, tests: Sequence[DistributionTest], bias: float) -> str:
        """What the word stands for."""
        checks, target = self.evidence.checks, self.subject.llm.target
        ties = sum(len(check.ties) for check in checks)
        how = "bit for bit" if target.backend.same_bits else f"but for {ties} near ties"
        tokens = sum(check.tokens for check in checks)
        parts = [f"{tokens} tokens equal to plain decoding's {how} on {target.backend_reason}"]
        if tests:
            parts.append(
                f"no bias in {len(tests)} distribution tests, which see {bias:.1%} or more"
            )
        if not self.prefixes:
            parts.append("greedy decoding only, no samples were drawn")
        if self.evidence.exact:
            distance = max(check.distance for check in self.evidence.exact)
            parts.append(f"the rule is exact to {distance:.0e}")
        return "; ".join(parts)


def _complete(amounts: dict[str, Any]) -> bool:
    return all(amounts[what] >= amounts[f"{what}_wanted"] for what in ("texts", "prefixes"))


def _completed(amounts: dict[str, Any], bias: str) -> str:
    """What the time was spent on, for people; ``bias``: the smallest, if any could be seen."""
    line = "{spent:.0f} s completed {texts} of {texts_wanted} texts of {tokens} tokens"
    if amounts["prefixes_wanted"]:
        line += ", {prefixes} of {prefixes_wanted} prefixes, {samples} of {samples_wanted} samples"
    if not _complete(amounts):
        line += "; --continue goes on"
    if bias:
        line += f"; the smallest bias that it could have seen is {bias}"
    return line.format(**amounts)


def _smallest_bias(tests: Sequence[DistributionTest]) -> float:
    """Total variation from the target's distribution that would have shown at every prefix."""
    tested = [test for test in tests if test.draft_length and "distribution" in test.what]
    return max((test.smallest_bias for test in tested), default=1.0)


def _groups(texts: int) -> list[range]:
    """1, 1, 2, 4, 8 ... texts, so that the first verdict comes soon."""
    ends = [0]
    while ends[-1] < texts:
        ends.append(min(texts, max(1, 2 * ends[-1])))
    return [range(*pair) for pair in pairwise(ends)]


def _lengths_of(llm: LLM) -> tuple[tuple[int, ...], bool]:
    """Fixed draft lengths to test, and whether the engine has a controller that adapts."""
    engine = llm.engine
    if engine.verifier.lossy:
        raise ConfigError(
            "this engine accepts by typical acceptance (lossy), which is not lossless by design: "
            "there is nothing to certify; leave lossy out"
        )
    if not engine.drafter.max_nodes(1):
        raise ConfigError("there is no drafter to certify; give one with draft (--draft)")
    if not isinstance(engine.controller, FixedLength):
        return (1, 4), True
    length = engine.controller.length
    if not length:
        raise ConfigError("draft length 0 drafts nothing, so there is nothing to certify")
    return tuple(sorted({1, length})), False


def _checked(
    llm: LLM, prompts: Sequence[tuple[str, Sequence[int]]], effort: Effort
) -> list[tuple[str, tuple[int, ...]]]:
    """Those that fit; of the first ones, which are wanted at once, all must."""
    if not prompts:
        raise PromptError("no prompt was given")
    limit, checked = llm.max_model_len, list[tuple[str, tuple[int, ...]]]()
    for number, (name, prompt) in enumerate(prompts):
        if 0 < len(prompt) <= limit - effort.max_tokens - 16:
            checked.append((name, tuple(prompt)))
        elif number < effort.texts and not prompt:
            raise PromptError(f"prompt {name} is empty; give at least one token of text")
        elif number < effort.texts:
            raise PromptError(
                f"prompt {name} has {len(prompt)} tokens, but {llm.target.name} sees {limit} with "
                f"the {effort.max_tokens} that are decoded; shorten it or lower max_tokens"
            )
    return checked
