"""Texts that the target wrote itself from held-out openings, to measure acceptance on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.files import replace_text
from paceline.stages import stage
from paceline.train.data import Source
from paceline.train.sample import openings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


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
    exclude_licenses: Sequence[str],
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
    for source in sources:
        alone = [Source(source.path, 1.0)]
        starts = openings(
            alone,
            tokenizer,
            count,
            0,
            exclude_licenses,
            longest_chat=max(1, min(_LONGEST, room)),
        )
        prompts = [opening.token_ids for opening in starts]
        with stage(f"the target continues {len(prompts)} openings of {source.path.name}"):
            written = continue_greedily(target, prompts, max_tokens)
        for prompt, ids in zip(prompts, written, strict=True):
            if len(ids) > 1:  # with one token or none there is nothing to draft
                texts.append(WrittenText(source.name, len(prompt), [*prompt, *ids]))
    kept = json.dumps({"key": key, "texts": [asdict(text) for text in texts]})
    replace_text(cache, kept, "the held-out texts")
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
    longest = max(len(prompt) for prompt in prompts)
    ends = target.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left: all end in the same column
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    written = target.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        do_sample=False,
        max_new_tokens=max_tokens,
        pad_token_id=0,
    )
    result = []
    for row in written[:, longest:].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
        result.append(row[:end])
    return result
