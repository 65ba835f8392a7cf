"""In which order a certification looks: any beginning of it has seen a little of everything.

Round by round a few more texts are compared, each under all settings, and more is drawn at one
place until that has all its samples; only then comes the next place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import ConfigError

FEWEST = 100  # samples from which a place is judged


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
        for name, least in (("texts", 1), ("max_tokens", 8), ("prefixes", 1), ("samples", FEWEST)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"alpha is {self.alpha}; it must be between 0 and 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be from 0 to 2**63 - 1")


@dataclass(frozen=True)
class Texts:
    """Compare these texts, given by number, under all settings."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Draws:
    """Bring the place of this number to so many samples; ``whole``: only if all of them fit."""

    place: int
    samples: int
    whole: bool = False


ScheduleEntry = Texts | Draws


def groups(texts: int) -> list[tuple[int, ...]]:
    """1, 1, 2, 4, 8 ... texts, so that the first verdict comes soon."""
    found: list[tuple[int, ...]] = []
    first = 0
    while first < texts:
        last = min(texts, max(1, 2 * first))
        found.append(tuple(range(first, last)))
        first = last
    return found


def schedule(texts: int, places: int, samples: int) -> Iterator[ScheduleEntry]:
    """Everything, in its order; ``places`` 0 leaves the draws out."""
    comparing = [Texts(numbers) for numbers in groups(texts)]
    drawing: list[Draws] = []
    if places:
        drawing += [Draws(0, -(-samples * tenths // 10)) for tenths in (3, 5, 10)]
        drawing += [Draws(place, samples, whole=True) for place in range(1, places)]
    for round_ in range(max(len(comparing), len(drawing))):
        if round_ < len(comparing):
            yield comparing[round_]
        if round_ < len(drawing):
            yield drawing[round_]
