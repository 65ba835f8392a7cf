"""How likely the tokens of a prompt are, of the rows that a step reads it with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.params import TokenLogprob
from paceline.core.ranking import top
from paceline.core.transfer import to_device

_MOST_LOGITS = 2**24  # of one step, as the model gives them
_MOST_SCORED = 2**21  # of them in float32 at a time: several copies are made


def most_rows(vocab_size: int) -> int:
    """Rows that one step may score: their logits take at most 64 MiB in float32."""
    return max(1, _MOST_LOGITS // vocab_size)


def scoring_bytes(vocab_size: int, step_tokens: int) -> int:
    """Memory that scoring takes in a step of so many tokens: the logits, and three copies of a
    part."""
    rows = min(step_tokens, most_rows(vocab_size))
    return 4 * vocab_size * (rows + 3 * min(rows, _part(vocab_size)))


def _part(vocab_size: int) -> int:
    return max(1, _MOST_SCORED // vocab_size)


@torch.inference_mode()
def prompt_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """Log-softmax of the logits [R, V] at the R tokens that follow their rows, with the ``count``
    likeliest of each row. As the model sees it: without bias, penalties or temperature."""
    part, scored = _part(logits.shape[1]), list[TokenLogprob]()
    for first in range(0, len(tokens), part):
        ids = list(tokens[first : first + part])
        logprobs = torch.log_softmax(logits[first : first + part].float(), dim=-1)
        chosen = logprobs.gather(1, to_device(ids, logits.device).unsqueeze(1))
        best = top(logprobs, min(count, logits.shape[1]))
        values = torch.cat([chosen, logprobs.gather(1, best)], 1).to(torch.float64).tolist()
        scored += (
            TokenLogprob(token, row[0], tuple(zip(likeliest, row[1:], strict=True)))
            for token, row, likeliest in zip(ids, values, best.tolist(), strict=True)
        )
    return tuple(scored)
