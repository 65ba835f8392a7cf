"""Token-for-token equality with plain decoding: greedy requests, and sampled ones with a seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import NamedTuple

from paceline.core.params import SamplingParams
from paceline.lab.certify.decoding import DecodedOutput, Start, decode
from paceline.lab.certify.difference import explain
from paceline.lab.certify.evidence import Subject, TextCheck, TextDivergence

_NEIGHBOURS = 3  # at least, of the texts in a mixed batch
_SHARE = 0.025  # of what is left of a budget, that one text at one setting may take
_SHORTEST = 16
_TIMED = 4  # tokens that are decoded to see how fast that is


class ComparedSetting(NamedTuple):
    """What a text is decoded with: the draft length; None adapts."""

    name: str
    length: int | None


class TextComparer:
    """Compares texts with plain decoding's, one under one setting at a time."""

    def __init__(self, subject: Subject) -> None:
        self._subject, lengths = subject, subject.lengths
        self.alone = [ComparedSetting(f"draft length {n}, alone", n) for n in lengths]
        if subject.adapts:
            self.alone.append(ComparedSetting("draft length auto, alone", None))
        self.mixed = ComparedSetting(f"draft length {lengths[-1]}, mixed batch", lengths[-1])

    def compare(self, numbers: Sequence[int]) -> None:
        """Each of the texts plainly, then under every setting; those in a batch come last.

        What has no plain text by then is left out.
        """
        subject, plain = self._subject, self._subject.evidence.plain
        for number, kind in product(numbers, subject.kinds):
            shown, name = f"{kind}: {self._text(kind, number).name}", f"{kind}/{number}"
            run = partial(self._decode_plainly, kind, number)
            subject.do(kind, "text", 1, f"{shown}: plain decoding", run, name)
            for setting in self.alone if name in plain else ():
                self._do(kind, [number], setting, shown)
        for kind in subject.kinds if numbers else ():
            if all(f"{kind}/{number}" in plain for number in numbers):
                self._do(kind, numbers, self.mixed, kind)

    def _do(self, kind: str, numbers: Sequence[int], setting: ComparedSetting, shown: str) -> None:
        run = partial(self._compare, kind, numbers, setting)
        name = f"{kind}/{'-'.join(map(str, numbers))}/{setting.name}"
        cost = "mixed" if setting is self.mixed else "text"
        self._subject.do(kind, cost, len(numbers), f"{shown}: {setting.name}", run, name)

    def compared(self, numbers: Iterable[int]) -> int:
        """How many of these were compared under every setting that decodes them alone."""
        done, ends = set(self._subject.evidence.done), ["", *(f"/{s.name}" for s in self.alone)]
        wanted = [f"{kind}/{{}}{end}" for kind, end in product(self._subject.kinds, ends)]
        return sum(all(name.format(number) in done for name in wanted) for number in numbers)

    def decide_tokens(self) -> None:
        """Shorter texts if those asked for would take too much of the budget each."""
        subject, most = self._subject, self._subject.effort.max_tokens
        if subject.evidence.tokens or subject.budget.seconds is None or most <= _SHORTEST:
            return
        for kind, tokens in (("warming up", 1), ("token", _TIMED)):
            with subject.budget.piece(kind, tokens):
                params = SamplingParams(max_tokens=tokens)
                decode(subject.plain, [subject.start(0, params)], 0)
        seconds = subject.budget.estimate("token")
        affordable = _SHARE * subject.budget.left / seconds if seconds else most
        subject.evidence.tokens = min(most, max(_SHORTEST, int(affordable)))

    def _text(self, kind: str, number: int) -> Start:
        subject = self._subject
        tokens = subject.evidence.tokens or subject.effort.max_tokens
        params = replace(subject.kinds[kind], max_tokens=tokens)
        if kind == "seeded":
            params = replace(params, seed=(subject.effort.seed + number) % 2**63)
        return subject.start(number, params)

    def _decode_plainly(self, kind: str, number: int) -> None:
        (plain,) = decode(self._subject.plain, [self._text(kind, number)], 0)
        self._subject.evidence.plain[f"{kind}/{number}"] = plain.tokens

    def _compare(self, kind: str, numbers: Sequence[int], setting: ComparedSetting) -> None:
        texts = [self._text(kind, number) for number in numbers]
        plain = [self._subject.evidence.plain[f"{kind}/{number}"] for number in numbers]
        others: list[Start] = []
        if setting is self.mixed:
            # Requests of another kind, shorter and longer, that come and go while others decode.
            count = max(_NEIGHBOURS, len(numbers))
            for n, tokens in zip(range(count), cycle((5, 17, 40)), strict=False):
                params = SamplingParams(temperature=0.8, max_tokens=tokens)
                others.append(self._subject.start(numbers[0] + n, params))
        self._subject.evidence.add(check_texts(self._subject, texts, plain, kind, setting, others))


def check_texts(
    subject: Subject,
    texts: Sequence[Start],
    plain: Sequence[Sequence[int]],
    kind: str,
    setting: ComparedSetting,
    others: Sequence[Start] = (),
) -> TextCheck:
    """Decode ``texts`` under this setting and compare with ``plain``.

    One after another, or together in a batch that ``others``, which are not compared, join.
    """
    outputs: list[DecodedOutput] = []
    for batch in [[*texts, *others]] if others else [[text] for text in texts]:
        outputs += decode(subject.llm.engine, batch, setting.length)
    ties: list[TextDivergence] = []
    bugs: list[TextDivergence] = []
    for text, expected, output in zip(texts, plain, outputs, strict=False):
        for item, tie in _divergences(subject, text, expected, output.tokens, setting.length):
            (ties if tie else bugs).append(item)
    compared = outputs[: len(texts)]
    drafted, accepted = (sum(getattr(o, n) for o in compared) for n in ("drafted", "accepted"))
    counts = len(texts), sum(map(len, plain)), drafted, accepted
    return TextCheck(kind, setting.name, *counts, tuple(ties), tuple(bugs))


def _divergences(
    subject: Subject,
    text: Start,
    expected: Sequence[int],
    tokens: Sequence[int],
    length: int | None,
) -> Iterator[tuple[TextDivergence, bool]]:
    """All near ties between the two texts, and at their end perhaps one bug; which are ties.

    After a tie the rest is decoded anew behind the beginning of the ``expected`` text. Where rows
    have the same bits whatever rides along, there are none.
    """
    target, decoded = subject.llm.target, subject.llm.tokenizer.decode
    while difference := explain(target, text.prompt, expected, tokens, text.params):
        pair = difference.left, difference.right
        plain, other = (str(decoded([token])) if token >= 0 else "(end)" for token in pair)
        tie = difference.is_tie and not target.backend.same_bits
        yield TextDivergence(text.name, plain, other, difference), tie
        given = tuple(expected[: difference.at + 1])
        if not difference.is_tie or len(given) == len(expected):
            return
        ((tokens, _, _),) = decode(subject.llm.engine, [replace(text, output=given)], length)
