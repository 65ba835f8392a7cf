"""Certifies one LLM: texts, distributions and the rule itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, zip_longest

from paceline.control.controller import FixedLength
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import (
    LEAST_PREFIXES,
    LEAST_TEXTS,
    MOST_BIAS,
    DistributionTest,
    Problem,
    as_family,
)
from paceline.lab.certify.distributions import judge
from paceline.lab.certify.effort import FEWEST, Effort
from paceline.lab.certify.engine_certificate import (
    CertifySpending,
    EngineCertificate,
    smallest_bias,
)
from paceline.lab.certify.evidence import Evidence, Subject, WorkItem
from paceline.lab.certify.samples import PORTIONS, Sampler
from paceline.lab.certify.texts import TextComparer
from paceline.llm import LLM

OnProgress = Callable[[str], None]
_ENDING = 0.1  # of the budget, kept for the tests at the end


def certify(
    model: LLM | str,
    prompts: Sequence[tuple[str, Sequence[int]]],
    params: SamplingParams | None = None,
    *,
    draft: str | None = "auto",
    effort: Effort | None = None,
    advance: OnProgress = lambda description: None,
    seconds: float | None = None,
) -> EngineCertificate:
    """Compare an LLM's speculative decoding with plain decoding of the same target.

    ``model``: an LLM with a drafter, or the name of a target, with ``draft`` as for LLM.
    ``prompts``: (name, token ids). ``params``: sampling parameters to certify, by default
    temperature 1; greedy decoding is looked at in any case, with their penalties and bias. Their
    seed, stop conditions and token limits are not used: ``effort`` says how much is decoded.
    ``advance(what comes next)`` is called before each piece of work. After ``seconds`` it ends with
    what it has seen; a certificate says if that was not enough.

    Raises ConfigError for an engine without a drafter or with a lossy rule, PromptError, and what
    LLM raises.
    """
    budget = Budget(seconds)
    llm = LLM(model, draft, max_batch_size=32) if isinstance(model, str) else model
    certifier = Certifier(llm, prompts, params, effort or Effort(), budget=budget)
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
        self.llm, self.effort, self.budget = llm, effort or Effort(), budget or Budget()
        self.evidence = evidence or Evidence()
        asked = params or SamplingParams(temperature=1.0)
        self.params = replace(
            asked, seed=None, n=1, stop=(), stop_token_ids=(), min_tokens=0, logprobs=None
        )
        lengths, adapts = _lengths_of(llm)
        checked = _checked(llm, prompts, self.effort)
        batch = llm.engine.scheduler.config.max_batch_size
        # No larger a cache: by default it would be a share of the memory that is left.
        parts = map(llm.engine.cache.kv, range(llm.target.num_layers))
        memory = sum(part.nbytes for pair in parts for part in pair)
        seed = self.effort.seed + 1
        self.subject = Subject(
            engine=llm.engine,
            plain=llm.beside(max_batch_size=batch, seed=seed, kv_cache_memory=memory).engine,
            prompts=checked,
            params=self.params,
            lengths=lengths,
            adapts=adapts,
            effort=self.effort,
            budget=self.budget,
            evidence=self.evidence,
            spell=lambda token: str(llm.tokenizer.decode([token])),
        )
        self.comparer = TextComparer(self.subject)
        self._sampler = Sampler(self.subject)
        self._ended = False
        self._broken: set[str] = set()
        self._before = self.evidence.spent
        if evidence is not None and not self._spending().missing:
            self.evidence.tranche += 1

    # -- how much -----------------------------------------------------------------------------

    @property
    def texts(self) -> int:
        """Texts wanted by now. Prompts are not repeated within one run."""
        return self.evidence.tranche * min(self.effort.texts, len(self.subject.prompts))

    @property
    def prefixes(self) -> int:
        """Places wanted; none if only greedy decoding is looked at."""
        most = min(self.effort.prefixes, self.effort.texts, len(self.subject.prompts))
        return 0 if self.params.greedy else most

    @property
    def samples(self) -> int:
        """Samples wanted at each of them by now."""
        return self.evidence.tranche * self.effort.samples

    @property
    def pieces(self) -> int:
        """How often ``run`` calls ``advance`` at most."""
        of_text, batches = 1 + len(self.comparer.alone), len(_groups(self.texts))
        comparing = len(self.subject.kinds) * (self.texts * of_text + batches)
        return comparing + self.prefixes * (2 * PORTIONS * self.evidence.tranche + 2)

    # -- looking ------------------------------------------------------------------------------

    def run(self, advance: OnProgress = lambda description: None) -> None:
        """Look at as much as the budget allows. KeyboardInterrupt passes through."""
        self.budget.reserve = _ENDING * (self.budget.seconds or 0.0)
        with self._guarded("greedy"):
            self.comparer.decide_tokens()
        for item in self._items():
            self._do(item, advance)
        self._ended = True

    def _items(self) -> Iterator[WorkItem]:
        """In an order of which any beginning has seen a little of everything.

        Round by round a few more texts are compared, each under all settings, and more is drawn at
        one prefix until that has all its samples; only then comes the next prefix.
        """
        portions = [(0, -(-self.samples * tenths // 10)) for tenths in (3, 5, 10)]
        portions += [(number, self.samples) for number in range(1, self.prefixes)]
        rounds = zip_longest(_groups(self.texts), portions if self.prefixes else ())
        for numbers, portion in rounds:
            yield from self.comparer.items(numbers or ())
            if portion is not None and (not portion[0] or self._sampler.fits(*portion)):
                yield from self._sampler.items(*portion)

    def _do(self, item: WorkItem, advance: OnProgress) -> None:
        done = self.evidence.done
        fits = self.budget.fits(item.kind, item.size)
        if item.name in done or item.part in self._broken or not fits:
            return
        advance(item.shown)
        with self._guarded(item.part), self.budget.piece(item.kind, item.size):
            item.run()
            if item.name:
                done.append(item.name)

    @contextmanager
    def _guarded(self, part: str) -> Iterator[None]:
        """A crash is a finding, and the other parts still run."""
        try:
            yield
        except PacelineError:
            raise
        except Exception as error:
            what = f"decoding failed with {type(error).__name__}: {error}"
            self.evidence.problems.append(Problem(part, " ".join(what.split())))
            self._broken.add(part)

    # -- judging ------------------------------------------------------------------------------

    def certificate(self) -> EngineCertificate:
        """The verdict on the evidence so far."""
        llm, evidence, recorder = self.llm, self.evidence, self._sampler.recorder
        tests, honesty = self._tests(), recorder.honesty()
        if honesty is not None:
            what = "draws / declared distribution"
            tests.append(DistributionTest("drafter", what, recorder.drawn, honesty))
        # However often somebody looks and goes on, a lossless engine fails with 2 alpha at most.
        alpha = self.effort.alpha / 2**evidence.looks
        family = as_family(tests, alpha)
        problems = [*evidence.problems]
        if recorder.impossible:
            what = f"{recorder.impossible} tokens were drawn that its declared distribution"
            problems.append(Problem("drafter", f"{what} rules out"))
        problems += [test.problem() for test in family if test.adjusted_p_value < alpha]
        greedy = ["sampling was not looked at: the temperature is 0"] if self.params.greedy else []
        spending = self._spending()
        draft = ", ".join(llm.drafters) or llm.engine.drafter.name
        bias = smallest_bias(family)
        seen = f"; the smallest bias that it could have seen is {bias:.1%}" if family else ""
        return EngineCertificate(
            title=f"Is {draft} on {llm.target.name} lossless?",
            target=llm.target.name,
            draft=draft,
            dtype=llm.target.numbers,
            backend=llm.target.backend_reason,
            alpha=alpha,
            texts=tuple(evidence.checks),
            tests=family,
            exact=tuple(evidence.exact),
            problems=tuple(dict.fromkeys(problems)),
            lacks=tuple(self._lacks(family)),
            notes=tuple(dict.fromkeys([*evidence.notes, *greedy])),
            interrupted=not self._ended,
            spending=spending,
            completed=f"{spending.line}{seen}",
            certified=self._certified(family, bias),
        )

    def _tests(self) -> list[DistributionTest]:
        """Of all prefixes that have enough samples."""
        tests: list[DistributionTest] = []
        for prefix in self.evidence.prefixes:
            if min(len(prefix.drawn), len(prefix.plain)) >= FEWEST:
                with self._guarded("sampling"):
                    tests += judge(self.llm.target, prefix, self.params)
        return tests

    def _spending(self) -> CertifySpending:
        evidence, drawn = self.evidence, [len(prefix.drawn) for prefix in self.evidence.prefixes]
        evidence.spent = self._before + self.budget.spent
        return CertifySpending(
            seconds=self.budget.seconds,
            spent=evidence.spent,
            tokens=evidence.tokens or self.effort.max_tokens,
            texts=self.comparer.compared(range(self.texts)),
            texts_wanted=self.texts,
            prefixes=sum(count >= self.samples for count in drawn),
            prefixes_wanted=self.prefixes,
            samples=sum(min(count, self.samples) for count in drawn),
            samples_wanted=self.prefixes * self.samples,
            looks=evidence.looks + 1,
        )

    def _lacks(self, tests: Sequence[DistributionTest]) -> list[str]:
        """What the evidence must have, or it says too little to certify anything."""
        evidence, sampled = self.evidence, bool(self.prefixes)
        seen = {(check.kind, check.setting) for check in evidence.checks}
        settings = [setting.name for setting in (*self.comparer.alone, self.comparer.mixed)]
        wanted = [(kind, name) for kind in self.subject.kinds for name in settings]
        unseen = [f"no {kind} text at {name}" for kind, name in wanted if (kind, name) not in seen]
        drafted = Counter[str]()
        for check in evidence.checks:
            drafted[check.kind] += check.drafted
        drafted["sampled"] = sum(prefix.drafted for prefix in evidence.prefixes)
        kinds = [*self.subject.kinds, "sampled"] if sampled else self.subject.kinds
        # A test of nothing must not pass.
        proposed = "the drafter proposed nothing for {} requests; try other prompts (--prompts)"
        idle = [proposed.format(kind) for kind in kinds if not drafted[kind]]
        compared, bias = self.comparer.compared(range(self.texts)), smallest_bias(tests)
        drawn = [len(prefix.drawn) for prefix in evidence.prefixes]
        whole = sum(count >= self.effort.samples for count in drawn)
        lacking = (
            (compared < LEAST_TEXTS, f"{compared} whole texts were compared, not {LEAST_TEXTS}"),
            (sampled and not tests, "no prefix has enough samples"),
            (
                sampled and tests and bias > MOST_BIAS,
                f"only a bias of {bias:.0%} or more would have been seen",
            ),
            (
                sampled and whole < LEAST_PREFIXES,
                f"{whole} prefixes have all their samples, not {LEAST_PREFIXES}",
            ),
            (sampled and not evidence.exact, "the rule was not enumerated"),
        )
        return [*(unseen[:1] or idle), *(what for lacks, what in lacking if lacks)]

    def _certified(self, tests: Sequence[DistributionTest], bias: float) -> str:
        """What the word stands for."""
        checks, target = self.evidence.checks, self.llm.target
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


def _groups(texts: int) -> list[range]:
    """1, 1, 2, 4, 8 ... texts, so that the first verdict comes soon."""
    ends = [0]
    while ends[-1] < texts:
        ends.append(min(texts, max(1, 2 * ends[-1])))
    return [range(*pair) for pair in pairwise(ends)]


def _lengths_of(llm: LLM) -> tuple[tuple[int, ...], bool]:
    """Fixed draft lengths to look at, and whether the engine has a controller that adapts."""
    engine = llm.engine
    if engine.verifier.lossy:
        raise ConfigError(
            "this engine accepts by typical acceptance (lossy), which is not lossless by design: "
            "there is nothing to certify; leave lossy out"
        )
    if not engine.drafter.max_nodes(1):
        raise ConfigError("there is no drafter to certify; give one with draft (--draft)")
    controller = engine.controller
    if not isinstance(controller, FixedLength):
        return (1, 4), True
    length = controller.length
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
        fits = 0 < len(prompt) <= limit - effort.max_tokens - 16
        if fits:
            checked.append((name, tuple(prompt)))
        elif number < effort.texts and not prompt:
            raise PromptError(f"prompt {name} is empty; give at least one token of text")
        elif number < effort.texts:
            raise PromptError(
                f"prompt {name} has {len(prompt)} tokens, but {llm.target.name} sees {limit} with "
                f"the {effort.max_tokens} that are decoded; shorten it or lower max_tokens"
            )
    return checked
