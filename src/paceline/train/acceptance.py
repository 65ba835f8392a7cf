"""How many drafted tokens a target would take, from what matches what in a written text.

When the target is greedy, its text is known before any draft is made: one forward that drafts at
every position at once tells, for each of them, which drafted tokens the target would accept. The
engine then only ever starts where its last step ended, so walking those starts gives its figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class AcceptanceCounts:
    """Counts over one or several texts.

    ``tokens`` committed by ``steps`` target steps, the target's own tokens included. Position j
    of a draft was tried ``reached[j]`` times (all before it were accepted) and accepted
    ``accepted[j]`` times.
    """

    tokens: int = 0
    steps: int = 0
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target step, the target's own included; 0 when nothing was measured."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Share accepted at each position, among the drafts that reached it."""
        return tuple(a / n if n else 0.0 for a, n in zip(self.accepted, self.reached, strict=True))

    def to_dict(self) -> dict[str, Any]:
        lists = {"reached": list(self.reached), "accepted": list(self.accepted)}
        return {"mean_accepted_length": self.mean_accepted_length, **vars(self), **lists}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AcceptanceCounts:
        reached, accepted = tuple(values["reached"]), tuple(values["accepted"])
        return cls(values["tokens"], values["steps"], reached, accepted)


def total(parts: Iterable[AcceptanceCounts]) -> AcceptanceCounts:
    """The counts of several texts together."""
    parts = list(parts)
    length = max((len(part.reached) for part in parts), default=0)

    def summed(name: str) -> tuple[int, ...]:
        rows = [getattr(part, name) for part in parts]
        return tuple(sum(row[j] for row in rows if j < len(row)) for j in range(length))

    return AcceptanceCounts(
        sum(part.tokens for part in parts),
        sum(part.steps for part in parts),
        summed("reached"),
        summed("accepted"),
    )


def walk(matches: torch.Tensor, undrafted: int = 1) -> AcceptanceCounts:
    """Decode a text of n tokens from ``matches`` bool ``[n, length]``.

    ``matches[i, j]``: of a draft made when token i is the next one, token j equals the text's
    token i + j (False beyond the end). A step from i accepts the leading matches, adds the
    target's own token and so goes on at i + accepted + 1. Before these come ``undrafted`` tokens
    at a step each: a head cannot draft the first one, because its features come with it; a draft
    model can (0).
    """
    count, length = matches.shape
    # Leading matches of every row at once: the running product stays 1 up to the first miss.
    leading = matches.long().cumprod(1).sum(1).tolist()
    reached, accepted = [0] * length, [0] * length
    steps, start = undrafted, 0
    while start < count:
        taken = leading[start]
        for j in range(min(taken + 1, length, count - start)):
            reached[j] += 1
            accepted[j] += j < taken
        steps += 1
        start += taken + 1
    return AcceptanceCounts(undrafted + count, steps, tuple(reached), tuple(accepted))


def match_matrix(drafts: torch.Tensor, text: torch.Tensor, prompt: int) -> torch.Tensor:
    """The bool ``[n, length]`` of ``walk`` from the drafts at every position of a text.

    ``drafts`` int64 ``[T, length]``: row t, made from the features at position t and the token
    at t + 1, proposes tokens t + 2, t + 3, ... ``text`` int64 ``[T]``, of which the first
    ``prompt`` tokens were given. The target's first token comes without a draft, with the
    prompt's own step, so n is T - prompt - 1.
    """
    end = len(text)
    count = max(0, end - prompt - 1)
    length = drafts.shape[1]
    rows = torch.arange(prompt - 1, prompt - 1 + count, device=text.device)[:, None]
    wanted = rows + 2 + torch.arange(length, device=text.device)
    expected = text[wanted.clamp(max=end - 1)]
    drafted = drafts[prompt - 1 : prompt - 1 + count]
    return (drafted == expected) & (wanted < end)
