"""Certifies one LLM: compares texts token for token, tests samples against the target's
distributions, and enumerates the verification rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from paceline.control.controller import FixedLength
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.lab.bench.prompts import tokens_needed
from paceline.lab.budget import Budget
from paceline.lab.certify import draws
from paceline.lab.certify.certificate import (
    Certificate,
    DistributionTest,
    Problem,
    missing_evidence,
    rank_tests,
    smallest_bias,
    tests_table,
)
from paceline.lab.certify.chisquare import RankCounts
from paceline.lab.certify.decoding import Start, TokenIds, decode, explain, next_probabilities
from paceline.lab.certify.effort import Effort
from paceline.lab.certify.exact import ExactCheck, enumerate_step, exact_table
from paceline.lab.certify.texts import Divergence, TextCheck, text_tables
from paceline.llm import LLM
from paceline.model.target import CausalModel

SAMPLE_TOKENS = 3
SAMPLE_BATCHES = 10  # in which the samples of a prefix are drawn
_MAX_CONTEXTS = 128  # contexts whose next tokens are tested: the most frequent ones
_MAX_PARTIAL_BLOCK = 4
_NEIGHBOURS = (5, 17, 40)  # tokens of the other requests in a mixed batch
_DRAFT_ROOM = 16  # tokens of context

NamedPrompts = Sequence[tuple[str, Sequence[int]]]  # names and token ids


@dataclass
class Prefix:
    """A point at which continuations are sampled. ``drawn``: the samples, decoded with drafts of
    ``draft_length``; ``examples`` of these drafts."""

    start: Start
    draft_length: int
    drawn: list[TokenIds] = field(default_factory=list)
    examples: draws.Examples = field(default_factory=dict)

    def ranks(self, target: CausalModel) -> dict[str, RankCounts]:
        """The first tokens of the samples and the ones after them, by rank in the target's
        distribution after their context, the part of their sample before them. Testing only the
        most frequent contexts is no bias, because how often one occurs does not depend on the
        tokens that follow it."""
        following: defaultdict[TokenIds, list[int]] = defaultdict(list)
        for sample in self.drawn:
            for position, token in enumerate(sample):
                following[sample[:position]].append(token)
        contexts = sorted(following, key=lambda context: -len(following[context]))[:_MAX_CONTEXTS]
        counts = {"first tokens": RankCounts(), "next tokens": RankCounts()}
        rows = next_probabilities(target, self.start, contexts)
        for context, probs in zip(contexts, rows, strict=True):
            counts["next tokens" if context else "first tokens"].add(probs, following[context])
        return counts


def certify(
    llm: LLM,
    prompts: NamedPrompts,
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
    certifier = Certifier(llm, prompts, params, effort, Budget(seconds))
    certifier.run()
    return certifier.certificate()


class Certifier:
    """One certification. ``certificate`` can be called at any time, also after Ctrl-C.

    ``plain`` decodes the same target without drafts. ``kinds``: the sampling parameters of each
    kind of text ("greedy", "seeded"). ``settings``: the draft length of each setting in which texts
    are decoded, None for adaptive; in the last one they share a ``mixed`` batch with others."""

    def __init__(
        self,
        llm: LLM,
        prompts: NamedPrompts,
        params: SamplingParams | None = None,
        effort: Effort | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.llm, self.effort, self.budget = llm, effort or Effort(), budget or Budget()
        self.settings = _settings(llm)
        self.mixed = list(self.settings)[-1]
        self.prompts = _fitting_prompts(llm, prompts, self.effort)
        needed = tokens_needed(llm, (ids for _, ids in self.prompts), self.effort.max_tokens)
        batch = llm.engine.scheduler.config.max_batch_size
        self.plain = llm.with_draft(max_batch_size=batch, max_model_len=needed).engine
        requested = params or SamplingParams(temperature=1.0)
        unused: dict[str, Any] = {"stop": (), "stop_token_ids": (), "min_tokens": 0}
        self.params = replace(requested, seed=None, n=1, logprobs=None, **unused)
        # Greedy, with the same penalties and bias.
        greedy = replace(self.params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        self.kinds = {"greedy": greedy} | ({} if requested.greedy else {"seeded": self.params})
        # No samples are drawn if only greedy decoding is tested.
        wanted = min(self.effort.prefixes, len(self.prompts))
        self.num_prefixes = 0 if requested.greedy else wanted
        pairs = [(kind, setting) for kind in self.kinds for setting in self.settings]
        self.checks = {pair: TextCheck(*pair) for pair in pairs}
        self.divergences: list[Divergence] = []
        self.problems: list[Problem] = []
        self.prefixes: list[Prefix] = []
        self.exact: list[ExactCheck] = []
        self.draft_ranks = RankCounts()
        self._plain_texts: dict[tuple[str, int], TokenIds] = {}

    def run(self, advance: Callable[[str], None] = lambda description: None) -> None:
        """Test until all is tested or the time is over. ``advance`` is called before each task. A
        crash is a problem. Ctrl-C is passed on."""
        self.llm.engine.verifier.reseed(self.effort.seed)
        for part, shown, task in self.tasks():
            if self.budget.left <= 0:
                break
            advance(shown)
            try:
                task()
            except PacelineError:
                raise
            except Exception as error:
                what = f"decoding failed with {type(error).__name__}: {error}"
                self.problems.append(Problem(part, " ".join(what.split())))

    def tasks(self) -> Iterator[tuple[str, str, Callable[[], None]]]:
        """The part of each task, a description, and what to call: a text in every setting, all
        samples at one prefix and the rule there, the next text, and so on."""
        for number, (name, _) in enumerate(self.prompts):
            for kind, setting in self.checks:
                compare = partial(self.compare_text, kind, number, setting)
                yield kind, f"{kind}: {name}: {setting}", compare
            if number < self.num_prefixes:
                size = -(-self.effort.samples // SAMPLE_BATCHES)
                for _ in range(SAMPLE_BATCHES):
                    yield "sampling", f"{name}: sampling", partial(self._draw, number, size)
                rule = partial(self._enumerate, number)
                yield "rule", f"{name}: enumerating the rule", rule

    def _start(self, kind: str, number: int) -> Start:
        name, prompt = self.prompts[number % len(self.prompts)]
        seed = (self.effort.seed + number) % 2**63 if kind == "seeded" else None
        params = replace(self.kinds[kind], max_tokens=self.effort.max_tokens, seed=seed)
        return Start(tuple(prompt), params, name=name)

    def _plain_text(self, kind: str, number: int) -> TokenIds:
        if (kind, number) not in self._plain_texts:
            ((text, _),) = decode(self.plain, [self._start(kind, number)], 0)
            self._plain_texts[kind, number] = text
        return self._plain_texts[kind, number]

    def compare_text(self, kind: str, number: int, setting: str) -> None:
        """Decode a text under this setting and compare it with plain decoding's. On a
        ``batch_invariant`` backend no difference is a near tie."""
        text, plain, others = self._start(kind, number), self._plain_text(kind, number), []
        if setting == self.mixed:  # unseeded requests, which leave while the text is decoded
            for other, tokens in enumerate(_NEIGHBOURS, number):
                params = SamplingParams(temperature=0.8, max_tokens=tokens)
                others.append(replace(self._start("greedy", other), params=params))
        length, check = self.settings[setting], self.checks[kind, setting]
        (output, counts), *_ = decode(self.llm.engine, [text, *others], length)
        target, decoded = self.llm.target, self.llm.tokenizer.decode
        difference = explain(target, text.prompt, plain, output, text.params)
        check.texts += 1
        check.tokens += len(plain) if difference is None else difference.at
        check.drafted += counts.drafted
        check.accepted += counts.accepted
        if difference is None:
            return
        pair = difference.left, difference.right
        expected, written = (str(decoded([token])) if token >= 0 else "(end)" for token in pair)
        bug = target.backend.batch_invariant or not difference.is_tie
        divergence = Divergence(kind, setting, text.name, expected, written, difference, bug)
        self.divergences.append(divergence)
        check.bugs += bug
        check.ties += not bug
        if bug:
            self.problems.append(divergence.problem)

    def _prefix(self, number: int) -> Prefix:
        """A prompt and the beginning of its greedy text after which the target's entropy is high.
        It ends a few tokens after a full cache block, because samples prefill the rest."""
        if number == len(self.prefixes):
            start, text = self._start("greedy", number), self._plain_text("greedy", number)
            start = replace(start, params=self.params)
            size = self.llm.engine.cache.block_size
            given = len(start.prompt)
            ends = [n for n in range(len(text) + 1) if 0 < (given + n) % size <= _MAX_PARTIAL_BLOCK]
            outputs = [text[:end] for end in ends or [len(text)]]
            probs = next_probabilities(self.llm.target, start, outputs)
            # Not the highest: less uncertain tokens show a bias of the ones after them better.
            order = torch.special.entr(probs).sum(-1).argsort().tolist()
            chosen = outputs[order[3 * (len(order) - 1) // 4]]
            # Short drafts, whose bonus token is among the tokens tested, and long ones in turn.
            longest = max(n for n in self.settings.values() if n is not None)
            length = longest if number % 2 else min(2, longest)
            self.prefixes.append(Prefix(replace(start, output=chosen), length))
        return self.prefixes[number]

    def _draw(self, number: int, size: int) -> None:
        """Draw ``size`` more samples of ``SAMPLE_TOKENS`` tokens, recording their drafts."""
        engine, prefix = self.llm.engine, self._prefix(number)
        start, given = prefix.start, len(prefix.start.output)
        max_tokens = given + SAMPLE_TOKENS + prefix.draft_length + 1
        starts = [replace(start, params=replace(start.params, max_tokens=max_tokens))] * size
        engine.on_drafts = partial(draws.record, self.draft_ranks, prefix.examples)
        try:
            texts = decode(engine, starts, prefix.draft_length, SAMPLE_TOKENS)
        finally:
            engine.on_drafts = None
        prefix.drawn += [tokens[given:] for tokens, _ in texts]

    def _enumerate(self, number: int) -> None:
        """Enumerate a step with an example draft of each kind that was proposed for the samples."""
        llm, start = self.llm, self.prefixes[number].start
        for tokens, tree in self.prefixes[number].examples.values():
            context = replace(start, output=tokens[len(start.prompt) :])
            target = partial(next_probabilities, llm.target, context)
            check = enumerate_step(llm.engine.verifier, tree, target, start.name, llm.target.device)
            self.exact.append(check)
            if not check.passed:
                what = (
                    f"the distribution of a step differs from the target's by {check.distance:.2g}"
                )
                self.problems.append(Problem("rule", f"{start.name}: {what} (total variation)"))

    def certificate(self) -> Certificate:
        llm = self.llm
        tested = [("drafter", "tokens drawn by the drafter", self.draft_ranks)]
        for prefix in (prefix for prefix in self.prefixes if prefix.drawn):
            for what, ranks in prefix.ranks(llm.target).items():
                tested.append(("sampling", f"{what} after {prefix.start.name}", ranks))
        tests = rank_tests(tested)
        problems = [*self.problems, *(problem for test in tests for problem in test.problems)]
        if impossible := self.draft_ranks.impossible:
            what = f"it drafted {impossible} tokens to which its declared distribution gives"
            problems.append(Problem("drafter", f"{what} probability 0"))
        draft = ", ".join(llm.drafters) or llm.engine.drafter.name
        return Certificate(
            title=f"Is {draft} on {llm.target.name} lossless?",
            facts={
                "target": llm.target.name,
                "draft": draft,
                "dtype": llm.target.dtype_text,
                "backend": llm.target.backend_reason,
                "seconds": self.budget.spent,
                "complete": self.complete,
                "smallest_bias": smallest_bias(tests),
            },
            tables=(
                *text_tables(self.checks.values(), self.divergences),
                tests_table(tests),
                exact_table(self.exact),
            ),
            problems=tuple(dict.fromkeys(problems)),
            missing_evidence=self._lacks(tests),
            notes=[] if self.num_prefixes else ["sampling was not tested: the temperature is 0"],
            completed=self._completed(),
            certified=self._certified(tests),
        )

    @property
    def num_texts(self) -> int:
        """How many texts were compared in every setting."""
        return min(check.texts for check in self.checks.values())

    @property
    def num_sampled(self) -> int:
        """At how many prefixes all samples were drawn."""
        return sum(len(prefix.drawn) >= self.effort.samples for prefix in self.prefixes)

    @property
    def complete(self) -> bool:
        return (self.num_texts, self.num_sampled) == (len(self.prompts), self.num_prefixes)

    def _lacks(self, tests: Sequence[DistributionTest]) -> list[str]:
        if not self.num_prefixes:
            lacks = missing_evidence(self.num_texts, 0.0)
        else:
            lacks = missing_evidence(self.num_texts, smallest_bias(tests))
            if not self.num_sampled:
                lacks.append(f"no prefix has all its {self.effort.samples} samples")
            if not self.exact:
                lacks.append("the rule was not enumerated")
        # Without any drafts, speculative decoding was not tested at all.
        drafting = {check.kind for check in self.checks.values() if check.drafted}
        proposed = "the drafter proposed nothing for {} requests; try other prompts (--prompts)"
        idle = [proposed.format(kind) for kind in self.kinds if kind not in drafting]
        return lacks + (idle if self.num_texts else [])

    def _completed(self) -> str:
        line = (
            f"{self.budget.spent:.0f} s completed {self.num_texts} of {len(self.prompts)} texts "
            f"and the samples of {self.num_sampled} of {self.num_prefixes} prefixes"
        )
        return line if self.complete else f"{line}; more --seconds test the rest"

    def _certified(self, tests: Sequence[DistributionTest]) -> str:
        checks, target = self.checks.values(), self.llm.target
        ties = sum(check.ties for check in checks)
        how = "bit for bit" if target.backend.batch_invariant else f"up to {ties} near ties"
        tokens = sum(check.tokens for check in checks)
        parts = [f"{tokens} tokens equal to plain decoding's {how} on {target.backend_reason}"]
        if not self.num_prefixes:
            parts.append("greedy decoding only, no samples were drawn")
        else:
            detected = f"which detect {smallest_bias(tests):.1%} or more"
            sampled = sum(test.part == "sampling" for test in tests)
            parts.append(f"no bias in {sampled} tests of samples, {detected}")
        if self.exact:
            distance = max(check.distance for check in self.exact)
            parts.append(f"the rule is exact to {distance:.0e}")
        return "; ".join(parts)


def _settings(llm: LLM) -> dict[str, int | None]:
    """The draft length of each setting in which texts are decoded, None for adaptive; the last one
    is a mixed batch."""
    engine = llm.engine
    if not engine.drafter.max_nodes(1):
        raise ConfigError("there is no drafter to certify; give one with draft (--draft)")
    lengths: Sequence[int | None] = 1, 4, None
    if isinstance(engine.controller, FixedLength):
        if not engine.controller.length:
            raise ConfigError("draft length 0 drafts nothing, so there is nothing to certify")
        lengths = sorted({1, engine.controller.length})
    alone = {f"draft length {n or 'auto'}, alone": n for n in lengths}
    longest = max(n for n in lengths if n is not None)
    return {**alone, f"draft length {longest}, mixed batch": longest}


def _fitting_prompts(llm: LLM, prompts: NamedPrompts, effort: Effort) -> NamedPrompts:
    """The first ``num_prompts``. Raises PromptError if one of them does not fit."""
    chosen, room = prompts[: effort.num_prompts], llm.max_model_len - effort.max_tokens
    if not chosen:
        raise PromptError("no prompt was given")
    if room <= _DRAFT_ROOM:
        raise PromptError(
            f"{effort.max_tokens} new tokens leave no room for a prompt in the context of "
            f"{llm.target.name}, {llm.max_model_len} tokens; lower --max-tokens"
        )
    for name, prompt in chosen:
        if not 0 < len(prompt) <= room - _DRAFT_ROOM:
            raise PromptError(
                f"prompt {name} has {len(prompt)} tokens; give at least one, and at most "
                f"{room - _DRAFT_ROOM}: the context of {llm.target.name} has {llm.max_model_len}, "
                f"with {effort.max_tokens} new tokens (--max-tokens)"
            )
    return chosen
