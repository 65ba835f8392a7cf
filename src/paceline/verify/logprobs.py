"""Log-probabilities: of new tokens, within the step's one transfer, and of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.batch import Span, Verdict
from paceline.core.params import TokenLogprob
from paceline.core.ranking import stable_top_k
from paceline.core.transfer import to_device
from paceline.verify.rules import layout_of

_MOST_LOGITS = 2**24  # of one step
_MOST_SCORED = 2**21  # at a time in float32, of which there are several copies


@dataclass(frozen=True)
class StepLogprobs:
    """Log-softmax of the adjusted logits: after bias and penalties (along the tree path), before
    temperature and truncation, so independent of how tokens are drawn.

    ``values`` float64, flat, on the device: of each node's token at its parent's row [N], of each
    row's choice [R], then per row the ``count`` largest [R, count] and their ids [R, count]."""

    values: torch.Tensor
    nodes: int
    rows: int
    count: int

    @classmethod
    def of(cls, scores: torch.Tensor, spans: Sequence[Span], choices: torch.Tensor) -> StepLogprobs:
        """From adjusted logits [R, V] and the choices [R] of all rows."""
        logprobs = torch.log_softmax(scores, dim=-1)
        width = scores.shape[1]
        count = min(max(span.seq.params.logprobs or 0 for span in spans), width)
        parts = []
        nodes = sum(len(span.tree) for span in spans)
        if nodes:
            layout = layout_of(tuple(span.tree.parents for span in spans), scores.device)
            tokens = torch.cat([span.tree.tokens for span in spans])
            parts.append(logprobs[layout.parent_rows, tokens.clamp(max=width - 1)])
        # A row without a choice ends its request; its value is unused.
        parts.append(logprobs.gather(1, choices.clamp(min=0).unsqueeze(1)).squeeze(1))
        best = stable_top_k(logprobs, count)
        parts.append(logprobs.gather(1, best).flatten())
        values = torch.cat([part.to(torch.float64) for part in (*parts, best.flatten())])
        return cls(values, nodes, scores.shape[0], count)

    def read(
        self, values: list[float], first_row: int, first_node: int, verdict: Verdict, wanted: int
    ) -> tuple[TokenLogprob, ...]:
        """One entry per emitted token with ``wanted`` alternatives; ``values``: this record's, on
        the host. ``first_row``, ``first_node``: the tree's first row and node."""
        rows = [first_row, *(first_row + node + 1 for node in verdict.path)]
        logprobs = [values[first_node + node] for node in verdict.path]
        logprobs.append(values[self.nodes + rows[-1]])
        tops = self.nodes + self.rows
        ids = tops + self.rows * self.count
        entries = []
        for row, token, logprob in zip(rows, verdict.tokens, logprobs, strict=True):
            best = range(row * self.count, row * self.count + min(wanted, self.count))
            others = tuple((int(values[ids + at]), values[tops + at]) for at in best)
            entries.append(TokenLogprob(token, logprob, others))
        return tuple(entries)


def most_rows(vocab_size: int) -> int:
    """Rows that one step may score: their logits take at most 64 MiB in float32."""
    return max(1, _MOST_LOGITS // vocab_size)


def scoring_bytes(vocab_size: int, step_tokens: int) -> int:
    """Memory for scoring in a step of so many tokens: the logits, and three copies of a part."""
    rows = min(step_tokens, most_rows(vocab_size))
    return 4 * vocab_size * (rows + 3 * min(rows, _part(vocab_size)))


def _part(vocab_size: int) -> int:
    return max(1, _MOST_SCORED // vocab_size)


@torch.inference_mode()
def prompt_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """Log-softmax of the logits [R, V] at the R tokens that follow their rows, with the ``count``
    likeliest of each row; without bias, penalties or temperature."""
    part, scored = _part(logits.shape[1]), list[TokenLogprob]()
    for first in range(0, len(tokens), part):
        ids = list(tokens[first : first + part])
        logprobs = torch.log_softmax(logits[first : first + part].float(), dim=-1)
        chosen = logprobs.gather(1, to_device(ids, logits.device).unsqueeze(1))
        best = stable_top_k(logprobs, min(count, logits.shape[1]))
        values = torch.cat([chosen, logprobs.gather(1, best)], 1).to(torch.float64).tolist()
        scored += (
            TokenLogprob(token, row[0], tuple(zip(likeliest, row[1:], strict=True)))
            for token, row, likeliest in zip(ids, values, best.tolist(), strict=True)
        )
    return tuple(scored)
