"""What the tests of certify need: outputs of the engine, the target's next-token distributions, and
an explanation of the first difference between two outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.batch import Span
from paceline.core.noise import gumbel
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, adjust_logits, probabilities, scores_to_probs
from paceline.core.sequence import DraftCounts, SequenceView
from paceline.engine.driver import Drive, sequence
from paceline.engine.engine import Engine
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel

TokenIds = tuple[int, ...]
# Sizes of the Scorer's forwards.
_MAX_ROWS = 1024  # after the shared beginning
_MAX_TEXTS = 64
_BLOCK_SIZE = 16
_MIN_BATCH = 32  # texts whose last tokens are computed together, as in a decoding step
# Rows of the stepwise prefill of the beginning: as when many requests start at once.
_PREFILL_ROWS = 2048


@dataclass(frozen=True)
class Start:
    """Where decoding starts: a prompt and the ``output`` after it; ``name`` is for reports."""

    prompt: TokenIds
    params: SamplingParams
    output: TokenIds = ()
    name: str = ""

    @property
    def tokens(self) -> TokenIds:
        return self.prompt + self.output


def decode(
    engine: Engine,
    starts: Sequence[Start],
    draft_length: int | None = None,
    max_new_tokens: int | None = None,
) -> list[tuple[TokenIds, DraftCounts]]:
    """Decode all starts in one continuous batch; returns each whole output (with the given tokens)
    and its draft counts. End tokens are ignored: an output ends at ``max_tokens`` of its params, or
    earlier after ``max_new_tokens`` beyond the given ones. ``draft_length`` None leaves the length
    to the engine's controller. Raises StandstillError, and what the engine raises."""
    seqs = []
    for s in starts:
        params = replace(s.params, draft_length=draft_length)
        seqs.append(sequence(s.tokens, params, prompt_length=len(s.prompt)))
    with Drive(engine, seqs) as drive:
        for _ in drive:
            for seq in list(drive.running.values()):
                new_tokens = sum(count for _, count in seq.arrivals)
                if max_new_tokens is not None and new_tokens >= max_new_tokens:
                    drive.drop(seq.seq_id)
    ends = [None if max_new_tokens is None else len(s.output) + max_new_tokens for s in starts]
    outputs = (tuple(seq.tokens[seq.prompt_length :]) for seq in seqs)
    return [(out[:end], seq.counts) for out, end, seq in zip(outputs, ends, seqs, strict=True)]


class Scorer:
    """Computes the target's distribution of the token that follows a start and a token string."""

    def __init__(self, model: CausalModel, start: Start) -> None:
        self._model, self._start = model, start
        # By whether forwards are stepwise. Sequence 0 of each holds the start's tokens.
        self._caches: dict[bool, PagedCache] = {}

    def at_once(self, strings: Sequence[TokenIds]) -> torch.Tensor:
        """float32 [n, vocab] on the host. All tokens after the shared start in one forward."""
        return self._distributions(strings, stepwise=False)

    def stepwise(self, strings: Sequence[TokenIds]) -> torch.Tensor:
        """The same, but with all last tokens in a forward of their own, as in a decoding step."""
        # Few texts are repeated to a full batch, because rounding depends on the number of rows.
        copies = -(-_MIN_BATCH // max(1, len(strings)))
        return self._distributions(list(strings) * copies, stepwise=True)[: len(strings)]

    @torch.inference_mode()
    def _distributions(self, strings: Sequence[TokenIds], stepwise: bool) -> torch.Tensor:
        start, switch = self._start, self._model.rope_switch
        texts = [[*start.tokens, *string] for string in strings]
        longest = max(map(len, texts))
        # All texts share these full blocks; the start's last token is always computed again.
        shared = (len(start.tokens) - 1) // _BLOCK_SIZE * _BLOCK_SIZE
        if switch is not None and len(start.tokens) <= switch < longest:
            shared = 0  # longer texts use other RoPE frequencies, so their beginning differs
        size = min(_MAX_TEXTS, max(1, _MAX_ROWS // (longest - shared)))
        batches = (texts[first : first + size] for first in range(0, len(texts), size))
        logits = torch.cat([self._logits(batch, stepwise).float().cpu() for batch in batches])
        seqs = tuple(SequenceView(0, text, len(start.prompt), start.params) for text in texts)
        return probabilities(logits, Rows(seqs, (0,) * len(seqs)))

    def _logits(self, texts: Sequence[list[int]], stepwise: bool) -> torch.Tensor:
        cache = self._caches.get(stepwise) or self._cache_with_start(stepwise)
        numbered = dict(enumerate(texts, 1))
        begins = [cache.admit(number, text) for number, text in numbered.items()]
        try:
            for number, text in numbered.items():
                cache.reserve(number, len(text))
            for withheld in (1, 0) if stepwise else (0,):
                ends = [len(text) - withheld for text in texts]
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
        """A new cache after the prefill of the start: alone, or with copies if ``stepwise``."""
        tokens = self._start.tokens
        copies = range(max(1, min(_MIN_BATCH, _PREFILL_ROWS // len(tokens))) if stepwise else 1)
        blocks = -(-len(tokens) // _BLOCK_SIZE)
        # Room for the start and one batch: its rows, partial blocks of each text, one long text.
        batch_blocks = _MAX_ROWS // _BLOCK_SIZE + 2 * _MAX_TEXTS + blocks
        num_blocks = blocks + max(batch_blocks, len(copies) * blocks)
        cache = self._caches[stepwise] = self._model.new_cache(num_blocks, _BLOCK_SIZE)
        for number in copies:
            cache.admit(number, tokens)
            cache.reserve(number, len(tokens))
        self._model(cache.batch_of([Span.of(number, 0, tokens) for number in copies]), cache)
        cache.commit(0, tokens, len(tokens))
        for number in copies[1:]:
            cache.free(number)
        return cache


# Rows per forward of plain and of speculative steps, beside the one forward over all tokens. The
# last tokens are computed in such forwards, because keys and values carry their rounding, too.
_STEP_ROWS = (1, 5)
_STEPWISE_TOKENS = 16


@dataclass(frozen=True)
class Difference:
    """Token ``at`` is ``left`` in one text and ``right`` in the other.

    ``scores``: their logits, for sampled text divided by the temperature and with the seed's Gumbel
    noise; None if one text has ended. ``gap``: the difference of the scores. ``step``: the rounding
    step of the logits' dtype. ``spread``: how far other batch shapes moved the likeliest logits, on
    the same scale. ``on_edge``: one of the tokens is at the edge of the truncated distribution."""

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
        # Twice, because each of the two logits may be off by one rounding step.
        return self.on_edge or self.gap <= 2 * max(self.step, self.spread)


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    """Index at which two token lists or texts differ first, or None if they are the same."""
    pairs = enumerate(zip(left, right, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
    return None if at == len(left) == len(right) else at


def explain(
    model: CausalModel,
    prompt: Sequence[int],
    left: Sequence[int],
    right: Sequence[int],
    params: SamplingParams,
) -> Difference | None:
    """Re-score the first position at which two outputs of requests with these ``params`` (greedy or
    seeded) differ; None if they do not. The gap is infinite where only one text continues."""
    at = first_difference(left, right)
    if at is None:
        return None
    if at >= min(len(left), len(right)):
        return Difference(at, -1, -1, math.inf, 0.0, on_edge=False)
    assert params.greedy or params.seed is not None, "unseeded texts may differ as they like"
    pair, tokens = [left[at], right[at]], [*prompt, *left[:at]]
    logits = _fresh_logits(model, tokens)
    # The distance between neighbouring numbers of the dtype at the size of these logits.
    size = max(float(logits[pair].abs().max()), 1e-6)
    step = float(torch.finfo(model.dtype).eps * 2.0 ** math.floor(math.log2(size)))
    compared = [*logits.topk(min(64, len(logits))).indices.tolist(), *pair]
    others = [_fresh_logits(model, tokens, rows) for rows in _STEP_ROWS]
    spread = max(float((logits - other)[compared].abs().max()) for other in others)
    rows = Rows((SequenceView(0, tokens, len(prompt), params),), (0,))
    scores, scale, on_edge = adjust_logits(logits[None], rows), 1.0, False
    if not params.greedy:
        kept, tolerance = scores_to_probs(scores, [params])[0] > 0, 2 * max(step, spread)
        if params.truncates and not bool(kept.all()):
            # Is one of them the last token that truncation keeps, or the first that it removes?
            lowest, highest = float(scores[0, kept].min()), float(scores[0, ~kept].max())
            edge = highest - tolerance, lowest + tolerance
            on_edge = any(edge[0] <= score <= edge[1] for score in scores[0, pair].tolist())
        noise = gumbel([params.seed or 0], [len(tokens)], scores.shape[1], scores.device)
        scores, scale = scores / params.temperature + noise, params.temperature
    a, b = scores[0, pair].tolist()
    return Difference(
        at, left[at], right[at], abs(a - b), step / scale, on_edge, (a, b), spread / scale
    )


@torch.inference_mode()
def _fresh_logits(model: CausalModel, tokens: Sequence[int], rows: int = 0) -> torch.Tensor:
    """float32 [vocab] logits after the last token, from an empty cache. One forward over all tokens
    or, with ``rows``, the last tokens in forwards of that many rows."""
    cache = model.new_cache(1, len(tokens))
    cache.admit(0, tokens)
    cache.reserve(0, len(tokens))
    first = max(1, len(tokens) - _STEPWISE_TOKENS) if rows else len(tokens)
    ends, begin = [*range(first, len(tokens), rows or 1), len(tokens)], 0
    for end in ends:
        logits = model(cache.batch_of([Span.of(0, begin, tokens[begin:end])]), cache).logits[-1]
        begin = end
    return logits.float()
