"""How well a model predicts given text: what quantising it cost, in one figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.errors import DataError
from paceline.model.paged.cache import Feed, PagedCache
from paceline.stages import stage
from paceline.train.data import encode_stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from paceline.model.target import CausalModel

WINDOW = 512  # tokens that are read together; a longer text is read in such parts
_ROWS = 128  # rows whose logits are held at once


@dataclass(frozen=True)
class Perplexity:
    """``tokens`` that were predicted, and the sum of their surprise in ``nats``."""

    tokens: int
    nats: float

    @property
    def value(self) -> float:
        """``exp`` of the mean surprise; 1 would be certainty."""
        return math.exp(self.nats / self.tokens)

    def record(self) -> dict[str, Any]:
        return {"perplexity": self.value, "tokens": self.tokens, "nats": self.nats}


def read_windows(
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    most_tokens: int,
    window: int = WINDOW,
    seed: int | None = None,
) -> list[list[int]]:
    """The texts of a JSONL file (``messages``, ``text``, ...) as token ids, at most so many in all.

    Conversations go through the tokenizer's chat template. ``seed``: documents in another order
    than the file's. Raises DataError if there are none.
    """
    stream = encode_stream(path, tokenizer, loss_on="all")
    bounds = [*stream.starts.tolist(), len(stream.ids)]
    order = np.arange(len(stream.starts))
    if seed is not None:
        np.random.default_rng(seed).shuffle(order)
    found: list[list[int]] = []
    left = most_tokens
    for document in order:
        start, stop = bounds[document], bounds[document + 1]
        for begin in range(start, stop, window):
            ids = stream.ids[begin : min(begin + window, stop, begin + left)].tolist()
            if len(ids) < 2:
                continue
            found.append(ids)
            left -= len(ids)
        if left < 2:
            break
    if not found:
        raise DataError(f"{path} has no text of two tokens or more; give longer texts")
    return found


@torch.inference_mode()
def perplexity(model: CausalModel, windows: Sequence[Sequence[int]]) -> Perplexity:
    """Of every token but the first of each window, as ``model`` computes it in the engine."""
    nats, tokens = 0.0, 0
    longest = max(len(ids) for ids in windows)
    cache = PagedCache(model.cache_shapes, 1, longest, model.dtype, model.device, share=False)
    with stage("reading text for its perplexity", total=len(windows), unit="texts") as progress:
        for ids in windows:
            cache.admit(0, ids)
            cache.reserve(0, len(ids))
            for begin in range(0, len(ids) - 1, _ROWS):
                rows = list(ids[begin : begin + _ROWS])
                batch = cache.batch_of([Feed(0, begin, rows)])
                logits = model(replace(batch, logit_rows=None), cache).logits
                wanted = torch.tensor(ids[begin + 1 : begin + 1 + len(rows)], device=model.device)
                scores = logits[: len(wanted)].float().log_softmax(-1)
                nats -= float(scores.gather(1, wanted[:, None]).double().sum())
                tokens += len(wanted)
            cache.free(0)
            progress.advance()
    return Perplexity(tokens, nats)
