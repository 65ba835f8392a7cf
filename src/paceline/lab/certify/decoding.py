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
from paceline.model.target import CausalModel

TokenIds = tuple[int, ...]
_BLOCK_SIZE = 16


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


@torch.inference_mode()
def next_probabilities(
    model: CausalModel, start: Start, strings: Sequence[TokenIds]
) -> torch.Tensor:
    """float32 [n, vocab] on the host: the target's distributions of the token that follows the
    start and each of the ``strings``, from forwards without an engine."""
    texts = [[*start.tokens, *string] for string in strings]
    cache = model.new_cache(2 * max(map(len, texts)) // _BLOCK_SIZE + 2, _BLOCK_SIZE)
    logits = []
    for number, text in enumerate(texts):
        begin = cache.admit(number, text)  # after the full blocks that earlier texts had, too
        cache.reserve(number, len(text))
        batch = cache.batch_of([Span.of(number, begin, text[begin:])])
        logits.append(model(batch, cache).logits[-1].float().cpu())
        cache.commit(number, text, len(text))
        cache.free(number)
    seqs = tuple(SequenceView(0, text, len(start.prompt), start.params) for text in texts)
    return probabilities(torch.stack(logits), Rows(seqs, (0,) * len(seqs)))


# Rows per forward of plain and of speculative steps, beside the one forward over all tokens. The
# last tokens are computed in such forwards, because keys and values carry their rounding, too.
_STEP_ROWS = (1, 5)
_STEPWISE_TOKENS = 16


@dataclass(frozen=True)
class Difference:
    """Token ``at`` is ``left`` in one text and ``right`` in the other (-1 where a text has ended).
    ``gap``: the difference of their scores, which are logits or, for sampled text, logits over the
    temperature plus the seed's noise. ``rounding``: the largest gap that rounding explains."""

    at: int
    left: int
    right: int
    gap: float
    rounding: float

    @property
    def is_tie(self) -> bool:
        return self.gap <= self.rounding


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
        return Difference(at, -1, -1, math.inf, 0.0)
    assert params.greedy or params.seed is not None, "unseeded texts may differ as they like"
    pair, tokens = [left[at], right[at]], [*prompt, *left[:at]]
    logits = _fresh_logits(model, tokens)
    # The distance between neighbouring numbers of the dtype at the size of these logits.
    size = max(float(logits[pair].abs().max()), 1e-6)
    step = float(torch.finfo(model.dtype).eps * 2.0 ** math.floor(math.log2(size)))
    compared = [*logits.topk(min(64, len(logits))).indices.tolist(), *pair]
    others = [_fresh_logits(model, tokens, rows) for rows in _STEP_ROWS]
    spread = max(float((logits - other)[compared].abs().max()) for other in others)
    rounding = 2 * max(step, spread)  # twice, because each of the two logits may be off
    rows = Rows((SequenceView(0, tokens, len(prompt), params),), (0,))
    scores = adjust_logits(logits[None], rows)
    if params.greedy:
        a, b = scores[0, pair].tolist()
        return Difference(at, left[at], right[at], abs(a - b), rounding)
    noise = gumbel([params.seed or 0], [len(tokens)], scores.shape[1], scores.device)
    a, b = (scores / params.temperature + noise)[0, pair].tolist()
    gap, kept = abs(a - b), scores_to_probs(scores, [params])[0] > 0
    if not bool(kept.all()):
        # Rounding may also move a token over the edge of truncation: it is then between the last
        # score that is kept and the first that is not, or near them.
        lowest, highest = float(scores[0, kept].min()), float(scores[0, ~kept].max())
        edge = min(max(highest - s, s - lowest) for s in scores[0, pair].tolist())
        gap = min(gap, max(0.0, edge) / params.temperature)
    return Difference(at, left[at], right[at], gap, rounding / params.temperature)


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
