"""For a test: texts from the engine, the distributions of the target, and where two texts part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.batch import Span
from paceline.core.noise import gumbel
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, adjusted, probabilities, probs_of_scores
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


# Tokens of a forward, besides all at once: what plain and speculative steps have. The last few
# tokens are read like that, for keys and values carry what rounding made of them.
_OTHER_SHAPES = (1, 5)
_READ_IN_STEPS = 16


@dataclass(frozen=True)
class Difference:
    """Token ``at`` is ``left`` in one text and ``right`` in the other.

    ``gap``: the distance of their ``scores`` (logits, over the temperature and with the seed's
    noise if sampled; None where there are none). ``step``: the rounding step of the logits;
    ``spread``: how far other batch shapes moved the likeliest ones, on the same scale. ``on_edge``:
    one token stands at the border of the truncated distribution.
    """

    at: int
    left: int
    right: int
    gap: float
    step: float
    on_edge: bool
    scores: tuple[float, float] | None = None
    spread: float = 0.0

    @property
    def is_tie(self) -> bool:
        # Each of the two logits may have been rounded the other way.
        return self.on_edge or self.gap <= 2 * max(self.step, self.spread)


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    """Index at which two token lists or texts part, or None if they are the same."""
    pairs = enumerate(zip(left, right, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))
    return None if at == len(left) == len(right) else at


def explain(
    model: CausalModel,
    prompt: Sequence[int],
    left: Sequence[int],
    right: Sequence[int],
    params: SamplingParams,
) -> Difference | None:
    """Re-score the first position at which two outputs differ; None if they are the same.
    ``params`` of both requests: greedy, or with a seed. If one text goes on where the other ends,
    the gap is infinite."""
    at = first_difference(left, right)
    if at is None:
        return None
    if at >= min(len(left), len(right)):
        return Difference(at, -1, -1, math.inf, 0.0, on_edge=False)
    assert params.greedy or params.seed is not None, "unseeded texts may differ as they like"
    pair, tokens = [left[at], right[at]], [*prompt, *left[:at]]
    logits = _fresh_logits(model, tokens)
    # The distance between neighbouring numbers of the dtype there.
    size = max(float(logits[pair].abs().max()), 1e-6)
    step = float(torch.finfo(model.dtype).eps * 2.0 ** math.floor(math.log2(size)))
    compared = [*logits.topk(min(64, len(logits))).indices.tolist(), *pair]
    others = [_fresh_logits(model, tokens, rows) for rows in _OTHER_SHAPES]
    spread = max(float((logits - other)[compared].abs().max()) for other in others)
    rows = Rows((SequenceView(0, tokens, len(prompt), params),), (0,))
    scores, scale, on_edge = adjusted(logits[None], rows), 1.0, False
    if not params.greedy:
        kept = probs_of_scores(scores, [params])[0] > 0
        on_edge = params.truncates and _at_border(scores[0], kept, pair, 2 * max(step, spread))
        noise = gumbel([params.seed or 0], [len(tokens)], scores.shape[1], scores.device)
        scores, scale = scores / params.temperature + noise, params.temperature
    one, other = scores[0, pair].tolist()
    about = abs(one - other), step / scale, on_edge, (one, other), spread / scale
    return Difference(at, left[at], right[at], *about)


def _at_border(scores: torch.Tensor, kept: torch.Tensor, pair: list[int], tolerance: float) -> bool:
    """Whether one of the pair is the last token that truncation kept, or the first that it cut."""
    if bool(kept.all()):
        return False
    lowest, highest = float(scores[kept].min()), float(scores[~kept].max())
    return any(highest - tolerance <= float(scores[i]) <= lowest + tolerance for i in pair)


@torch.inference_mode()
def _fresh_logits(model: CausalModel, tokens: Sequence[int], rows: int = 0) -> torch.Tensor:
    """float32 [vocab] after the last token, without any history of an engine: in one forward or,
    with ``rows``, the last tokens in forwards of so many each."""
    cache = model.new_cache(1, len(tokens))
    cache.admit(0, tokens)
    cache.reserve(0, len(tokens))
    first = max(1, len(tokens) - _READ_IN_STEPS) if rows else len(tokens)
    ends, begin = [*range(first, len(tokens), rows or 1), len(tokens)], 0
    for end in ends:
        logits = model(cache.batch_of([Span.of(0, begin, tokens[begin:end])]), cache).logits[-1]
        begin = end
    return logits.float()
