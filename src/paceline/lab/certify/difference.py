"""Where two texts of one request part, and whether rounding explains it: logits differ a little in
another batch shape. Of two tokens whose scores tie within that distance either may be chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.core.batch import Span
from paceline.core.noise import gumbel
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, adjusted, probs_of_scores
from paceline.core.sequence import SequenceView

if TYPE_CHECKING:
    from paceline.model.target import CausalModel


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
