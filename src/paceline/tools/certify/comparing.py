"""Token-for-token comparisons of a certification, one text under one setting at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from paceline.budget import Budget
from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.tools.certify.decoding import Start, decode
from paceline.tools.certify.evidence import Evidence
from paceline.tools.certify.findings import bug
from paceline.tools.certify.schedule import Effort
from paceline.tools.certify.texts import Task, check_texts

NamedPrompt = tuple[str, tuple[int, ...]]
Guard = Callable[[str], AbstractContextManager[None]]
_NEIGHBOURS = 3  # at least, of the texts in a mixed batch
_SHARE = 0.025  # of what is left of a budget, that one text at one setting may take
_SHORTEST = 16
_PROBED = 4  # tokens that are decoded to see how fast that is
_ANY_REQUEST = SamplingParams()


@dataclass(frozen=True)
class ComparedSetting:
    """What a text is decoded with: the draft length (None adapts), and whether in a batch."""

    name: str
    length: int | None
    together: bool


def settings_of(lengths: Sequence[int], adapts: bool) -> list[ComparedSetting]:
    found = [ComparedSetting(f"draft length {length}, alone", length, False) for length in lengths]
    if adapts:
        found.append(ComparedSetting("draft length auto, alone", None, False))
    longest = lengths[-1]
    return [*found, ComparedSetting(f"draft length {longest}, mixed batch", longest, True)]


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


class Comparer:
    """Compares texts of ``prompts`` with plain decoding's and puts what it sees into evidence."""

    def __init__(
        self,
        engine: Engine,
        plain: Engine,
        prompts: Sequence[NamedPrompt],
        effort: Effort,
        settings: Sequence[ComparedSetting],
        evidence: Evidence,
        spell: Callable[[int], str],
    ) -> None:
        self._engine, self._plain, self._prompts = engine, plain, prompts
        self._effort, self._settings, self._evidence = effort, settings, evidence
        self._spell = spell

    def pieces(
        self, params_by_kind: dict[str, SamplingParams], numbers: Sequence[int]
    ) -> Iterator[WorkItem]:
        """For each of the texts: plain, then every setting. Those in a batch come last.

        ``params_by_kind`` are the parameters of every kind of request. A greedy text is decoded
        once for every prompt that there is: again it would only be the same.
        """
        known = len(self._prompts)
        for number in numbers:
            for kind, params in params_by_kind.items():
                if kind == "seeded" or number < known:
                    yield from self._alone(kind, params, number)
        for kind, params in params_by_kind.items():
            own = [n for n in numbers if kind == "seeded" or n < known]
            for setting in self._settings:
                if setting.together and own:
                    name = f"{kind}/{own[0]}-{own[-1]}/{setting.name}"
                    run = partial(self._compare, kind, params, own, setting)
                    shown = f"{kind}: {setting.name}"
                    needs = tuple(f"{kind}/{number}" for number in own)
                    yield WorkItem(name, _part(kind), "mixed", len(own), shown, run, needs)

    def _alone(self, kind: str, params: SamplingParams, number: int) -> Iterator[WorkItem]:
        part, name = _part(kind), self._prompts[number % len(self._prompts)][0]
        plain, what = f"{kind}/{number}", f"{kind}: {name}"
        run = partial(self._decode_plainly, kind, params, number)
        yield WorkItem(plain, part, "text", 1, f"{what}: plain decoding", run)
        for setting in self._settings:
            if not setting.together:
                run = partial(self._compare, kind, params, [number], setting)
                shown = f"{what}: {setting.name}"
                own = f"{plain}/{setting.name}"
                yield WorkItem(own, part, "text", 1, shown, run, (plain,))

    def _task(self, kind: str, params: SamplingParams, number: int) -> Task:
        name, prompt = self._prompts[number % len(self._prompts)]
        params = replace(params, max_tokens=self._evidence.tokens or self._effort.max_tokens)
        if kind == "seeded":
            params = replace(params, seed=(self._effort.seed + number) % 2**63)
        return Task(name, Start(prompt), params)

    def decide_tokens(self, budget: Budget) -> None:
        """Shorter texts if those asked for would take too much of the budget each."""
        most = self._effort.max_tokens
        if self._evidence.tokens or budget.seconds is None or most <= _SHORTEST:
            return
        start = Start(self._prompts[0][1])
        for kind, tokens in (("warming up", 1), ("token", _PROBED)):
            with budget.piece(kind, tokens):
                decode(self._plain, [start], SamplingParams(max_tokens=tokens), 0)
        fitting = int(budget.affords("token") * _SHARE)
        self._evidence.tokens = min(most, max(_SHORTEST, fitting))

    def _decode_plainly(self, kind: str, params: SamplingParams, number: int) -> None:
        task = self._task(kind, params, number)
        (text,) = decode(self._plain, [task.start], task.params, 0)
        self._evidence.plain[f"{kind}/{number}"] = text.tokens

    def _compare(
        self, kind: str, params: SamplingParams, numbers: Sequence[int], setting: ComparedSetting
    ) -> None:
        known = self._evidence.plain
        tasks = [self._task(kind, params, number) for number in numbers]
        check = check_texts(
            self._engine,
            tasks,
            [known[f"{kind}/{number}"] for number in numbers],
            kind,
            setting.name,
            setting.length,
            self._neighbours(numbers) if setting.together else (),
            setting.together,
            self._spell,
        )
        self._evidence.add(check)
        self._evidence.problems += [bug(check, item) for item in check.bugs]

    def _neighbours(self, numbers: Sequence[int]) -> list[Task]:
        """Requests of another kind, shorter and longer, that come and go while others decode."""
        lengths = itertools.cycle((5, 17, 40))
        count = max(_NEIGHBOURS, len(numbers))
        starts = [self._prompts[(numbers[0] + n) % len(self._prompts)] for n in range(count)]
        return [
            Task(name, Start(prompt), replace(_ANY_REQUEST, temperature=0.8, max_tokens=length))
            for (name, prompt), length in zip(starts, lengths, strict=False)
        ]


def _part(kind: str) -> str:
    return "greedy" if kind == "greedy" else "seeded sampling"
