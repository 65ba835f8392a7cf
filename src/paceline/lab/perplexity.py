"""Perplexity of a model on given text: what quantisation costs, in one figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from paceline.core.batch import Span
from paceline.core.stages import stage
from paceline.errors import DataError
from paceline.lab.bench.prompts import load_prompts
from paceline.model.target import CausalModel
from paceline.train.data import encode_stream

WINDOW = 512  # tokens per window; longer texts are split
EVALUATED = 4096  # tokens in all
_ROWS = 128  # rows per forward, which bounds the memory for logits


@dataclass(frozen=True)
class Perplexity:
    """``tokens`` that were predicted, and the sum of their negative log-likelihood in ``nats``."""

    tokens: int
    nats: float

    @property
    def value(self) -> float:
        """The perplexity: ``exp`` of the mean negative log-likelihood; 1 would be certainty."""
        return math.exp(self.nats / self.tokens)

    def record(self) -> dict[str, Any]:
        return {"perplexity": self.value, "tokens": self.tokens, "nats": self.nats}


def read_windows(
    path: Path, tokenizer: PreTrainedTokenizerFast, most_tokens: int, seed: int | None = None
) -> list[list[int]]:
    """The texts of a JSONL file (``messages``, ``text``, ...) as token ids, at most ``most_tokens``
    in all; with a ``seed`` in random order. Raises DataError if there are none."""
    stream = encode_stream(path, tokenizer, loss_on="all")
    documents = np.split(stream.ids, stream.starts[1:])
    if seed is not None:
        np.random.default_rng(seed).shuffle(documents)
    parts = (ids[i : i + WINDOW].tolist() for ids in documents for i in range(0, len(ids), WINDOW))
    windows = _cut(parts, most_tokens)
    if not windows:
        raise DataError(f"{path} has no text of two tokens or more; give longer texts")
    return windows


def shipped_windows(tokenizer: PreTrainedTokenizerFast, most_tokens: int) -> list[list[int]]:
    """The prompts of ``paceline bench`` as plain token ids, at most ``most_tokens`` in all."""
    texts = [prompt.text for prompt in load_prompts()]
    return _cut((ids[:WINDOW] for ids in tokenizer(texts)["input_ids"]), most_tokens)


def _cut(texts: Iterable[list[int]], most_tokens: int) -> list[list[int]]:
    """The first texts, up to ``most_tokens`` in all, of two tokens or more."""
    kept, left = list[list[int]](), most_tokens
    for ids in texts:
        if len(ids[:left]) > 1:
            kept.append(ids[:left])
            left -= len(kept[-1])
    return kept


@torch.inference_mode()
def perplexity(model: CausalModel, windows: Sequence[Sequence[int]]) -> Perplexity:
    """The perplexity of all tokens but the first of each window, as the engine computes them."""
    nats, tokens = 0.0, 0
    longest = max(len(ids) for ids in windows)
    cache = model.new_cache(1, longest, share=False)
    with stage("reading text for its perplexity", total=len(windows), unit="texts") as progress:
        for ids in windows:
            cache.admit(0, ids)
            cache.reserve(0, len(ids))
            for begin in range(0, len(ids) - 1, _ROWS):
                rows = list(ids[begin : begin + _ROWS])
                batch = cache.batch_of([Span.of(0, begin, rows)])
                logits = model(replace(batch, logit_rows=None), cache).logits
                wanted = torch.tensor(ids[begin + 1 : begin + 1 + len(rows)], device=model.device)
                scores = logits[: len(wanted)].float().log_softmax(-1)
                nats -= float(scores.gather(1, wanted[:, None]).double().sum())
                tokens += len(wanted)
            cache.free(0)
            progress.advance()
    return Perplexity(tokens, nats)
