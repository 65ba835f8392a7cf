"""Certifies a server by its answers: a little of every part with each prompt, until time is up."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from paceline.errors import PromptError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import (
    LEAST_TEXTS,
    MOST_BIAS,
    TESTS,
    Certificate,
    DistributionTest,
    Problem,
    ResultTable,
    as_family,
)
from paceline.lab.certify.effort import LONGEST, Effort
from paceline.lab.certify.servers.asking import Asking, Part, RequestsSpentError, name_of
from paceline.lab.certify.servers.parts import PARTS
from paceline.lab.openai_client import OpenAIClient, RequestRefusedError, ServerFailedError
from paceline.lab.report.columns import Column

_FAILURES = 3  # of a part, after which it is left
_PARTS = ResultTable(
    "parts",
    "Parts",
    (
        Column("part", "part", "name"),
        Column("requests", "requests"),
        Column("checked", "checked"),
        Column("unit", "of"),
        Column("ties", "ties"),
        Column("problems", "problems", shown=len),
        Column("notes"),
        Column("seconds", "seconds", shown="{:.1f}".format),
    ),
)


def lacks_of(parts: Sequence[Part], tests: Sequence[DistributionTest]) -> list[str]:
    """What must have been checked, or nothing is certified."""
    needed = [part for part in parts if part.name != "structure"]
    lacks = [f"no {part.unit} for {part.name}" for part in needed if not part.checked]
    for part in needed:
        if part.name == "greedy" and 0 < part.checked < LEAST_TEXTS:
            lacks.append(f"{part.checked} text for greedy, and it takes {LEAST_TEXTS}")
    bias = min((test.smallest_bias for test in tests), default=1.0)
    if bias > MOST_BIAS:
        lacks.append(f"only a bias of {bias:.0%} or more would have been seen in the samples")
    return lacks


class ServerCertifier:
    """One certification of ``server``; ``certificate`` may be asked for at any time.

    ``reference``: the same server without speculation, or another one; None where there is
    neither. ``prompts``: (name, text).
    """

    def __init__(
        self,
        server: OpenAIClient,
        reference: OpenAIClient | None,
        prompts: Sequence[tuple[str, str]],
        effort: Effort | None = None,
        budget: Budget | None = None,
    ) -> None:
        if not prompts:
            raise PromptError("no prompt was given")
        self.effort, self.budget = effort or Effort(), budget or Budget()
        self._prompts = prompts
        limits = min(self.effort.max_tokens, LONGEST), self.effort.requests
        self._asking = Asking(server, reference, *limits, random.Random(self.effort.seed))
        self._parts = tuple(Part(*part) for part in PARTS)
        self._ended = False

    @property
    def pieces(self) -> int:
        """How often ``run`` calls ``advance`` at most."""
        return len(self._prompts) * len(self._parts) + self.effort.requests

    def run(self, advance: Callable[[str], None] = lambda what: None) -> None:
        """Every part with one prompt after the other; then samples, as long as there may be more.

        KeyboardInterrupt passes through.
        """
        try:
            for (name, prompt), part in self._rounds():
                if self.budget.left <= 0:
                    break
                if part.failures < _FAILURES:
                    advance(f"{part.name}: {name}")
                    self._check(part, name, prompt)
        except RequestsSpentError:
            pass
        self._ended = True

    def _rounds(self) -> Iterator[tuple[tuple[str, str], Part]]:
        yield from itertools.product(self._prompts, self._parts)
        (sampling,) = (part for part in self._parts if part.name == "sampling")
        while sampling.failures < _FAILURES:
            yield from itertools.product(self._prompts, [sampling])

    def _check(self, part: Part, name: str, prompt: str) -> None:
        sent, start = self._asking.sent, time.monotonic()
        try:
            for problem in part.check(self._asking, part, prompt):
                part.problems.append(f"{name}: {problem}")
        except RequestRefusedError as error:
            part.failures += 1
            part.note(f"the server refuses: {error}")
        except ServerFailedError as error:
            part.failures += 1
            part.problems.append(f"{name}: {error}")
        finally:
            part.rounds += 1
            part.requests += self._asking.sent - sent
            part.seconds += time.monotonic() - start

    def certificate(self) -> Certificate:
        """The verdict on what was seen so far."""
        asking, parts, alpha = self._asking, self._parts, self.effort.alpha
        reference, spent = asking.reference, self.budget.spent
        tests = as_family(asking.tests(), alpha)
        problems = [Problem(part.name, what) for part in parts for what in part.problems]
        problems += [test.problem() for test in tests if test.adjusted_p_value < alpha]
        checked = ", ".join(f"{part.checked} {part.unit}" for part in parts)
        sees = max((test.smallest_bias for test in tests), default=1.0)
        return Certificate(
            title=f"Is {name_of(asking.server)} lossless?",
            alpha=alpha,
            facts={
                "server": name_of(asking.server),
                "reference": None if reference is None else name_of(reference),
                "seconds": spent,
            },
            tables=(replace(_PARTS, rows=parts), replace(TESTS, rows=tests)),
            problems=tuple(problems),
            lacks=tuple(lacks_of(parts, tests)),
            notes=tuple(f"{part.name}: {note}" for part in parts for note in part.notes),
            interrupted=not self._ended,
            completed=f"{spent:.0f} s, {asking.sent} requests completed {checked}",
            certified=f"nothing is wrong in {checked}; no bias in {len(tests)} distribution "
            f"tests, which see {sees:.1%}",
        )
