"""For a test: texts from the engine, from any point and at any draft length, and the target's
distributions in two batch shapes, from forwards that share nothing with the engine's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.batch import Span
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, probabilities
from paceline.core.sequence import DraftCounts, SequenceView
from paceline.engine.driver import Drive, sequence
from paceline.engine.engine import Engine
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel

String = tuple[int, ...]  # of token ids
# Of scoring.
_ROWS = 512  # of one forward behind the beginning
_TEXTS = 64
_BLOCK = 16
_BATCH = 32  # texts at least whose last tokens are computed together, as in a decoding step
_CROWD = 2048  # rows in which a beginning is read stepwise, as where many requests start


@dataclass(frozen=True)
class Start:
    """Where decoding begins: a prompt, its ``name`` for people, and ``output`` that is given."""

    prompt: String
    params: SamplingParams
    output: String = ()
    name: str = ""

    @property
    def tokens(self) -> String:
        return self.prompt + self.output


def decode(
    engine: Engine, starts: Sequence[Start], length: int | None = None, enough: int | None = None
) -> list[tuple[String, DraftCounts]]:
    """Outputs of all starts, with the given tokens, and what was drafted: in one continuous batch.
    No end token stops them: they have ``max_tokens`` of output, or ``enough`` tokens beyond what
    was given, if that comes first. ``length``: of drafts; None leaves it to the engine's
    controller. Raises StandstillError, and whatever the engine raises."""
    seqs = [
        sequence(s.tokens, replace(s.params, draft_length=length), prompt_length=len(s.prompt))
        for s in starts
    ]
    with Drive(engine, seqs) as drive:
        for _ in drive:
            for seq in list(drive.running.values()):
                if enough is not None and sum(count for _, count in seq.arrivals) >= enough:
                    drive.drop(seq.seq_id)
    ends = [None if enough is None else len(start.output) + enough for start in starts]
    outputs = (tuple(seq.tokens[seq.prompt_length :]) for seq in seqs)
    return [(out[:end], seq.counts) for out, end, seq in zip(outputs, ends, seqs, strict=True)]


class Scorer:
    """Distributions of the token after a start and a string of tokens."""

    def __init__(self, model: CausalModel, start: Start) -> None:
        self._model, self._start = model, start
        self._caches: dict[bool, PagedCache] = {}  # stepwise or not; sequence 0 is the beginning

    def at_once(self, strings: Sequence[String]) -> torch.Tensor:
        """float32 [n, vocab] on the host: all that is not the common beginning in one forward."""
        return self._distributions(strings, stepwise=False)

    def stepwise(self, strings: Sequence[String]) -> torch.Tensor:
        """The same, the last tokens of a batch of texts in a later forward: as in decoding."""
        # Too few texts are repeated: rounding depends on the number of rows.
        copies = -(-_BATCH // max(1, len(strings)))
        return self._distributions(list(strings) * copies, stepwise=True)[: len(strings)]

    @torch.inference_mode()
    def _distributions(self, strings: Sequence[String], stepwise: bool) -> torch.Tensor:
        start, switch = self._start, self._model.rope_switch
        texts = [[*start.tokens, *string] for string in strings]
        # Whole blocks that all texts share; at least the last token of the start is computed anew.
        shared = (len(start.tokens) - 1) // _BLOCK * _BLOCK
        if switch is not None and len(start.tokens) <= switch < max(map(len, texts)):
            shared = 0  # some become so long that the beginning is rotated otherwise
        parts = _parts(texts, shared)
        logits = torch.cat([self._logits(part, stepwise).float().cpu() for part in parts])
        seqs = tuple(SequenceView(0, text, len(start.prompt), start.params) for text in texts)
        return probabilities(logits, Rows(seqs, (0,) * len(seqs)))

    def _logits(self, texts: Sequence[list[int]], stepwise: bool) -> torch.Tensor:
        cache = self._caches.get(stepwise) or self._cache_with_start(stepwise)
        numbered = dict(enumerate(texts, 1))
        begins = [cache.admit(number, text) for number, text in numbered.items()]
        try:
            for number, text in numbered.items():
                cache.reserve(number, len(text))
            for later in (1, 0) if stepwise else (0,):
                ends = [len(text) - later for text in texts]
                rows = zip(numbered.items(), begins, ends, strict=True)
                spans = [Span.of(n, b, text[b:end]) for (n, text), b, end in rows if b < end]
                if spans:
                    output = self._model(cache.batch_of(spans), cache)
                begins = ends
            return output.logits
        finally:
            for number in numbered:
                cache.free(number)

    def _cache_with_start(self, stepwise: bool) -> PagedCache:
        """A new one, the beginning in it: read alone or, ``stepwise``, in a crowd."""
        tokens = self._start.tokens
        crowd = range(max(1, min(_BATCH, _CROWD // len(tokens))) if stepwise else 1)
        blocks = -(-len(tokens) // _BLOCK)
        # For the beginning, and for one part: its rows, a begun block of each text, a long text.
        part = _ROWS // _BLOCK + 2 * _TEXTS + blocks
        size = blocks + max(part, len(crowd) * blocks)
        cache = self._caches[stepwise] = self._model.new_cache(size, _BLOCK)
        for number in crowd:
            cache.admit(number, tokens)
            cache.reserve(number, len(tokens))
        self._model(cache.batch_of([Span.of(number, 0, tokens) for number in crowd]), cache)
        cache.commit(0, tokens, len(tokens))
        for number in crowd[1:]:
            cache.free(number)
        return cache


def _parts(texts: Sequence[list[int]], given: int) -> Iterator[list[list[int]]]:
    """Texts whose tokens behind the ``given`` ones fit into one forward together."""
    part: list[list[int]] = []
    for text in texts:
        rows = sum(len(other) - given for other in (*part, text))
        if part and (rows > _ROWS or len(part) >= _TEXTS):
            yield part
            part = []
        part.append(text)
    yield part
