"""Token-for-token equality with plain decoding: greedy requests, and sampled ones with a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.core.params import SamplingParams
from paceline.difference import Difference, explain
from paceline.engine.engine import Engine
from paceline.model.target import CausalModel
from paceline.tools.certify.decoding import DecodedOutput, Start, decode


@dataclass(frozen=True)
class Task:
    """One text to decode: where it begins, under which parameters, and what people call it."""

    name: str
    start: Start
    params: SamplingParams


@dataclass(frozen=True)
class TaskDivergence:
    """Where the text of a task leaves the plain one, re-scored; both tokens spelt out."""

    task: str
    plain: str
    speculative: str
    difference: Difference


@dataclass(frozen=True)
class TextCheck:
    """All tasks under one setting against plain decoding.

    ``ties``: differences that rounding explains. After each the comparison went on from the plain
    text, so a later bug is not hidden behind it. ``bugs``: differences that it does not explain;
    the rest of such a text is not looked at.
    """

    kind: str  # "greedy" or "seeded"
    setting: str
    texts: int
    tokens: int
    drafted: int
    accepted: int
    ties: tuple[TaskDivergence, ...]
    bugs: tuple[TaskDivergence, ...]


def check_texts(
    engine: Engine,
    tasks: Sequence[Task],
    plain: Sequence[Sequence[int]],
    kind: str,
    setting: str,
    length: int | None,
    others: Sequence[Task] = (),
    together: bool = False,
    spell: Callable[[int], str] = str,
    advance: Callable[[], None] = lambda: None,
) -> TextCheck:
    """Decode ``tasks`` at this draft length (None: the engine's own) and compare with ``plain``.

    One after another, or ``together`` in a batch that ``others``, which are not compared, join.
    ``advance`` is called after each task.
    """
    batch: Sequence[DecodedOutput] = ()
    if together:
        everyone = [*tasks, *others]
        batch = decode(engine, [t.start for t in everyone], [t.params for t in everyone], length)
    ties: list[TaskDivergence] = []
    bugs: list[TaskDivergence] = []
    drafted = accepted = 0
    for place, (task, expected) in enumerate(zip(tasks, plain, strict=True)):
        if together:
            text = batch[place]
        else:
            (text,) = decode(engine, [task.start], task.params, length)
        drafted, accepted = drafted + text.drafted, accepted + text.accepted
        found = partings(engine, task, expected, text.tokens, length)
        for item in found:
            left, right = (spell(t) if t >= 0 else "(end)" for t in (item.left, item.right))
            parting = TaskDivergence(task.name, left, right, item)
            (ties if item.is_tie else bugs).append(parting)
        advance()
    tokens = sum(map(len, plain))
    return TextCheck(kind, setting, len(tasks), tokens, drafted, accepted, tuple(ties), tuple(bugs))


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
    model: CausalModel = engine.target
    found: list[Difference] = []
    while True:
        difference = explain(model, task.start.prompt, expected, text, task.params)
        if difference is None:
            return found
        found.append(difference)
        if not difference.is_tie:
            return found
        given = tuple(expected[: difference.at + 1])
        if len(given) == len(expected):
            return found
        start = replace(task.start, output=given)
        (again,) = decode(engine, [start], task.params, length)
        text = again.tokens
