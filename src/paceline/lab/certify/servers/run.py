"""Certifies a server by its answers: a little of every part with each prompt, until time is up."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PromptError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import (
    LEAST_TEXTS,
    MOST_BIAS,
    TESTS,
    Certificate,
    DistributionTest,
    Problem,
    Sheet,
    as_family,
)
from paceline.lab.certify.effort import LONGEST, Effort
from paceline.lab.certify.servers.answers import AnsweringServer
from paceline.lab.certify.servers.asking import Asking, Part, RequestsSpentError
from paceline.lab.certify.servers.parts import all_parts
from paceline.lab.openai_client import RequestRefusedError, ServerFailedError
from paceline.lab.report.columns import Column
from paceline.lab.report.document import Block

_FAILURES = 3  # of a part, after which it is left
_PARTS = Sheet(
    "parts",
    "Parts",
    (
        Column("part", "part", "name"),
        Column("requests", "requests"),
        Column("looked_at", "looked at"),
        Column("unit", "of"),
        Column("ties", "ties"),
        Column("problems", "problems", shown=len),
        Column("notes"),
        Column("seconds", "seconds", shown="{:.1f}".format),
    ),
)


@dataclass(frozen=True, kw_only=True)
class ServerCertificate(Certificate):
    """Of a server, compared with ``reference`` where there was one. ``parts``: what was asked."""

    server: str
    reference: str | None
    parts: tuple[Part, ...]
    seconds: float

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("server", "reference", "seconds")}

    def sheets(self) -> Iterable[tuple[Sheet, Sequence[Any], Sequence[Block]]]:
        return (_PARTS, self.parts, ()), (TESTS, self.tests, ())


def lacks_of(parts: Sequence[Part], tests: Sequence[DistributionTest]) -> list[str]:
    """What must have been looked at, or nothing is certified."""
    needed = [part for part in parts if part.name != "structure"]
    lacks = [f"no {part.unit} for {part.name}" for part in needed if not part.looked_at]
    for part in needed:
        if part.name == "greedy" and 0 < part.looked_at < LEAST_TEXTS:
            lacks.append(f"{part.looked_at} text for greedy, and it takes {LEAST_TEXTS}")
    sees = min((test.smallest_bias for test in tests), default=1.0)
    if sees > MOST_BIAS:
        lacks.append(f"only a bias of {sees:.0%} or more would have been seen in the samples")
    return lacks


class ServerCertifier:
    """One certification; ``certificate`` may be asked for at any time, also after Ctrl-C."""

    def __init__(
        self,
        server: AnsweringServer,
        reference: AnsweringServer | None,
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
        self._parts = all_parts()
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
        (sampling,) = (part for part in self._parts if part.name == "sampling")
        again = itertools.takewhile(
            lambda _: sampling.failures < _FAILURES, itertools.cycle(self._prompts)
        )
        more = ((sampling, prompt) for prompt in again)
        try:
            for part, (name, prompt) in itertools.chain(rounds, more):
                if self.budget.left <= 0:
                    break
                if part.failures < _FAILURES:
                    advance(f"{part.name}: {name}")
                    self._look(part, name, prompt)
        except RequestsSpentError:
            pass
        self._ended = True

    def _look(self, part: Part, name: str, prompt: str) -> None:
        sent, start = self._asking.sent, time.monotonic()
        try:
            part.look(self._asking, part, name, prompt)
        except RequestRefusedError as error:
            part.failures += 1
            part.note(f"the server refuses: {error}")
        except ServerFailedError as error:
            part.failures += 1
            part.problems.append(f"{name}: {error}")
        finally:
            part.looks += 1
            part.requests += self._asking.sent - sent
            part.seconds += time.monotonic() - start

    def certificate(self) -> ServerCertificate:
        """The verdict on what was seen so far."""
        server, reference, alpha = self._asking.server, self._asking.reference, self.effort.alpha
        parts, tests = tuple(self._parts), as_family(self._asking.tests(), alpha)
        problems = [Problem(part.name, what) for part in parts for what in part.problems]
        problems += [test.problem() for test in tests if test.adjusted_p_value < alpha]
        looked = ", ".join(f"{part.looked_at} {part.unit}" for part in parts)
        sees = max((test.smallest_bias for test in tests), default=1.0)
        return ServerCertificate(
            title=f"Is {server.name} lossless?",
            server=server.name,
            reference=None if reference is None else reference.name,
            alpha=alpha,
            parts=parts,
            tests=tests,
            seconds=self.budget.spent,
            problems=tuple(problems),
            lacks=tuple(lacks_of(parts, tests)),
            notes=tuple(f"{part.name}: {note}" for part in parts for note in part.notes),
            interrupted=not self._ended,
            completed=f"{self.budget.spent:.0f} s, {self._asking.sent} requests completed {looked}",
            certified=f"nothing is wrong in {looked}; no bias in {len(tests)} distribution tests, "
            f"which see {sees:.1%}",
        )
