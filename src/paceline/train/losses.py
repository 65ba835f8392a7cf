"""What a draft is trained on: the target's probabilities, its choices, and the text itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def total_variation(
    p: torch.Tensor, q: torch.Tensor, shares: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean over tokens of 1 - sum_x min(p(x), q(x)), from distributions ``[tokens, vocab]``; with
    ``shares [tokens]``, the sum in which each token counts for so much.

    This is the chance that the lossless rules reject a token drafted from q, so as a loss it
    maximises acceptance itself (DistillSpec, Zhou et al. 2023, arXiv 2310.08461).
    """
    return _over_tokens(1 - torch.minimum(p, q).sum(-1), shares)


def _over_tokens(losses: torch.Tensor, shares: torch.Tensor | None) -> torch.Tensor:
    return losses.mean() if shares is None else (losses * shares).sum()


def text_loss(
    logits: torch.Tensor, targets: torch.Tensor, shares: torch.Tensor | None = None
) -> torch.Tensor:
    """Cross-entropy against the text, from logits ``[tokens, vocab]``; ``shares`` as above."""
    return _over_tokens(F.cross_entropy(logits.float(), targets, reduction="none"), shares)


def rows_that_count(shares: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``shares [tokens]`` and the tensors ``[tokens, ...]`` without the tokens that have none.

    What is not to be learnt then costs no softmax over a vocabulary. A compiled graph, whose
    shapes are fixed, keeps them all.
    """
    if torch.compiler.is_compiling() or bool((shares > 0).all()):
        return shares, *tensors
    rows = shares.nonzero()[:, 0]
    return tuple(tensor[rows] for tensor in (shares, *tensors))


def distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    text_weight: float,
    argmax_weight: float = 0.0,
    tv_weight: float = 0.0,
    shares: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss against the teacher's probabilities, its likeliest token, and the text.

    Shapes ``[tokens, vocab]``, ``[tokens, vocab]``, ``[tokens]``. The first term serves sampling:
    cross-entropy, which equals KL(teacher || student) up to the teacher's entropy (Hinton et al.
    2015; DistillSpec), and a share of ``tv_weight`` of it total variation. Greedy acceptance asks
    for nothing but the likeliest token. The mean over the tokens or, with ``shares [tokens]``, the
    sum in which each counts for so much.
    """
    log_q = F.log_softmax(logits.float(), dim=-1)
    p = F.softmax(teacher_logits.float(), dim=-1)
    soft = 1 - text_weight - argmax_weight
    loss = log_q.new_zeros(())
    if tv_weight < 1:
        loss = loss - soft * (1 - tv_weight) * _over_tokens((p * log_q).sum(-1), shares)
    if tv_weight:
        loss = loss + soft * tv_weight * total_variation(p, log_q.exp(), shares)
    if text_weight:
        text = F.nll_loss(log_q, targets, reduction="none")
        loss = loss + text_weight * _over_tokens(text, shares)
    if argmax_weight:
        best = F.nll_loss(log_q, teacher_logits.argmax(-1), reduction="none")
        loss = loss + argmax_weight * _over_tokens(best, shares)
    return loss
