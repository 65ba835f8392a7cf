"""Token-for-token equality with plain decoding: greedy requests, and sampled ones with a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product

from paceline.core.params import SamplingParams
from paceline.core.sequence import DraftCounts
from paceline.lab.certify.certificate import TextCheck, TextDivergence
from paceline.lab.certify.decoding import Start, String, decode
from paceline.lab.certify.difference import explain
from paceline.lab.certify.subject import Subject

Pair = tuple[Start, String]  # and plain decoding's output
_NEIGHBOURS = 3  # at least, of the texts in a mixed batch
_SHARE = 0.025  # of what is left of a budget, that one text at one setting may take
_SHORTEST = 16
_TIMED = 4  # tokens that are decoded to see how fast that is


def compare_texts(subject: Subject, numbers: Sequence[int]) -> None:
    """Each of the texts plainly, then under every setting; those in a batch come last. What has no
    plain text by then is left out."""
    plain = subject.evidence.plain
    for number, kind in product(numbers, subject.kinds):
        text, name = _text(subject, kind, number), f"{kind}/{number}"
        run, shown = partial(_decode_plainly, subject, name, text), f"{kind}: {text.name}"
        subject.do(kind, "text", 1, f"{shown}: plain decoding", run, name)
        for setting in subject.alone if name in plain else ():
            run = partial(_compare, subject, kind, [number], setting)
            subject.do(kind, "text", 1, f"{shown}: {setting}", run, f"{name}/{setting}")
    for kind in subject.kinds if numbers else ():
        if all(f"{kind}/{number}" in plain for number in numbers):
            run = partial(_compare, subject, kind, numbers, subject.mixed)
            name = f"{kind}/{'-'.join(map(str, numbers))}/{subject.mixed}"
            subject.do(kind, "mixed", len(numbers), f"{kind}: {subject.mixed}", run, name)


def decide_tokens(subject: Subject) -> None:
    """Shorter texts if those asked for would take too much of the budget each."""
    budget, most = subject.budget, subject.effort.max_tokens
    if subject.evidence.tokens or budget.seconds is None or most <= _SHORTEST:
        return
    for kind, tokens in (("warming up", 1), ("token", _TIMED)):
        with budget.piece(kind, tokens):
            decode(subject.plain, [subject.start(0, SamplingParams(max_tokens=tokens))], 0)
    seconds = budget.estimate("token")
    affordable = _SHARE * budget.left / seconds if seconds else most
    subject.evidence.tokens = min(most, max(_SHORTEST, int(affordable)))


def _text(subject: Subject, kind: str, number: int) -> Start:
    tokens = subject.evidence.tokens or subject.effort.max_tokens
    seed = (subject.effort.seed + number) % 2**63 if kind == "seeded" else None
    return subject.start(number, replace(subject.kinds[kind], max_tokens=tokens, seed=seed))


def _decode_plainly(subject: Subject, name: str, text: Start) -> None:
    ((subject.evidence.plain[name], _),) = decode(subject.plain, [text], 0)


def _compare(subject: Subject, kind: str, numbers: Sequence[int], setting: str) -> None:
    plain, others = subject.evidence.plain, list[Start]()
    texts = [(_text(subject, kind, number), plain[f"{kind}/{number}"]) for number in numbers]
    if setting == subject.mixed:
        # Requests of another kind, shorter and longer, that come and go while others decode.
        count = max(_NEIGHBOURS, len(numbers))
        for n, tokens in zip(range(count), cycle((5, 17, 40)), strict=False):
            params = SamplingParams(temperature=0.8, max_tokens=tokens)
            others.append(subject.start(numbers[0] + n, params))
    subject.evidence.add(check_texts(subject, kind, setting, texts, others))


def check_texts(
    subject: Subject, kind: str, setting: str, texts: Sequence[Pair], others: Sequence[Start] = ()
) -> TextCheck:
    """Decode ``texts`` in one batch under this setting and compare them with plain decoding's.
    ``others`` join the batch and are not compared."""
    length = subject.alone.get(setting, subject.lengths[-1])
    batch = [*(text for text, _ in texts), *others]
    outputs = decode(subject.llm.engine, batch, length)[: len(texts)]
    parted: dict[bool, list[TextDivergence]] = {True: [], False: []}  # by whether it is a tie
    for text, (tokens, _) in zip(texts, outputs, strict=True):
        for item, tie in _divergences(subject, *text, tokens, length):
            parted[tie].append(item)
    counts = sum((counts for _, counts in outputs), DraftCounts())
    compared = len(texts), sum(len(plain) for _, plain in texts), counts.drafted, counts.accepted
    return TextCheck(kind, setting, *compared, tuple(parted[True]), tuple(parted[False]))


def _divergences(
    subject: Subject, text: Start, expected: String, tokens: String, length: int | None
) -> Iterator[tuple[TextDivergence, bool]]:
    """All near ties between the two texts, and at their end perhaps one bug; which are ties (none
    on a backend of ``same_bits``). After a tie the rest is decoded anew behind the beginning of the
    ``expected`` text."""
    target, decoded = subject.llm.target, subject.llm.tokenizer.decode
    while difference := explain(target, text.prompt, expected, tokens, text.params):
        pair = difference.left, difference.right
        plain, other = (str(decoded([token])) if token >= 0 else "(end)" for token in pair)
        tie, known = difference.is_tie and not target.backend.same_bits, vars(difference)
        yield TextDivergence(**known, text=text.name, plain=plain, speculative=other), tie
        given = expected[: difference.at + 1]
        if not difference.is_tie or len(given) == len(expected):
            return
        ((tokens, _),) = decode(subject.llm.engine, [replace(text, output=given)], length)
