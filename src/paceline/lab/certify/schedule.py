"""In which order a certification looks: any beginning of it has seen a little of everything.

Round by round a few more texts are compared, each under all settings, and more is drawn at one
prefix until that has all its samples; only then comes the next prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.lab.budget import Budget
from paceline.lab.certify.evidence import Evidence

FEWEST = 100  # samples from which a prefix is judged


@dataclass(frozen=True)
class Effort:
    """How much is looked at. Checked on construction.

    ``texts`` prompts are decoded, ``max_tokens`` each. At ``prefixes`` prefixes ``samples``
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
        for name, least in (("texts", 1), ("max_tokens", 8), ("prefixes", 1), ("samples", FEWEST)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"alpha is {self.alpha}; it must be between 0 and 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be from 0 to 2**63 - 1")


@dataclass(frozen=True)
class Asked:
    """What every part of a certification is given: who answers, what is asked, for how long.

    ``engine`` drafts, at ``lengths``; ``plain`` decodes the same target without drafts. What is
    seen goes into ``evidence``.
    """

    engine: Engine
    plain: Engine
    prompts: Sequence[tuple[str, tuple[int, ...]]]
    params: SamplingParams
    lengths: tuple[int, ...]
    effort: Effort
    budget: Budget
    evidence: Evidence

    @property
    def kinds(self) -> dict[str, SamplingParams]:
        """The parameters of every kind of text; greedy ones have the same penalties and bias."""
        greedy = replace(self.params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        return {"greedy": greedy} | ({} if self.params.greedy else {"seeded": self.params})

    def prompt(self, number: int) -> tuple[str, tuple[int, ...]]:
        """Name and token ids; behind the last one it begins anew."""
        return self.prompts[number % len(self.prompts)]


@dataclass(frozen=True)
class WorkItem:
    """Work that is done whole or not at all; ``kind`` and ``size`` tell what it will take.

    ``needs``: plain texts, by name, without which it cannot be done.
    """

    name: str
    part: str
    kind: str
    size: int
    shown: str
    run: Callable[[], None]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Texts:
    """Compare these texts, given by number, under all settings."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Draws:
    """Bring the place of this number to so many samples; ``whole``: only if all of them fit."""

    prefix: int
    samples: int
    whole: bool = False


def groups(texts: int) -> list[tuple[int, ...]]:
    """1, 1, 2, 4, 8 ... texts, so that the first verdict comes soon."""
    ends = [0]
    while ends[-1] < texts:
        ends.append(min(texts, max(1, 2 * ends[-1])))
    return [tuple(range(*pair)) for pair in pairwise(ends)]


def schedule(texts: int, prefixes: int, samples: int) -> Iterator[Texts | Draws]:
    """Everything, in its order; ``prefixes`` 0 leaves the draws out."""
    drawing = [Draws(0, -(-samples * tenths // 10)) for tenths in (3, 5, 10)]
    drawing += [Draws(number, samples, whole=True) for number in range(1, prefixes)]
    comparing = map(Texts, groups(texts))
    for round_ in zip_longest(comparing, drawing if prefixes else ()):
        yield from (task for task in round_ if task is not None)
