"""Log-probabilities for the requests that ask for them, within the step's one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.batch import Span
from paceline.core.params import TokenLogprob
from paceline.core.ranking import top
from paceline.verify.layout import layout_of


@dataclass(frozen=True)
class StepLogprobs:
    """Log-softmax of the adjusted logits: after bias and penalties (along the tree path), but
    before temperature and truncation, so that it does not depend on how the tokens are drawn.

    ``values`` float64, flat, on the device: of each node's token at its parent's row [N], of each
    row's choice [R], then per row the ``count`` largest [R, count] and their ids [R, count].
    """

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
        # A row without a choice is its request's end; nobody reads what is gathered there.
        parts.append(logprobs.gather(1, choices.clamp(min=0).unsqueeze(1)).squeeze(1))
        best = top(logprobs, count)
        parts.append(logprobs.gather(1, best).flatten())
        values = torch.cat([part.to(torch.float64) for part in (*parts, best.flatten())])
        return cls(values, nodes, scores.shape[0], count)

    def read(
        self,
        values: list[float],
        span: Span,
        first_row: int,
        first_node: int,
        path: tuple[int, ...],
        emitted: tuple[int, ...],
    ) -> tuple[TokenLogprob, ...]:
        """One entry per emitted token; ``values`` are this report's, on the host.

        ``first_row`` and ``first_node`` are where the span's rows and nodes begin.
        """
        path_values = [values[first_node + node] for node in path]
        end = first_row + (path[-1] + 1 if path else 0)
        path_values.append(values[self.nodes + end])
        rows = [first_row + row for row in (0, *(node + 1 for node in path))]
        tops = self.nodes + self.rows
        ids = tops + self.rows * self.count
        wanted = min(span.seq.params.logprobs or 0, self.count)
        entries = []
        for row, token, logprob in zip(rows, emitted, path_values, strict=True):
            at = row * self.count
            others = tuple(
                (int(values[ids + at + rank]), values[tops + at + rank]) for rank in range(wanted)
            )
            entries.append(TokenLogprob(token, logprob, others))
        return tuple(entries)
