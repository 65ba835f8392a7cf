"""Faults that a rule may have, in the place of the right one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.draws import sample_by_inversion
from paceline.verify.kernels import KernelDecisions, SampledSpan, decide_in_kernels


def without_residual(
    questions: Sequence[SampledSpan], uniforms: torch.Tensor | None
) -> list[KernelDecisions]:
    """The kernels' decisions; but what ends an unseeded step is drawn from p itself."""
    answers: list[KernelDecisions] = []
    for question, (choices, accepted) in zip(
        questions, decide_in_kernels(questions, uniforms), strict=True
    ):
        if question.node is not None and uniforms is not None:
            params, rows = question.span.seq.params, question.span.verify_rows
            scores = question.logits[question.first :][:rows].float() / params.temperature
            choices = sample_by_inversion(
                scores.softmax(-1), uniforms[question.row :][:rows]
            ).tolist()
        answers.append((choices, accepted))
    return answers
