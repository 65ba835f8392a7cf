"""What a draft is trained on: the target's probabilities, its choices, and the text itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def _chunk(device: torch.device) -> int:
    """Rows at a time: probabilities over a vocabulary of ten thousand stay in a core's cache, or
    few kernels are started on a GPU."""
    return 64 if device.type == "cpu" else 4096


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``1 - sum_x min(p(x), q(x))`` of each token, from distributions ``[tokens, vocab]``: the
    chance that a token drafted from q is rejected (DistillSpec, arXiv 2310.08461)."""
    return 1 - torch.minimum(p, q).sum(-1)


def rows_that_count(shares: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``shares [tokens]`` and the tensors ``[tokens, ...]`` without the tokens that have none; a
    compiled graph, whose shapes are fixed, keeps them all."""
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
) -> torch.Tensor:
    """Loss ``[tokens]`` against the teacher's probabilities, its likeliest token, and the text.

    Shapes ``[tokens, vocab]``, ``[tokens, vocab]``, ``[tokens]``. The first term serves sampling:
    cross-entropy, which equals KL(teacher || student) up to the teacher's entropy (Hinton et al.
    2015; DistillSpec), and a share of ``tv_weight`` of it total variation. Greedy acceptance asks
    for nothing but the likeliest token.
    """
    log_q = F.log_softmax(logits.float(), dim=-1)
    p = F.softmax(teacher_logits.float(), dim=-1)
    soft = 1 - text_weight - argmax_weight
    losses = -soft * (1 - tv_weight) * (p * log_q).sum(-1)
    if tv_weight:
        losses = losses + soft * tv_weight * total_variation(p, log_q.exp())
    for weight, wanted in ((text_weight, targets), (argmax_weight, teacher_logits.argmax(-1))):
        if weight:
            losses = losses + weight * F.nll_loss(log_q, wanted, reduction="none")
    return losses


# -- of heads -------------------------------------------------------------------------------------


class _DistributionLoss(torch.autograd.Function):
    """Weighted loss against probabilities, its gradient made in the same pass, by chunks of rows:
    ``F.cross_entropy`` keeps two float32 tensors as large as the logits."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: torch.Tensor,
        probs: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        eta: float,
    ) -> torch.Tensor:
        gradient = torch.empty_like(logits)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        chunk = _chunk(logits.device)
        for start in range(0, len(logits), chunk):
            rows = slice(start, start + chunk)
            p = probs[index[rows]].float()
            weight = weights[rows]
            logs = logits[rows].float().log_softmax(-1)
            entropy, q = -torch.linalg.vecdot(p, logs), logs.exp_()
            overlap = torch.minimum(p, q).sum(-1)
            share = torch.exp(-eta * overlap)
            total += ((share * entropy + (1 - share) * (1 - overlap)) * weight).sum()
            below = (q < p) * q  # more of these would be accepted
            rising = q * below.sum(-1, keepdim=True) - below
            slope = (q - p).mul_(share[:, None]).add_(rising.mul_(1 - share[:, None]))
            gradient[rows] = slope.mul_(weight[:, None])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * grad.to(gradient.dtype), None, None, None, None


def distribution_loss(
    logits: torch.Tensor,
    probs: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    eta: float = 0.0,
) -> torch.Tensor:
    """``sum_n weights[n] * L(probs[index[n]], softmax(logits[n]))``, float32.

    ``logits [N, V]``, ``probs [M, V]`` that sum to one, ``index`` int64 ``[N]``, ``weights``
    float32 ``[N]``. Only the logits get a gradient. L is the cross-entropy H(p, q), or with ``eta``
    the LK hybrid ``s H + (1 - s) TV``, ``s = exp(-eta (1 - TV))`` (Samarin et al. 2026,
    arXiv 2602.23881): total variation, the chance of rejection, takes over as it falls.
    """
    result: torch.Tensor = _DistributionLoss.apply(logits, probs, index, weights, eta)  # type: ignore[no-untyped-call]
    return result


def falling(decay: float, count: int) -> list[float]:
    """Weights of steps or heads, each ``decay`` times the one before, that sum to one."""
    weights = [decay**k for k in range(count)]
    return [weight / sum(weights) for weight in weights]


def mixed_probs(
    rows: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor], share: float
) -> torch.Tensor:
    """Probabilities of rows of logits, ``share`` of them moved to the likeliest token, in the
    logits' dtype ``[len(rows), V]``.

    ``logits_of(rows)`` makes the logits of some rows: all at once they may be large.
    """
    parts = []
    for some in torch.split(rows, 4 * _chunk(rows.device)):
        logits = logits_of(some)
        distribution = logits.float().softmax(-1)
        if share:
            best = logits.argmax(-1, keepdim=True)
            spike = torch.full_like(best, share, dtype=distribution.dtype)
            distribution = distribution.mul_(1 - share).scatter_add_(1, best, spike)
        parts.append(distribution.to(logits.dtype))
    return torch.cat(parts)
