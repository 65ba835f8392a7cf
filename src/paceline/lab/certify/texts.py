"""Token-for-token equality with plain decoding: greedy requests, and sampled ones with a seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.lab.certify.decoding import Start, decode
from paceline.lab.certify.evidence import TaskDivergence, TextCheck
from paceline.lab.certify.schedule import Asked, WorkItem
from paceline.lab.difference import Difference, explain

_NEIGHBOURS = 3  # at least, of the texts in a mixed batch
_SHARE = 0.025  # of what is left of a budget, that one text at one setting may take
_SHORTEST = 16
_PROBED = 4  # tokens that are decoded to see how fast that is
_NEIGHBOUR = SamplingParams(temperature=0.8)


@dataclass(frozen=True)
class ComparedSetting:
    """What a text is decoded with: the draft length (None adapts), and whether in a batch."""

    name: str
    length: int | None
    together: bool = False


def settings_of(lengths: Sequence[int], adapts: bool) -> list[ComparedSetting]:
    compared = [ComparedSetting(f"draft length {length}, alone", length) for length in lengths]
    if adapts:
        compared.append(ComparedSetting("draft length auto, alone", None))
    longest = lengths[-1]
    return [*compared, ComparedSetting(f"draft length {longest}, mixed batch", longest, True)]


@dataclass(frozen=True)
class Task:
    """One text to decode: where it begins, under which parameters, and what people call it."""

    name: str
    start: Start
    params: SamplingParams


class Comparer:
    """Compares texts with plain decoding's, one under one setting at a time."""

    def __init__(
        self, asked: Asked, settings: Sequence[ComparedSetting], spell: Callable[[int], str]
    ) -> None:
        self._asked, self._settings, self._spell = asked, settings, spell

    def pieces(self, numbers: Sequence[int]) -> Iterator[WorkItem]:
        """For each of the texts: plain, then every setting. Those in a batch come last.

        A greedy text is decoded once for every prompt that there is: again it would only be the
        same.
        """
        known, kinds = len(self._asked.prompts), self._asked.kinds
        numbers_of = {kind: [n for n in numbers if kind == "seeded" or n < known] for kind in kinds}
        for number, kind in itertools.product(numbers, kinds):
            if number in numbers_of[kind]:
                shown = f"{kind}: {self._asked.prompt(number)[0]}"
                run = partial(self._decode_plainly, kind, number)
                yield self._item(kind, f"{kind}/{number}", 1, f"{shown}: plain decoding", run)
                yield from self._settled(kind, [number], False, f"{kind}/{number}", shown)
        for kind, known_numbers in numbers_of.items():
            if known_numbers:
                yield from self._settled(
                    kind,
                    known_numbers,
                    True,
                    f"{kind}/{known_numbers[0]}-{known_numbers[-1]}",
                    kind,
                )

    def _settled(
        self, kind: str, numbers: Sequence[int], together: bool, name: str, shown: str
    ) -> Iterator[WorkItem]:
        """These texts under every setting, alone or in a batch."""
        for setting in self._settings:
            if setting.together is together:
                run = partial(self._compare, kind, numbers, setting)
                needs = [f"{kind}/{number}" for number in numbers]
                what = (f"{name}/{setting.name}", len(numbers), f"{shown}: {setting.name}")
                yield self._item(kind, *what, run, "mixed" if together else "text", needs)

    def _item(
        self,
        kind: str,
        name: str,
        size: int,
        shown: str,
        run: Callable[[], None],
        cost: str = "text",
        needs: Sequence[str] = (),
    ) -> WorkItem:
        part = "greedy" if kind == "greedy" else "seeded sampling"
        return WorkItem(name, part, cost, size, shown, run, tuple(needs))

    def _task(self, kind: str, number: int) -> Task:
        name, prompt = self._asked.prompt(number)
        tokens = self._asked.evidence.tokens or self._asked.effort.max_tokens
        params = replace(self._asked.kinds[kind], max_tokens=tokens)
        if kind == "seeded":
            params = replace(params, seed=(self._asked.effort.seed + number) % 2**63)
        return Task(name, Start(prompt), params)

    def decide_tokens(self) -> None:
        """Shorter texts if those asked for would take too much of the budget each."""
        budget, evidence = self._asked.budget, self._asked.evidence
        most = self._asked.effort.max_tokens
        if evidence.tokens or budget.seconds is None or most <= _SHORTEST:
            return
        start = Start(self._asked.prompt(0)[1])
        for kind, tokens in (("warming up", 1), ("token", _PROBED)):
            with budget.piece(kind, tokens):
                decode(self._asked.plain, [start], SamplingParams(max_tokens=tokens), 0)
        evidence.tokens = min(most, max(_SHORTEST, int(budget.affords("token") * _SHARE)))

    def _decode_plainly(self, kind: str, number: int) -> None:
        task = self._task(kind, number)
        (text,) = decode(self._asked.plain, [task.start], task.params, 0)
        self._asked.evidence.plain[f"{kind}/{number}"] = text.tokens

    def _compare(self, kind: str, numbers: Sequence[int], setting: ComparedSetting) -> None:
        tasks = [self._task(kind, number) for number in numbers]
        plain = [self._asked.evidence.plain[f"{kind}/{number}"] for number in numbers]
        others = self._neighbours(numbers) if setting.together else ()
        self._asked.evidence.add(
            check_texts(self._asked.engine, tasks, plain, kind, setting, others, self._spell)
        )

    def _neighbours(self, numbers: Sequence[int]) -> list[Task]:
        """Requests of another kind, shorter and longer, that come and go while others decode."""
        differences = []
        for n, tokens in zip(range(max(_NEIGHBOURS, len(numbers))), itertools.cycle((5, 17, 40))):
            name, prompt = self._asked.prompt(numbers[0] + n)
            differences.append(Task(name, Start(prompt), replace(_NEIGHBOUR, max_tokens=tokens)))
        return differences


def check_texts(
    engine: Engine,
    tasks: Sequence[Task],
    plain: Sequence[Sequence[int]],
    kind: str,
    setting: ComparedSetting,
    others: Sequence[Task] = (),
    spell: Callable[[int], str] = str,
) -> TextCheck:
    """Decode ``tasks`` under this setting and compare with ``plain``.

    One after another, or together in a batch that ``others``, which are not compared, join.
    """
    batches = [[*tasks, *others]] if setting.together else [[task] for task in tasks]
    texts = []
    for batch in batches:
        starts, params = [task.start for task in batch], [task.params for task in batch]
        texts += decode(engine, starts, params, setting.length)
    exact = engine.target.backend.same_bits
    ties: list[TaskDivergence] = []
    bugs: list[TaskDivergence] = []
    for task, expected, text in zip(tasks, plain, texts, strict=False):
        for item in partings(engine, task, expected, text.tokens, setting.length):
            left, right = (spell(t) if t >= 0 else "(end)" for t in (item.left, item.right))
            parting = TaskDivergence(task.name, left, right, item)
            (ties if item.is_tie and not exact else bugs).append(parting)
    plain_texts = texts[: len(tasks)]
    drafted, accepted = (
        sum(text.drafted for text in plain_texts),
        sum(text.accepted for text in plain_texts),
    )
    tokens = sum(map(len, plain))
    return TextCheck(
        kind, setting.name, len(tasks), tokens, drafted, accepted, tuple(ties), tuple(bugs)
    )


def partings(
    engine: Engine,
    task: Task,
    expected: Sequence[int],
    text: Sequence[int],
    length: int | None,
) -> list[Difference]:
    """All near ties between the two texts, and at their end perhaps one bug.

    After a tie the rest is decoded anew behind the beginning of the ``expected`` text.
    """
    differing: list[Difference] = []
    while True:
        difference = explain(engine.target, task.start.prompt, expected, text, task.params)
        if difference is None:
            return differing
        differing.append(difference)
        given = tuple(expected[: difference.at + 1])
        if not difference.is_tie or len(given) == len(expected):
            return differing
        (again,) = decode(engine, [replace(task.start, output=given)], task.params, length)
        text = again.tokens
