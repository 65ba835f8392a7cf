"""Certifies one LLM: texts, distributions and the rule itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from paceline.certify import exact, sampled
from paceline.certify.certificate import Certificate, Problem, results_of
from paceline.certify.decoding import Decoded, Start, decode
from paceline.certify.draws import Recorder
from paceline.certify.findings import bug, nothing, rejections
from paceline.certify.texts import Task, TextCheck, check_texts
from paceline.core.params import SamplingParams
from paceline.core.sequence import Sequence as Request
from paceline.core.tree import TokenTree
from paceline.engine.controller import FixedLength
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.llm import LLM

Advance = Callable[[str], None]
Named = tuple[str, Sequence[int]]
_ANY_REQUEST = SamplingParams()


@dataclass(frozen=True)
class Effort:
    """How much is looked at. Checked on construction.

    ``texts`` prompts are decoded, ``max_tokens`` each. At ``prefixes`` places ``samples``
    continuations are drawn. ``alpha`` is the chance that a lossless engine fails one of the
    distribution tests; ``seed`` makes the whole run repeatable.
    """

    texts: int = 8
    max_tokens: int = 64
    prefixes: int = 4
    samples: int = 2000
    alpha: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("texts", 1), ("max_tokens", 8), ("prefixes", 1), ("samples", 100)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"alpha is {self.alpha}; it must be between 0 and 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be from 0 to 2**63 - 1")


def certify(
    model: LLM | str,
    prompts: Sequence[Named],
    params: SamplingParams | None = None,
    *,
    draft: str | None = None,
    effort: Effort | None = None,
    advance: Advance = lambda description: None,
) -> Certificate:
    """Compare an LLM's speculative decoding with plain decoding of the same target.

    ``model``: an LLM with a drafter, or the name of a target, with ``draft`` as for LLM.
    ``prompts``: (name, token ids). ``params``: sampling parameters to certify, by default
    temperature 1; greedy decoding is looked at in any case, with their penalties and bias. Their
    seed, stop conditions and token limits are not used: ``effort`` says how much is decoded.
    ``advance(what comes next)`` is called after each piece of work.

    Raises ConfigError for an engine without a drafter or with a lossy rule, PromptError, and what
    LLM raises.
    """
    llm = LLM(model, draft, max_batch_size=32) if isinstance(model, str) else model
    certifier = Certifier(llm, prompts, params, effort or Effort())
    certifier.run(advance)
    return certifier.certificate()


class Certifier:
    """One certification; ``certificate`` may be asked for at any time, also after Ctrl-C."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Named],
        params: SamplingParams | None = None,
        effort: Effort | None = None,
    ) -> None:
        self.llm, self.effort = llm, effort or Effort()
        wish = params or SamplingParams(temperature=1.0)
        self.params = replace(
            wish, seed=None, n=1, stop=(), stop_token_ids=(), min_tokens=0, logprobs=None
        )
        self._lengths, self._adapts = _lengths_of(llm)
        self._prompts = _checked(llm, prompts, self.effort)
        self._plain = llm.beside(
            max_batch_size=llm.engine.scheduler.config.max_batch_size, seed=self.effort.seed + 1
        ).engine
        self._texts: list[TextCheck] = []
        self._laws: list[sampled.LawTest] = []
        self._exact: list[exact.ExactCheck] = []
        self._frequencies: list[sampled.Frequencies] = []
        self._problems: list[Problem] = []
        self._notes: list[str] = []
        self._complete = False

    @property
    def pieces(self) -> int:
        """How often ``run`` calls ``advance``."""
        texts = min(self.effort.texts, len(self._prompts))
        rounds = 1 + len(self._settings())
        if self.params.greedy:
            return texts * rounds
        prefixes = min(self.effort.prefixes, texts)
        return (2 * rounds + 1) * texts + prefixes * (2 * sampled.PORTIONS + 1)

    def run(self, advance: Advance = lambda description: None) -> None:
        """Everything there is to look at. Raises KeyboardInterrupt where it was interrupted."""
        with self._guarded("greedy"):
            self._compare("greedy", _greedy(self.params), advance)
        if self.params.greedy:
            self._notes.append("sampling was not looked at: the temperature is 0")
        else:
            with self._guarded("seeded sampling"):
                self._compare("seeded", self.params, advance)
            self._sample(advance)
        self._complete = True

    def certificate(self) -> Certificate:
        llm, results = self.llm, results_of(self._laws, self.effort.alpha)
        return Certificate(
            target=llm.target.name,
            draft=", ".join(llm.drafters) or llm.engine.drafter.name,
            dtype=str(llm.target.dtype).removeprefix("torch."),
            alpha=self.effort.alpha,
            texts=tuple(self._texts),
            laws=results,
            exact=tuple(self._exact),
            frequencies=tuple(self._frequencies),
            problems=(*self._problems, *rejections(results, self.effort.alpha)),
            notes=tuple(dict.fromkeys(self._notes)),
            complete=self._complete,
        )

    @contextmanager
    def _guarded(self, part: str) -> Iterator[None]:
        """A crash is a finding, and the other parts still run."""
        try:
            yield
        except PacelineError:
            raise
        except Exception as error:
            what = f"decoding failed with {type(error).__name__}: {error}"
            self._problems.append(Problem(part, " ".join(what.split())))

    # -- token for token ----------------------------------------------------------------------

    def _settings(self) -> list[tuple[str, int | None, bool]]:
        """What each text is decoded with: a name, the draft length, whether all in one batch."""
        settings: list[tuple[str, int | None, bool]] = [
            (f"draft length {length}, alone", length, False) for length in self._lengths
        ]
        if self._adapts:
            settings.append(("draft length auto, alone", None, False))
        longest = self._lengths[-1]
        return [*settings, (f"draft length {longest}, mixed batch", longest, True)]

    def _compare(self, kind: str, params: SamplingParams, advance: Advance) -> None:
        prompts = self._prompts[: self.effort.texts]
        seeds = itertools.count(self.effort.seed)
        tasks = []
        for name, prompt in prompts:
            wish = replace(params, max_tokens=self.effort.max_tokens)
            if kind == "seeded":
                wish = replace(wish, seed=next(seeds) % 2**63)
            tasks.append(Task(name, Start(prompt), wish))
        plain = []
        for task in tasks:
            (text,) = decode(self._plain, [task.start], task.params, 0)
            plain.append(text.tokens)
            advance(f"{kind}: plain decoding")
        # Neighbours of another kind, shorter and longer, come and go while the others decode.
        others = [
            Task(task.name, task.start, replace(_ANY_REQUEST, temperature=0.8, max_tokens=length))
            for task, length in zip(tasks, itertools.cycle((5, 17, 40)), strict=False)
        ]
        for setting, length, together in self._settings():
            check = check_texts(
                self.llm.engine,
                tasks,
                plain,
                kind,
                setting,
                length,
                others,
                together,
                self._spell,
                lambda setting=setting: advance(f"{kind}: {setting}"),  # type: ignore[misc]
            )
            self._texts.append(check)
            self._problems += [bug(check, place) for place in range(len(check.bugs))]
        if not sum(check.drafted for check in self._texts if check.kind == kind):
            self._problems.append(nothing(kind))

    def _spell(self, token: int) -> str:
        return str(self.llm.tokenizer.decode([token]))

    # -- distributions ------------------------------------------------------------------------

    def _sample(self, advance: Advance) -> None:
        engine, effort = self.llm.engine, self.effort
        drafter = engine.drafter
        recorder = Recorder(drafter, effort.seed)
        if engine.verifier.generator is not None:
            engine.verifier.generator.manual_seed(effort.seed)
        drafted = 0
        engine.drafter = recorder
        try:
            for number, (name, start) in enumerate(self._starts(advance)):
                prefix = sampled.describe(self.llm.target, name, start, self.params, effort.samples)
                with self._guarded("sampling"):
                    drafted += self._test(prefix, number, advance)
                with self._guarded("rule"):
                    self._enumerate(prefix, recorder)
                advance(f"{name}: the rule, enumerated")
        finally:
            engine.drafter = drafter
            self._draws(recorder)
        if not drafted:
            self._problems.append(nothing("sampled"))

    def _starts(self, advance: Advance) -> list[tuple[str, Start]]:
        """Where continuations are drawn: the prompts that leave the target most undecided.

        In each not at the very most undecided place, as sure ones have likelier second tokens.
        """
        greedy = replace(_greedy(self.params), max_tokens=self.effort.max_tokens)
        found: list[tuple[float, str, Start]] = []
        for name, prompt in self._prompts[: self.effort.texts]:
            (text,) = decode(self._plain, [Start(prompt)], greedy, 0)
            entropy, start = sampled.choose_start(
                self.llm.target, prompt, text.tokens, self.params, 0.75
            )
            found.append((entropy, name, start))
            advance(f"{name}: looking for places")
        found.sort(key=lambda entry: -entry[0])
        return [(name, start) for _, name, start in found[: self.effort.prefixes]]

    def _test(self, prefix: sampled.Prefix, number: int, advance: Advance) -> int:
        """Draw and test; returns how many tokens were drafted."""
        length = _sampling_length(self._lengths, number)

        def drawn(plainly: bool) -> list[Decoded]:
            engine = self._plain if plainly else self.llm.engine
            used = 0 if plainly else length
            what = f"{prefix.name}: {'plain' if plainly else 'speculative'} sampling"
            return sampled.continuations(
                engine, prefix, self.params, used, self.effort.samples, lambda: advance(what)
            )

        given = len(prefix.start.output)
        plain = [text.tokens[given:] for text in drawn(True)]
        texts = drawn(False)
        strings = [text.tokens[given:] for text in texts]
        found = sampled.tests_of(prefix, length, strings, plain, self.effort.seed)
        if not found:
            self._notes.append(f"{prefix.name}: the target is certain there; nothing to test")
        self._laws += found + sampled.tests_of(prefix, 0, plain, plain, self.effort.seed)
        self._frequencies.append(sampled.frequencies(prefix, length, strings))
        return sum(text.drafted for text in texts)

    def _draws(self, recorder: Recorder) -> None:
        """Whether the drafter drew from the laws that it declared: one test more."""
        outcome = recorder.honesty()
        if recorder.impossible:
            what = f"{recorder.impossible} tokens were drawn that its declared law rules out"
            self._problems.append(Problem("drafter", what))
        if outcome is not None:
            what = "draws / declared law"
            bins = len(recorder.counts)
            test = sampled.LawTest("all", -1, what, recorder.drawn, bins, outcome, 0.0)
            self._laws.append(test)

    # -- the rule -----------------------------------------------------------------------------

    def _enumerate(self, prefix: sampled.Prefix, recorder: Recorder) -> None:
        """The step at this place, by enumeration, over each kind of tree that was proposed."""
        recorder.watch(prefix.start.tokens)
        room = len(prefix.start.output) + 8
        wish = replace(self.params, max_tokens=room)
        decode(self.llm.engine, [prefix.start] * 128, wish, min(2, self._lengths[-1]), enough=1)
        trees, laws = list(recorder.trees.values()), recorder.laws
        recorder.watch(None)
        if not trees:
            self._notes.append(f"{prefix.name}: rule not enumerated: nothing was drafted there")
        for tree in trees[:2]:
            check = self._enumerated(prefix, tree, laws)
            if check is None:
                what = f"{prefix.name}: rule not enumerated: a tree of {len(tree)} nodes"
                self._notes.append(f"{what} has too many outcomes")
                continue
            self._exact.append(check)
            if not check.passed:
                what = f"{check.prefix}: a step's law is {check.distance:.2g} from the target's"
                self._problems.append(Problem("rule", f"{what} (total variation, enumerated)"))

    def _enumerated(
        self, prefix: sampled.Prefix, tree: TokenTree, laws: exact.Laws
    ) -> exact.ExactCheck | None:
        verifier = self.llm.engine.verifier
        (root,) = prefix.scorer.at_once([()])
        for depth in (2, 1):
            part = exact.cut(tree, depth)
            if part is None:
                return None
            tokens = exact.small_tokens(part, root, laws)
            case = exact.make_case(part, laws, prefix.scorer.at_once, tokens)
            try:
                distance, outcomes = exact.step_error(verifier, case)
            except exact.TooManyOutcomes:
                continue
            whole = bool(float(root[tokens].sum()) > 1 - 1e-9)
            name, draw, nodes = prefix.name, part.draw.value, len(part)
            return exact.ExactCheck(
                name, draw, nodes, depth + 1, len(tokens), whole, outcomes, distance
            )
        return None


def _greedy(params: SamplingParams) -> SamplingParams:
    """Greedy decoding with the same penalties and bias."""
    return replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


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
    (length,) = controller.lengths([Request(0, [0], 1, _ANY_REQUEST)])
    if not length:
        raise ConfigError("draft length 0 drafts nothing, so there is nothing to certify")
    return tuple(sorted({1, length})), False


def _sampling_length(lengths: Sequence[int], number: int) -> int:
    """Short drafts, whose bonus token is among those tested, and long ones in turn."""
    return min(2, lengths[-1]) if number % 2 == 0 else lengths[-1]


def _checked(
    llm: LLM, prompts: Sequence[Named], effort: Effort
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
