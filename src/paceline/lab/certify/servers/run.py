"""Certifies a server by its answers: a little of every part with each prompt, until time is up."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import ConfigError, PromptError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import LEAST_TEXTS, MOST_BIAS
from paceline.lab.certify.chisquare import holm
from paceline.lab.certify.servers.answers import Answering, FailedError, ServerRefusedError
from paceline.lab.certify.servers.asking import Asking, CheckPart, PartResult, RequestsSpentError
from paceline.lab.certify.servers.parts import (
    GreedyPart,
    LimitPart,
    LogprobPart,
    SamplePart,
    StreamPart,
    StructurePart,
)
from paceline.lab.report.columns import Column, table_of
from paceline.lab.report.document import Block, Report, Text

PARTS: tuple[type[CheckPart], ...] = (
    GreedyPart,
    StreamPart,
    LogprobPart,
    SamplePart,
    LimitPart,
    StructurePart,
)
POWER = 0.9
_FAILURES = 3  # of a part, after which it is left
_PARTS = (
    *(Column("", name, name) for name in ("part", "requests")),
    Column("", "looked at", "", lambda part: f"{part.looked_at} {part.unit}"),
    Column("", "ties", "ties"),
    Column("", "problems", "problems", len),
    Column("", "seconds", "seconds", "{:.1f}".format),
)
_TESTS = (
    Column("", "test", "what"),
    Column("", "samples", "samples"),
    Column("", "chi2", "statistic", "{:.1f}".format),
    Column("", "p", "p_value", "{:.2g}".format),
    Column("", "Holm p", "adjusted", "{:.2g}".format),
    Column("", "sees", "sees", "{:.1%}".format),
)


@dataclass(frozen=True)
class ServerEffort:
    """How much is asked. Checked on construction."""

    requests: int = 400
    max_tokens: int = 32
    alpha: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("max_tokens", 8)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"alpha is {self.alpha}; it must be between 0 and 1")


@dataclass(frozen=True)
class ServerTest:
    """A distribution test among its family: ``adjusted`` after Holm's correction; ``sees``: the
    smallest bias (total variation over the cells) found with probability ``POWER``."""

    what: str
    samples: int
    statistic: float
    degrees_of_freedom: int
    p_value: float
    adjusted: float
    sees: float


@dataclass(frozen=True)
class ServerCertificate:
    """The outcome. ``lossless`` only if every part was looked at and nothing is wrong."""

    server: str
    reference: str | None
    alpha: float
    parts: tuple[PartResult, ...]
    tests: tuple[ServerTest, ...]
    seconds: float
    interrupted: bool = False

    @property
    def problems(self) -> list[str]:
        all_problems = [f"{part.part}: {what}" for part in self.parts for what in part.problems]
        for test in self.tests:
            if test.adjusted < self.alpha:
                odds = f"p = {test.adjusted:.1g} after correction, {test.samples} samples"
                all_problems.append(f"sampling: biased, {test.what} ({odds})")
        return all_problems

    @property
    def lacks(self) -> list[str]:
        """What must have been looked at, or nothing is certified."""
        needed = [part for part in self.parts if part.part != "structure"]
        lacks = [f"no {part.unit} for {part.part}" for part in needed if not part.looked_at]
        for part in needed:
            if part.part == "greedy" and 0 < part.looked_at < LEAST_TEXTS:
                lacks.append(f"{part.looked_at} text for greedy, and it takes {LEAST_TEXTS}")
        sees = min((test.sees for test in self.tests), default=1.0)
        if sees > MOST_BIAS:
            lacks.append(f"only a bias of {sees:.0%} or more would have been seen in the samples")
        return lacks

    @property
    def lossless(self) -> bool:
        return not (self.problems or self.lacks or self.interrupted)

    @property
    def verdict(self) -> str:
        """One line for people."""
        problems = self.problems
        if problems:
            others = f" (and {len(problems) - 1} more)" if problems[1:] else ""
            return f"NOT LOSSLESS: {problems[0]}{others}"
        if self.interrupted:
            return "NOT CERTIFIED: interrupted; nothing was found in what was looked at"
        if self.lacks:
            return f"NOT ENOUGH: {'; '.join(self.lacks)}; nothing was found in what was looked at"
        looked = ", ".join(f"{part.looked_at} {part.unit}" for part in self.parts)
        verdict = f"CERTIFIED: nothing is wrong in {looked}"
        if self.tests:
            sees = max(test.sees for test in self.tests)
            verdict += f"; no bias in {len(self.tests)} distribution tests, which see {sees:.1%}"
        return verdict

    def record(self) -> dict[str, Any]:
        """As JSON knows it."""
        return {
            "lossless": self.lossless,
            "verdict": self.verdict,
            "problems": self.problems,
            "lacks": self.lacks,
            "power": POWER,
            **asdict(self),
        }

    def report(self) -> Report:
        report = Report(f"Is {self.server} lossless?")
        against = f"Compared with {self.reference}." if self.reference else "Compared with itself."
        report.add("Parts", table_of(self.parts, _PARTS, against))
        if self.tests:
            note = f"sees: the smallest bias that the test finds with power {POWER:g}."
            report.add("Distribution of sampled text", table_of(self.tests, _TESTS, note))
        lines: list[Block] = [Text(f"{p.part}: {note}") for p in self.parts for note in p.notes]
        lines += [Text(what, warning=True) for what in self.problems[1:]]
        report.add("Verdict", *lines, Text(self.verdict, warning=not self.lossless))
        return report


class ServerCertifier:
    """One certification; ``certificate`` may be asked for at any time, also after Ctrl-C."""

    def __init__(
        self,
        server: Answering,
        reference: Answering | None,
        prompts: Sequence[tuple[str, str]],
        effort: ServerEffort | None = None,
        budget: Budget | None = None,
    ) -> None:
        if not prompts:
            raise PromptError("no prompt was given")
        self.effort, self.budget = effort or ServerEffort(), budget or Budget()
        self._prompts = prompts
        chance = random.Random(self.effort.seed)
        limits = self.effort.max_tokens, self.effort.requests
        self._asking = Asking(server, reference, *limits, chance)
        self._parts = [kind(self._asking) for kind in PARTS]
        self._failures: Counter[str] = Counter()
        self._ended = False

    @property
    def pieces(self) -> int:
        """How often ``run`` calls ``advance`` at most."""
        return len(self._prompts) * len(self._parts) + self.effort.requests

    def run(self, advance: Callable[[str], None] = lambda what: None) -> None:
        """Every part with one prompt after the other; then samples, as long as there may be more.

        KeyboardInterrupt passes through.
        """
        rounds = [(part, prompt) for prompt in self._prompts for part in self._parts]
        sampling = next(part for part in self._parts if isinstance(part, SamplePart))
        anew = itertools.cycle(self._prompts)
        more = ((sampling, next(anew)) for _ in iter(lambda: self._failures["sampling"], _FAILURES))
        try:
            for part, (name, prompt) in itertools.chain(rounds, more):
                if self.budget.left <= 0:
                    break
                if self._failures[part.name] < _FAILURES:
                    advance(f"{part.name}: {name}")
                    self._look(part, name, prompt)
        except RequestsSpentError:
            pass
        self._ended = True

    def _look(self, part: CheckPart, name: str, prompt: str) -> None:
        sent, start = self._asking.sent, time.monotonic()
        try:
            part.look(name, prompt)
        except ServerRefusedError as error:
            self._failures[part.name] += 1
            part.note(f"the server refuses: {error}")
        except FailedError as error:
            self._failures[part.name] += 1
            part.problems.append(f"{name}: {error}")
        finally:
            part.requests += self._asking.sent - sent
            part.seconds += time.monotonic() - start

    def certificate(self) -> ServerCertificate:
        """The verdict on what was seen so far."""
        outcomes = [test for part in self._parts for test in part.tests()]
        adjusted = holm([outcome.p_value for _, _, outcome in outcomes])
        share = self.effort.alpha / max(1, len(outcomes))
        reference = self._asking.reference
        return ServerCertificate(
            server=self._asking.server.name,
            reference=None if reference is None else reference.name,
            alpha=self.effort.alpha,
            parts=tuple(part.result() for part in self._parts),
            tests=tuple(
                ServerTest(what, count, o.statistic, o.df, o.p_value, p, o.smallest_bias(share))
                for (what, count, o), p in zip(outcomes, adjusted, strict=True)
            ),
            seconds=self.budget.spent,
            interrupted=not self._ended,
        )
