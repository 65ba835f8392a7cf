"""How likely the tokens of a prompt are, of the rows that a step reads it with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.batch import TokenLogprob
from paceline.core.ranking import top
from paceline.core.transfer import to_device


@torch.inference_mode()
def prompt_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """Log-softmax of the logits [R, V] at the R tokens that follow their rows, with the ``count``
    likeliest of each row. As the model sees it: without bias, penalties or temperature."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, to_device(list(tokens), logits.device).unsqueeze(1)).squeeze(1)
    best = top(logprobs, min(count, logits.shape[1]))
    values = torch.cat([own.unsqueeze(1), logprobs.gather(1, best)], 1).to(torch.float64).tolist()
    return tuple(
        TokenLogprob(token, row[0], tuple(zip(ids, row[1:], strict=True)))
        for token, row, ids in zip(tokens, values, best.tolist(), strict=True)
    )
