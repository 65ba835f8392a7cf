"""The losses of drafts: cross-entropy with the target's probabilities, and total variation."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _chunk(device: torch.device) -> int:
    """How many rows to process at a time. On a CPU, probabilities over a vocabulary of ten thousand
    then fit into a core's cache; on a GPU, few kernels are launched."""
    return 64 if device.type == "cpu" else 4096


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``1 - sum_x min(p(x), q(x))`` for each row of the distributions ``[tokens, vocab]``: the
    probability that a token sampled from q is rejected (DistillSpec, arXiv 2310.08461)."""
    return 1 - torch.minimum(p, q).sum(-1)


class _DistributionLoss(torch.autograd.Function):
    """A weighted loss against probabilities that computes its gradient in the same pass, in chunks
    of rows. ``F.cross_entropy`` would keep two float32 tensors of the size of the logits."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: torch.Tensor,
        probs: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        tv_weight: float,
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
            total += (torch.lerp(entropy, total_variation(p, q), tv_weight) * weight).sum()
            below = (q < p) * q  # tokens whose probability should rise
            tv_slope = q * below.sum(-1, keepdim=True) - below
            slope = (q - p).lerp_(tv_slope, tv_weight)
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
    tv_weight: float = 0.0,
) -> torch.Tensor:
    """``sum_n weights[n] * L(probs[index[n]], softmax(logits[n]))``, float32. ``logits [N, V]``,
    ``probs [M, V]`` whose rows sum to one, ``index`` int64 ``[N]``, ``weights`` float32 ``[N]``.
    Only the logits get a gradient. L is a share ``tv_weight`` of total variation and otherwise the
    cross-entropy: the KL divergence plus the target's entropy (Hinton et al. 2015)."""
    result: torch.Tensor = _DistributionLoss.apply(logits, probs, index, weights, tv_weight)  # type: ignore[no-untyped-call]
    return result


def teacher_probs(
    rows: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor], share: float
) -> torch.Tensor:
    """The probabilities ``[len(rows), V]`` of rows of logits, with a ``share`` moved to the
    likeliest token, in the dtype of the logits. ``logits_of`` computes the logits of some rows,
    since those of all rows may be large."""
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


def token_log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities ``[B, W]``, float32, of the tokens ``ids [B, W]`` after those before them;
    0 for the first. ``logits [B, W, V]`` are those of a model that has read ``ids``."""
    log_probs = torch.zeros(ids.shape, device=ids.device)
    for row, text, tokens in zip(log_probs, logits[:, :-1], ids[:, 1:], strict=True):
        row[1:] = -torch.nn.functional.cross_entropy(text.float(), tokens, reduction="none")
    return log_probs
