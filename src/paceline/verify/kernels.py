"""Verification of sampled drafts in one call of the native kernels (csrc/sampling.cpp).

For a vocabulary of 49,152 a sampled step takes 0.1 instead of 0.3 ms, and block verification of 16
tokens 0.7 instead of 11 ms, because torch writes every intermediate distribution to memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.core.batch import Span
from paceline.core.draws import draws_unseeded
from paceline.core.noise import id_hashes, splitmix64
from paceline.kernels.library import DTYPES, CVerification, check, pointer
from paceline.kernels.lookup import functions

_NO_LIMIT = 1 << 30  # as top_k: more tokens than any vocabulary has
# The token at each row of a span (-1: the row is no distribution, 0: a row off the accepted path),
# and for each node whether block verification accepts it.
KernelDecisions = tuple[Sequence[int], Sequence[int]]


def can_use_kernels(logits: torch.Tensor) -> bool:
    """Whether ``decide_in_kernels`` is available and can read these logits."""
    return logits.dtype in DTYPES and logits.stride(1) == 1 and functions() is not None


class SampledSpan(NamedTuple):
    """A span whose request samples. ``logits`` [R, V]: after bias, penalties and grammars; those of
    the span begin at row ``first``. ``row``: index of the first row's number in the uniforms.
    ``node``: index of the first node's number for block verification; None if the rows' tokens are
    matched against the tree."""

    span: Span
    logits: torch.Tensor
    first: int
    row: int
    node: int | None


def decide_in_kernels(
    sampled: Sequence[SampledSpan], uniforms: torch.Tensor | None
) -> list[KernelDecisions]:
    """Decide on all sampled spans of a step, in parallel on all threads. ``uniforms`` float64 [rows
    + nodes]; None if all requests have a seed."""
    native, threads = functions(), torch.get_num_threads()
    assert native is not None
    kept: list[Any] = []  # keeps alive the memory that the structures point to
    verdicts, answers, start = [], [], pointer(uniforms)
    for span, logits, first, row, node in sampled:
        stride = logits.stride(0)
        params, tree, rows = span.seq.params, span.tree, span.verify_rows
        tokens, parents = array("i", tree.host_tokens()), array("i", tree.parents)
        choices, accepted = array("i", bytes(4 * rows)), array("B", bytes(rows))
        q = None if tree.q is None or node is None else tree.q.contiguous()
        drawn = start if draws_unseeded(params) else None
        hashes = id_hashes(logits.shape[1], logits.device) if drawn is None else None
        verdict = CVerification(
            dtype=DTYPES[logits.dtype],
            rows=rows,
            width=logits.shape[1],
            stride=stride,
            top_k=params.top_k if params.top_k > 0 else _NO_LIMIT,
            all=tree.wants_choices,
            threads=threads,
            logits=logits.data_ptr() + first * stride * logits.itemsize,
            inverse_temperature=min(1e6, 1 / params.temperature),  # beyond it one token is certain
            top_p=params.top_p,
            min_p=params.min_p,
            tokens=tokens.buffer_info()[0],
            parents=parents.buffer_info()[0],
            position=len(span.seq.tokens),
            seed=splitmix64(params.seed or 0),
            hashes=pointer(hashes),
            uniforms=None if drawn is None else drawn + 8 * row,
            thresholds=None if drawn is None or node is None else drawn + 8 * node,
            q=pointer(q),
            q_width=0 if q is None else q.shape[1],
            choices=choices.buffer_info()[0],
            accepted=accepted.buffer_info()[0],
        )
        kept.append((tokens, parents, q, hashes))
        verdicts.append(verdict)
        answers.append((choices, accepted, None if q is None else rows - 1))
    together = (CVerification * len(verdicts))(*verdicts)
    check(native.pl_verify(together, len(verdicts), threads), "the choices of a step")
    return [
        (choices.tolist(), () if nodes is None else accepted[:nodes].tolist())
        for choices, accepted, nodes in answers
    ]
