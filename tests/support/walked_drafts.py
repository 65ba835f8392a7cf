"""Draft acceptance with transformers alone, to compare the engine's with.

The target's greedy text comes first. Then speculative decoding is walked along it: from a position
the draft continues greedily, the run of tokens that agree with the text is accepted, the next
position is after them and the target's own token. All positions of a text are drafted in one batch:
the draft's answer depends on the text before it only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Walk:
    """Counts of one or more walks; `steps` are target steps."""

    length: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    by_position: list[int] = field(default_factory=list)  # how often draft token i was accepted
    tried: list[int] = field(default_factory=list)  # how often token i was reached

    def __post_init__(self) -> None:
        self.by_position = self.by_position or [0] * self.length
        self.tried = self.tried or [0] * self.length

    def summary(self) -> dict[str, Any]:
        """Rates, each with its own denominator: token i counts only where i - 1 was accepted."""
        return {
            "acceptance": round(self.accepted / max(1, self.drafted), 4),
            "mean_accepted_length": round(self.committed / max(1, self.steps), 4),
            "per_position": [
                round(a / max(1, t), 4) for a, t in zip(self.by_position, self.tried, strict=True)
            ],
            "drafted": self.drafted,
            "accepted": self.accepted,
        }


def walk(text: list[int], drafts: list[list[int]], length: int, into: Walk) -> None:
    """Walk speculative decoding along `text`, the target's greedy tokens.

    `drafts[i]` is the draft's continuation after `text[:i]`. As an engine does, a draft is cut so
    that it and the target's own token fit into what is left of the text.
    """
    at = 0
    while at < len(text):
        want = min(length, len(text) - at - 1)
        run = 0
        while run < want and drafts[at][run] == text[at + run]:
            run += 1
        into.steps += 1
        into.drafted += want
        into.accepted += run
        into.committed += run + 1
        for i in range(want):
            into.tried[i] += i <= run
            into.by_position[i] += i < run
        at += run + 1


@torch.inference_mode()
def greedy_texts(
    model: Any, prompts: list[list[int]], tokens: int, stops: frozenset[int]
) -> list[list[int]]:
    """The greedy continuations of a batch, each cut after its first stop token."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=sorted(stops) or None,
        pad_token_id=0,
        use_cache=True,
    )
    texts = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        texts.append(row[:end])
    return texts


@torch.inference_mode()
def greedy_drafts(model: Any, prompt: list[int], text: list[int], length: int) -> list[list[int]]:
    """The draft's greedy continuation of every prefix `prompt + text[:i]`, `length` tokens each.

    One forward over the text gives every first token and all keys and values. The further tokens
    of all prefixes are decoded together: as rows of one packed sequence with a block mask, so
    that row i sees the text before i and its own tokens only.
    """
    n, start = len(text), len(prompt)
    known = torch.tensor([prompt + text[:-1]], device=model.device)
    out = model(known, use_cache=True)
    token = out.logits[0, start - 1 :].argmax(-1)  # [n]
    drafts, cache = [token], out.past_key_values
    device, dtype = model.device, model.dtype
    seen = (
        torch.arange(known.shape[1], device=device)
        < torch.arange(start, start + n, device=device)[:, None]
    )  # [n, text]: prefix i ends before position start + i
    own = torch.eye(n, dtype=torch.bool, device=device)
    for depth in range(length - 1):
        seen = torch.cat([seen, own], dim=1)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        mask.masked_fill_(~seen, torch.finfo(dtype).min)
        positions = torch.arange(start, start + n, device=device) + depth
        out = model(
            token[None],
            position_ids=positions[None],
            attention_mask=mask[None, None],
            past_key_values=cache,
            use_cache=True,
        )
        token, cache = out.logits[0].argmax(-1), out.past_key_values
        drafts.append(token)
    columns: Tensor = torch.stack(drafts, dim=1)
    return columns.tolist()
