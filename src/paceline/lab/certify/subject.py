"""What is certified, and how much of it is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

from paceline.control.controller import FixedLength
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import Evidence, Problem
from paceline.lab.certify.decoding import Start
from paceline.lab.certify.effort import Effort
from paceline.lab.certify.steps import Recorder
from paceline.llm import LLM

OnProgress = Callable[[str], None]  # is told what comes next


class Subject:
    """What every part of a certification is given: who answers, what is asked, for how long.

    ``llm`` drafts, at ``lengths`` and, if it adapts, at its own; ``plain`` decodes the same target
    without drafts. ``prompts``: (name, token ids); those beyond the effort's number of texts are
    for later runs. ``kinds``: the parameters of each kind of text. ``alone``: draft lengths of
    texts decoded one by one, by setting, None for the adaptive one; ``mixed``: the setting of texts
    in a batch. ``evidence``: what earlier runs with the same arguments have seen; it is added to,
    and if it has all that was wanted, as much again is wanted. ``advance`` is told what comes next.
    Nothing more is done for the parts that are ``broken``.
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
        self.lengths, adapts = _lengths_of(llm)
        alone: dict[str, int | None] = {f"draft length {n}, alone": n for n in self.lengths}
        self.alone = alone | ({"draft length auto, alone": None} if adapts else {})
        self.mixed = f"draft length {self.lengths[-1]}, mixed batch"
        self.prompts = _checked(llm, prompts, self.effort)
        # No larger a cache: by default it would be a share of the memory that is left.
        layers = map(llm.engine.cache.kv, range(llm.target.num_layers))
        self.plain = llm.beside(
            max_batch_size=llm.engine.scheduler.config.max_batch_size,
            seed=self.effort.seed + 1,
            kv_cache_memory=sum(tensor.nbytes for pair in layers for tensor in pair),
        ).engine
        asked = params or SamplingParams(temperature=1.0)
        unused: dict[str, Any] = {"stop": (), "stop_token_ids": (), "min_tokens": 0}
        self.params = replace(asked, seed=None, n=1, logprobs=None, **unused)
        # With the same penalties and bias.
        greedy = replace(self.params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        self.kinds = {"greedy": greedy} | ({} if asked.greedy else {"seeded": self.params})
        # Prefixes wanted; none if only greedy decoding is tested.
        most = min(self.effort.prefixes, self.effort.texts, len(self.prompts))
        self.prefixes = 0 if asked.greedy else most
        self.evidence = evidence or Evidence()
        self.recorder = Recorder(llm.engine.drafter, self.evidence.draws, self.effort.seed)
        self.advance: OnProgress = lambda what: None
        self.broken: set[str] = set()
        self._before = self.evidence.spent
        self.evidence.tranche += self.complete

    @property
    def texts(self) -> int:
        """Texts wanted by now. Prompts are not repeated within one run."""
        return self.evidence.tranche * min(self.effort.texts, len(self.prompts))

    @property
    def samples(self) -> int:
        """Samples wanted by now at each prefix."""
        return self.evidence.tranche * self.effort.samples

    def start(self, number: int, params: SamplingParams) -> Start:
        name, prompt = self.prompts[number % len(self.prompts)]
        return Start(prompt, params, name=name)

    def amounts(self) -> dict[str, Any]:
        """What the time was spent on, of how much that is wanted: JSON's "budget"."""
        evidence, drawn = self.evidence, [len(prefix.drawn) for prefix in self.evidence.prefixes]
        evidence.spent = self._before + self.budget.spent
        return {
            "seconds": self.budget.seconds,
            "spent": evidence.spent,
            "tokens": evidence.tokens or self.effort.max_tokens,
            "texts": self.compared(range(self.texts)),
            "texts_wanted": self.texts,
            "prefixes": sum(count >= self.samples for count in drawn),
            "prefixes_wanted": self.prefixes,
            "samples": sum(min(count, self.samples) for count in drawn),
            "samples_wanted": self.prefixes * self.samples,
            "verdicts": evidence.verdicts + 1,
        }

    @property
    def complete(self) -> bool:
        """Whether all texts and prefixes that are wanted by now are there."""
        amounts = self.amounts()
        return all(amounts[what] >= amounts[f"{what}_wanted"] for what in ("texts", "prefixes"))

    def compared(self, numbers: Iterable[int]) -> int:
        """How many of these texts were compared under every setting that decodes them alone."""
        done, ends = set(self.evidence.done), ["", *(f"/{setting}" for setting in self.alone)]
        ways = list(product(self.kinds, ends))
        return sum(all(f"{kind}/{n}{end}" in done for kind, end in ways) for n in numbers)

    def do(
        self, part: str, kind: str, size: int, shown: str, run: Callable[[], None], name: str = ""
    ) -> None:
        """``run`` a piece of work, whole or not at all; ``kind`` and ``size`` tell what it takes.
        ``part`` is at fault if it fails. With a ``name`` it is done once."""
        done = self.evidence.done
        if name in done or part in self.broken or not self.budget.fits(kind, size):
            return
        self.advance(shown)
        with self.guarded(part), self.budget.piece(kind, size):
            run()
            done += [name] if name else []

    @contextmanager
    def guarded(self, part: str) -> Iterator[None]:
        """A crash is a problem of its part, and the other parts still run."""
        try:
            yield
        except PacelineError:
            raise
        except Exception as error:
            what = f"decoding failed with {type(error).__name__}: {error}"
            self.evidence.problems.append(Problem(part, " ".join(what.split())))
            self.broken.add(part)


def _lengths_of(llm: LLM) -> tuple[tuple[int, ...], bool]:
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
    limit = llm.max_model_len
    room = limit - effort.max_tokens - 16
    for name, prompt in prompts[: effort.texts]:
        if not prompt:
            raise PromptError(f"prompt {name} is empty; give at least one token of text")
        if len(prompt) > room:
            raise PromptError(
                f"prompt {name} has {len(prompt)} tokens, but {llm.target.name} sees {limit} with "
                f"the {effort.max_tokens} that are decoded; shorten it or lower max_tokens"
            )
    return [(name, tuple(prompt)) for name, prompt in prompts if 0 < len(prompt) <= room]
