"""What a draft is trained on: the target's probabilities, its choices, and the text itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of 1 - sum_x min(p(x), q(x)), from laws ``[tokens, vocab]``.

    This is the chance that the lossless rules reject a token drafted from q, so as a loss it
    maximises acceptance itself (DistillSpec, Zhou et al. 2023, arXiv 2310.08461).
    """
    return 1 - torch.minimum(p, q).sum(-1).mean()


def distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    text_weight: float,
    argmax_weight: float = 0.0,
    tv_weight: float = 0.0,
) -> torch.Tensor:
    """Loss against the teacher's probabilities, its likeliest token, and the text.

    Shapes ``[tokens, vocab]``, ``[tokens, vocab]``, ``[tokens]``. The first term serves sampling:
    cross-entropy, which equals KL(teacher || student) up to the teacher's entropy (Hinton et al.
    2015; DistillSpec), and a share of ``tv_weight`` of it total variation. Greedy acceptance asks
    for nothing but the likeliest token.
    """
    log_q = F.log_softmax(logits.float(), dim=-1)
    p = F.softmax(teacher_logits.float(), dim=-1)
    soft = 1 - text_weight - argmax_weight
    loss = log_q.new_zeros(())
    if tv_weight < 1:
        loss = loss - soft * (1 - tv_weight) * (p * log_q).sum(-1).mean()
    if tv_weight:
        loss = loss + soft * tv_weight * total_variation(p, log_q.exp())
    if text_weight:
        loss = loss + text_weight * F.nll_loss(log_q, targets)
    if argmax_weight:
        loss = loss + argmax_weight * F.nll_loss(log_q, teacher_logits.argmax(-1))
    return loss
