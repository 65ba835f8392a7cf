"""How many drafted tokens a greedy target would take, on texts that it wrote itself.

Its text is known, so one forward that drafts at every position says what it would accept at each.
The engine only starts where its last step ended: walking those starts gives its figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.core.sequence import Sums
from paceline.core.stages import stage
from paceline.files import replace_in
from paceline.train.configs import PromptSelection
from paceline.train.prompts import prompts_of_file
from paceline.train.records import Source


@dataclass(frozen=True)
class AcceptanceCounts(Sums):
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
        return {"mean_accepted_length": self.mean_accepted_length, **asdict(self)}


def total(parts: Iterable[AcceptanceCounts]) -> AcceptanceCounts:
    """The counts of several texts together."""
    return sum(parts, AcceptanceCounts())


def walk(matches: torch.Tensor, undrafted: int = 1) -> AcceptanceCounts:
    """Decode a text of n tokens from ``matches`` bool ``[n, length]``.

    ``matches[i, j]``: of a draft made when token i is the next one, token j equals the text's
    token i + j (False beyond the end). A step from i accepts the leading matches and goes on at
    i + accepted + 1. Before these come ``undrafted`` tokens at a step each: a head cannot draft
    the first one, because its features come with it; a draft model can (0).
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


def drafting_rows(text: torch.Tensor, prompt: int) -> slice:
    """The n positions of a text ``[T]`` that steps of a head may start from: a draft from t is of
    tokens t + 2, t + 3, ... The token after the ``prompt`` comes with the prompt's own step."""
    return slice(prompt - 1, max(prompt - 1, len(text) - 2))


def ranks_of(candidates: torch.Tensor, text: torch.Tensor, rows: slice) -> torch.Tensor:
    """At which rank candidates ``[n, length, k]`` of drafts from ``rows`` have the text's tokens.

    int64 ``[n, length]``: k where it is not among them, -1 beyond the text's end. ``walk`` takes
    ``ranks == 0``.
    """
    count, length, k = candidates.shape
    ahead = torch.arange(2, 2 + length, device=text.device)
    wanted = torch.arange(rows.start, rows.start + count, device=text.device)[:, None] + ahead
    right = candidates == text[wanted.clamp(max=len(text) - 1)][..., None]
    ranks = torch.where(right.any(-1), right.long().argmax(-1), k)
    return torch.where(wanted < len(text), ranks, -1)


_LONGEST = 1024  # tokens of a held-out conversation: summaries need their texts


@dataclass(frozen=True)
class WrittenText:
    """``token_ids`` of an opening of ``prompt`` tokens and its greedy continuation."""

    source: str  # which validation file
    prompt: int
    token_ids: list[int]


def written_texts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    sources: Sequence[Source],
    count: int,
    max_tokens: int,
    exclude_licenses: tuple[str, ...],
    cache: Path,
) -> list[WrittenText]:
    """``count`` texts of each validation file, continued by at most ``max_tokens`` tokens.

    Written once: ``cache`` keeps them for a resumed run.
    """
    names = [source.name for source in sources]
    key: dict[str, Any] = {"files": names, "count": count, "max_tokens": max_tokens}
    with suppress(OSError, ValueError, KeyError, TypeError):  # absent or damaged: written again
        saved = json.loads(cache.read_text(encoding="utf-8"))
        if saved["key"] == key:
            return [WrittenText(**text) for text in saved["texts"]]
    texts: list[WrittenText] = []
    room = context_of(target, _LONGEST + max_tokens) - max_tokens if sources else 0
    selection = PromptSelection(
        count, exclude_licenses=exclude_licenses, max_prompt_len=max(1, min(_LONGEST, room))
    )
    for source in sources:
        opened = prompts_of_file(source, tokenizer, selection, seed=(0,), any_turn=True)
        prompts = [prompt.token_ids for prompt in opened]
        with stage(f"the target continues {len(prompts)} openings of {source.path.name}"):
            written = continue_greedily(target, prompts, max_tokens)
        for prompt, ids in zip(prompts, written, strict=True):
            if len(ids) > 1:  # with one token or none there is nothing to draft
                texts.append(WrittenText(source.name, len(prompt), [*prompt, *ids]))
    kept = json.dumps({"key": key, "texts": [asdict(text) for text in texts]})
    replace_in(cache.parent, {cache.name: kept.encode()}, "the held-out texts", damaged=True)
    return texts


def context_of(model: Any, default: int) -> int:
    """Longest text that a model takes; ``default`` if it does not say."""
    shape = model.config.get_text_config(decoder=True)
    return int(getattr(shape, "max_position_embeddings", None) or default)


@torch.no_grad()
def continue_greedily(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """The likeliest continuation of each prompt, up to and with the end token."""
    device = target.device
    ends = target.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    # Padded on the left: all end in the same column.
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, padding_side="left")
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_tokens, "pad_token_id": 0}
    written = target.generate(input_ids=ids, attention_mask=mask, **how)
    result = []
    for row in written[:, ids.shape[1] :].tolist():
        end = next((at + 1 for at, token in enumerate(row) if token in stops), len(row))
        result.append(row[:end])
    return result
