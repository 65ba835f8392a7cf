"""Certifies one LLM: texts, distributions and the rule itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import product

from paceline.control.controller import FixedLength
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import (
    LEAST_PREFIXES,
    LEAST_TEXTS,
    MOST_BIAS,
    Certificate,
    CertifySpending,
    DistributionResult,
    smallest_bias,
)
from paceline.lab.certify.drawing import Sampler
from paceline.lab.certify.evidence import Evidence, Problem
from paceline.lab.certify.sampled import PORTIONS, DistributionTest, Judged, judge
from paceline.lab.certify.schedule import (
    FEWEST,
    Asked,
    Draws,
    Effort,
    Texts,
    WorkItem,
    groups,
    schedule,
)
from paceline.lab.certify.texts import Comparer, settings_of
from paceline.llm import LLM
from paceline.model.defaults import DEFAULT_DRAFT

OnProgress = Callable[[str], None]
NamedTokens = tuple[str, Sequence[int]]
_ANY_REQUEST = SamplingParams()
_ENDING = 0.05  # of the budget, kept for the tests at the end until it is known what they take
_JUDGING = "judging a prefix"


def certify(
    model: LLM | str,
    prompts: Sequence[NamedTokens],
    params: SamplingParams | None = None,
    *,
    draft: str | None = DEFAULT_DRAFT,
    effort: Effort | None = None,
    advance: OnProgress = lambda description: None,
    seconds: float | None = None,
) -> Certificate:
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
        prompts: Sequence[NamedTokens],
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
        self.settings = settings_of(lengths, adapts)
        self._prompts = _checked(llm, prompts, self.effort)
        batch = llm.engine.scheduler.config.max_batch_size
        # No larger a cache: by default it would be a share of the memory that is left.
        parts = map(llm.engine.cache.kv, range(llm.target.num_layers))
        memory = sum(part.nbytes for pair in parts for part in pair)
        seed = self.effort.seed + 1
        plain = llm.beside(max_batch_size=batch, seed=seed, kv_cache_memory=memory).engine
        asked_of = llm.engine, plain, self._prompts, self.params, lengths
        self._asked = Asked(*asked_of, self.effort, self.budget, self.evidence)
        self._comparer = Comparer(self._asked, self.settings, self._spell)
        self._sampler = Sampler(self._asked)
        self._judged: dict[tuple[int, int, int], Judged] = {}
        self._ended = False
        self._broken: set[str] = set()
        if not self._missing():
            self.evidence.tranche += evidence is not None
        self._before = self.evidence.spent

    # -- how much -----------------------------------------------------------------------------

    @property
    def texts(self) -> int:
        """Texts wanted by now. Prompts are not repeated within one run."""
        return self.evidence.tranche * min(self.effort.texts, len(self._prompts))

    @property
    def prefixes(self) -> int:
        """Places wanted; none if only greedy decoding is looked at."""
        most = min(self.effort.prefixes, self.effort.texts, len(self._prompts))
        return 0 if self.params.greedy else most

    @property
    def samples(self) -> int:
        """Samples wanted at each of them by now."""
        return self.evidence.tranche * self.effort.samples

    @property
    def pieces(self) -> int:
        """How often ``run`` calls ``advance`` at most."""
        comparing = sum(len([*self._comparer.pieces(n)]) for n in groups(self.texts))
        return comparing + self.prefixes * (2 * PORTIONS * self.evidence.tranche + 2)

    def _missing(self) -> list[str]:
        """What of the wanted is not there, in words."""
        full = sum(len(prefix.drawn) >= self.samples for prefix in self.evidence.prefixes)
        counts = (self.texts, self._compared, "texts"), (self.prefixes, full, "prefixes")
        return [f"{most - had} of {most} {what}" for most, had, what in counts if had < most]

    @property
    def _compared(self) -> int:
        """Texts that were compared under every setting."""
        done = set(self.evidence.done)
        return sum(
            all(piece.name in done for piece in self._comparer.pieces([n]) if piece.kind == "text")
            for n in range(self.texts)
        )

    # -- looking ------------------------------------------------------------------------------

    def run(self, advance: OnProgress = lambda description: None) -> None:
        """Look at as much as the budget allows. KeyboardInterrupt passes through."""
        budget = self.budget
        budget.reserve = 0.0 if budget.seconds is None else _ENDING * budget.seconds
        with self._guarded("plain decoding"):
            self._comparer.decide_tokens()
        for task in schedule(self.texts, self.prefixes, self.samples):
            if isinstance(task, Texts):
                watched: AbstractContextManager[None] = nullcontext()
                pieces = self._comparer.pieces(task.numbers)
            elif not task.whole or self._whole_fits(task):
                watched = self._sampler.recording()
                pieces = self._sampler.pieces(task.prefix, task.samples)
            else:
                continue
            with watched:
                for piece in pieces:
                    self._do(piece, advance)
            if isinstance(task, Draws):
                self._judge_in_time()
        self._ended = True

    def _do(self, piece: WorkItem, advance: OnProgress) -> None:
        done = self.evidence.done
        if piece.name in done or piece.part in self._broken:
            return
        ready = all(name in self.evidence.plain for name in piece.needs)
        if not (ready and self.budget.fits(piece.kind, piece.size)):
            return
        advance(piece.shown)
        with self._guarded(piece.part), self.budget.piece(piece.kind, piece.size):
            piece.run()
            if piece.name:
                done.append(piece.name)

    def _whole_fits(self, task: Draws) -> bool:
        """A prefix with few samples would only be a weak spot: all of them, or none."""
        prefixes = self.evidence.prefixes
        have = len(prefixes[task.prefix].drawn) if task.prefix < len(prefixes) else 0
        missing = task.samples - have
        kinds = {"plain": missing, "speculative": missing, "rule": 1, _JUDGING: 1}
        wanted = sum((self.budget.estimate(kind) or 0.0) * n for kind, n in kinds.items())
        return wanted < self.budget.left

    def _judge_in_time(self) -> None:
        """The tests of the first prefix: it is then known what all will take at the end."""
        budget = self.budget
        if budget.seconds is not None and budget.estimate(_JUDGING) is None:
            self._results()
        seconds_each = budget.estimate(_JUDGING) or 0.0
        budget.reserve = max(budget.reserve, seconds_each * len(self.evidence.prefixes))

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

    def _spell(self, token: int) -> str:
        return str(self.llm.tokenizer.decode([token]))

    # -- judging ------------------------------------------------------------------------------

    def certificate(self) -> Certificate:
        """The verdict on the evidence so far."""
        llm, evidence = self.llm, self.evidence
        judged = self._results()
        distributions = [test for prefix in judged for test in prefix.tests] + self._honesty()
        # However often somebody looks and goes on, a lossless engine fails with 2 alpha at most.
        level = self.effort.alpha / 2**evidence.looks
        results = DistributionResult.of(distributions, level)
        missing, idle = self._missing(), self._idle()
        problems = [*evidence.problems, *self._draw_problems()]
        problems += [result.problem() for result in results if result.adjusted < level]
        whole = self._ended and not missing
        if whole:
            problems += [_untested(kind) for kind in idle]
        evidence.spent = self._before + self.budget.spent
        return Certificate(
            target=llm.target.name,
            draft=", ".join(llm.drafters) or llm.engine.drafter.name,
            dtype=llm.target.numbers,
            backend=llm.target.backend_reason,
            alpha=level,
            texts=tuple(evidence.checks),
            distributions=results,
            exact=tuple(evidence.exact),
            frequencies=tuple(prefix.frequencies for prefix in judged),
            problems=tuple(dict.fromkeys(problems)),
            notes=tuple(dict.fromkeys(self._notes(judged))),
            interrupted=not self._ended,
            completed=self._completed(missing, self._lacks(results, idle)),
        )

    def _results(self) -> list[Judged]:
        """The tests of all prefixes that have enough samples."""
        fewest = min(FEWEST, self.effort.samples)
        for number, prefix in enumerate(self.evidence.prefixes):
            key = number, len(prefix.drawn), len(prefix.plain)
            if min(key[1:]) < fewest or key in self._judged:
                continue
            with self._guarded("sampling"), self.budget.piece(_JUDGING):
                judged = judge(self.llm.target, prefix, self.params, self.effort.seed)
                self._judged = {k: v for k, v in self._judged.items() if k[0] != number}
                self._judged[key] = judged
        return [self._judged[key] for key in sorted(self._judged)]

    def _honesty(self) -> list[DistributionTest]:
        """Whether the drafter drew from the distributions that it declared: one test more."""
        recorder = self._sampler.recorder
        outcome = recorder.honesty()
        if outcome is None:
            return []
        what, bins = "draws / declared distribution", len(recorder.counts)
        return [DistributionTest("all", -1, what, outcome, bins, 0.0, recorder.drawn)]

    def _draw_problems(self) -> list[Problem]:
        count = self._sampler.recorder.impossible
        if not count:
            return []
        what = f"{count} tokens were drawn that its declared distribution rules out"
        return [Problem("drafter", what)]

    def _idle(self) -> list[str]:
        """Kinds of requests for which nothing was drafted until now."""
        idle = [kind for kind in self._asked.kinds if not self.evidence.drafted(kind)]
        if self.prefixes and not sum(prefix.drafted for prefix in self.evidence.prefixes):
            idle.append("sampled")
        return idle

    def _notes(self, judged: Sequence[Judged]) -> list[str]:
        notes = list(self.evidence.notes)
        if self.params.greedy:
            notes.append("sampling was not looked at: the temperature is 0")
        notes += [
            f"{check.kind} texts, {check.setting}: nothing was drafted there"
            for check in self.evidence.checks
            if not check.drafted
        ]
        certain = [prefix.name for prefix in judged if not prefix.tests]
        return notes + [f"{name}: the target is certain there; nothing to test" for name in certain]

    def _completed(self, missing: Sequence[str], lacks: Sequence[str]) -> CertifySpending:
        prefixes = self.evidence.prefixes
        full = sum(len(prefix.drawn) >= self.samples for prefix in prefixes)
        return CertifySpending(
            seconds=self.budget.seconds,
            spent=self.evidence.spent,
            tokens=self.evidence.tokens or self.effort.max_tokens,
            texts=self._compared,
            texts_wanted=self.texts,
            prefixes=full,
            prefixes_wanted=self.prefixes,
            samples=sum(min(len(prefix.drawn), self.samples) for prefix in prefixes),
            samples_wanted=self.prefixes * self.samples,
            looks=self.evidence.looks + 1,
            missing=tuple(missing),
            lacks=tuple(lacks),
        )

    def _lacks(self, results: Sequence[DistributionResult], idle: Sequence[str]) -> list[str]:
        """What a part of the evidence must have, or it says too little to certify anything."""
        seen = {(check.kind, check.setting) for check in self.evidence.checks}
        every = product(self._asked.kinds, (setting.name for setting in self.settings))
        unseen = [f"no {kind} text at {name}" for kind, name in every if (kind, name) not in seen]
        lacks = unseen[:1] or [f"nothing drafted yet for {kind} requests" for kind in idle]
        if self._compared < LEAST_TEXTS:
            lacks.append(f"{self._compared} whole texts were compared, and it takes {LEAST_TEXTS}")
        bias = smallest_bias(results)
        if self.prefixes and not results:
            lacks.append("no prefix has enough samples")
        elif self.prefixes and bias > MOST_BIAS:
            lacks.append(f"only a bias of {bias:.0%} or more would have been seen")
        whole = sum(len(prefix.drawn) >= self.effort.samples for prefix in self.evidence.prefixes)
        if self.prefixes and whole < LEAST_PREFIXES:
            lacks.append(f"{whole} prefixes have all their samples, and it takes {LEAST_PREFIXES}")
        if self.prefixes and not self.evidence.exact:
            lacks.append("the rule was not enumerated")
        return lacks


def _untested(kind: str) -> Problem:
    """Without drafts nothing is tested, and a test of nothing must not pass."""
    what = f"the drafter proposed nothing for {kind} requests, so nothing was tested"
    return Problem("coverage", f"{what}; try other prompts (--prompts)")


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
    llm: LLM, prompts: Sequence[NamedTokens], effort: Effort
) -> list[tuple[str, tuple[int, ...]]]:
    if not prompts:
        raise PromptError("no prompt was given")
    limit = llm.max_model_len
    for name, prompt in prompts:
        if not prompt:
            raise PromptError(f"prompt {name} is empty; give at least one token of text")
        if len(prompt) + effort.max_tokens + 16 > limit:
            raise PromptError(
                f"prompt {name} has {len(prompt)} tokens, but {llm.target.name} sees {limit} with "
                f"the {effort.max_tokens} that are decoded; shorten it or lower max_tokens"
            )
    return [(name, tuple(prompt)) for name, prompt in prompts]
