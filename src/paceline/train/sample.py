"""Text written by the target itself, to distil drafts on what they will be asked to predict.

A draft is judged on the target's own text, not on the corpus (DistillSpec, Zhou et al. 2023,
arXiv 2310.08461: on-policy data raise acceptance).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from paceline.errors import DataError
from paceline.train.data import Source, has_our_roles, read_records, render_for, turns_of
from paceline.train.tokenizer import ROLE_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Opening:
    """The beginning of a corpus record that the target is to continue; ids include the BOS."""

    token_ids: list[int]
    source: str
    license: str


def openings(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerFast,
    count: int,
    seed: int,
    exclude_licenses: Sequence[str] = (),
    shortest: int = 12,
    longest: int = 96,
) -> list[Opening]:
    """``count`` openings, shared among the files by weight, random records of each.

    A conversation is opened up to one of its assistant turns, other text by a random number of
    tokens. Raises DataError if a file has no record that is long enough.
    """
    rng = np.random.default_rng(seed)
    total = sum(source.weight for source in sources)
    result: list[Opening] = []
    for source in sources:
        records = list(read_records(source.path, exclude_licenses))
        wanted = round(count * source.weight / total)
        order = rng.permutation(len(records))
        found: list[Opening] = []
        for index in order:
            if len(found) == wanted:
                break
            ids = _opening_ids(records[index]["text"], tokenizer, rng, shortest, longest)
            if ids is not None:
                record = records[index]
                found.append(
                    Opening(ids, str(record.get("source", "")), str(record.get("license", "")))
                )
        if wanted and not found:
            raise DataError(f"{source.path} has no record of {shortest} tokens or more")
        result.extend(found)
    return result


def _opening_ids(
    text: str,
    tokenizer: PreTrainedTokenizerFast,
    rng: np.random.Generator,
    shortest: int,
    longest: int,
) -> list[int] | None:
    if not has_our_roles(tokenizer) and turns_of(text) and tokenizer.chat_template:
        return _foreign_opening(turns_of(text), tokenizer, rng, 2 * longest)
    rendered = render_for(text, tokenizer)
    ids = tokenizer.encode(rendered)
    if rendered != text:
        answer = tokenizer.convert_tokens_to_ids(ROLE_TOKENS["assistant"])
        turns = [
            place for place, token in enumerate(ids) if token == answer and place <= 2 * longest
        ]
        return ids[: int(rng.choice(turns)) + 1] if turns else None
    length = int(rng.integers(shortest, longest + 1))
    return ids[:length] if len(ids) > length else None


def _foreign_opening(
    turns: list[dict[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    rng: np.random.Generator,
    longest: int,
) -> list[int] | None:
    """As above, for a model whose chat template writes the turns."""
    found = []
    for place, turn in enumerate(turns):
        if turn["role"] == "assistant" and place:
            try:
                text = tokenizer.apply_chat_template(
                    turns[:place], tokenize=False, add_generation_prompt=True
                )
            except TemplateError:  # the template refuses this order of roles
                return None
            ids = tokenizer.encode(str(text), add_special_tokens=False)
            if len(ids) <= longest:
                found.append(ids)
    return found[int(rng.integers(len(found)))] if found else None


def continuations(
    generate: Callable[[list[list[int]]], list[list[int]]],
    tokenizer: PreTrainedTokenizerFast,
    starts: Sequence[Opening],
    batch: int,
) -> Iterator[dict[str, Any]]:
    """Corpus records ``{"text", "source", "license"}`` of openings with what ``generate`` adds.

    ``generate`` maps a batch of prompts (token ids) to the new token ids of each. The licence
    stays that of the opening.
    """
    bos = tokenizer.bos_token_id
    for first in range(0, len(starts), batch):
        part = starts[first : first + batch]
        written = generate([opening.token_ids for opening in part])
        for opening, added in zip(part, written, strict=True):
            ids = opening.token_ids + added
            # Streams put the separator before each record themselves.
            ids = ids[1:] if ids[0] == bos else ids
            yield {
                "text": tokenizer.decode(ids, skip_special_tokens=False),
                "source": f"continued from {opening.source}",
                "license": opening.license,
            }
