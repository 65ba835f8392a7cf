"""Log-probabilities of generated tokens (within the step's one transfer) and of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.batch import Span, Verdict
from paceline.core.params import TokenLogprob
from paceline.core.ranking import stable_top_k
from paceline.core.transfer import to_device
from paceline.verify.rules import layout_of

_MAX_LOGITS_PER_STEP = 2**24
_MAX_LOGITS_AT_ONCE = 2**21  # converted to float32 together; there are several copies of them


@dataclass(frozen=True)
class StepLogprobs:
    """Log-probabilities of one step: the log-softmax of the adjusted logits, after bias and
    penalties along the tree path, but before temperature and truncation, so that they do not depend
    on how tokens are sampled.

    ``values`` is float64, flat, on the device: the log-probability of each node's token at its
    parent's row [N], that of each row's choice [R], the ``count`` largest of each row [R, count],
    and the ids of those [R, count]."""

    values: torch.Tensor
    nodes: int
    rows: int
    count: int

    @classmethod
    def of(cls, scores: torch.Tensor, spans: Sequence[Span], choices: torch.Tensor) -> StepLogprobs:
        """Compute them from the adjusted logits [R, V] and the choices [R] of all rows."""
        logprobs = torch.log_softmax(scores, dim=-1)
        width = scores.shape[1]
        count = min(max(span.seq.params.logprobs or 0 for span in spans), width)
        parts = []
        nodes = sum(len(span.tree) for span in spans)
        if nodes:
            layout = layout_of(tuple(span.tree.parents for span in spans), scores.device)
            tokens = torch.cat([span.tree.tokens for span in spans])
            parts.append(logprobs[layout.parent_rows, tokens.clamp(max=width - 1)])
        # The request of a row without a choice ends with an error, so its value is not used.
        parts.append(logprobs.gather(1, choices.clamp(min=0).unsqueeze(1)).squeeze(1))
        best = stable_top_k(logprobs, count)
        parts.append(logprobs.gather(1, best).flatten())
        values = torch.cat([part.to(torch.float64) for part in (*parts, best.flatten())])
        return cls(values, nodes, scores.shape[0], count)

    def read(
        self, values: list[float], first_row: int, first_node: int, verdict: Verdict, wanted: int
    ) -> tuple[TokenLogprob, ...]:
        """One entry for each token of a verdict, with ``wanted`` alternatives. ``values``: those of
        this record, on the host. ``first_row``, ``first_node``: first row and node of the tree."""
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


def max_scored_rows(vocab_size: int) -> int:
    """How many prompt tokens one step may score: their logits take at most 64 MiB in float32."""
    return max(1, _MAX_LOGITS_PER_STEP // vocab_size)


def scoring_bytes(vocab_size: int, step_tokens: int) -> int:
    """Bytes that scoring takes in a step of ``step_tokens``: the logits, and three float32 copies
    of the rows that are scored at once."""
    rows = min(step_tokens, max_scored_rows(vocab_size))
    return 4 * vocab_size * (rows + 3 * min(rows, _rows_at_once(vocab_size)))


def _rows_at_once(vocab_size: int) -> int:
    return max(1, _MAX_LOGITS_AT_ONCE // vocab_size)


@torch.inference_mode()
def prompt_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of R prompt ``tokens`` by the logits [R, V] of the rows before them, with
    the ``count`` likeliest tokens of each row; without bias, penalties or temperature."""
    part, scored = _rows_at_once(logits.shape[1]), list[TokenLogprob]()
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
