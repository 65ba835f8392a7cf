"""Text written by the target itself, to distil drafts on what they will be asked to predict.

A draft is judged on the target's own text, not on the corpus (DistillSpec, Zhou et al. 2023,
arXiv 2310.08461: on-policy data raise acceptance).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from paceline.core.params import is_unicode
from paceline.core.stages import stage
from paceline.errors import DataError
from paceline.train.chat import ChatWriter, conversation_of, has_our_roles, questions_of
from paceline.train.records import RefusedError, Source, read_records


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
    longest_chat: int | None = None,
) -> list[Opening]:
    """``count`` openings, shared among the files by weight, random records of each.

    A conversation is opened up to one of its assistant turns (or to its end, if that is for the
    assistant to answer) of at most ``longest_chat`` tokens, twice ``longest`` if not given; other
    text by a random number of tokens; ids by their prompt. Raises DataError if a file has no
    record that fits.
    """
    rng = np.random.default_rng(seed)
    total = sum(source.weight for source in sources)
    opener = _Opener(tokenizer, rng, shortest, longest, longest_chat or 2 * longest)
    result: list[Opening] = []
    for source in sources:
        wanted = round(count * source.weight / total)
        chosen: list[Opening] = []
        with stage(f"choosing from {source.path.name}", total=wanted, unit="records") as doing:
            for record in _shuffled(source, exclude_licenses, rng, wanted):
                if len(chosen) == wanted:
                    break
                ids = opener.open(record)
                if ids is not None:
                    name, licence = str(record.get("source", "")), str(record.get("license", ""))
                    chosen.append(Opening(ids, name, licence))
                    doing.advance()
        if wanted and not chosen:
            raise DataError(
                f"{source.path} has no record of {shortest} tokens or more, and no conversation "
                f"that asks for an answer within {opener.longest_chat} tokens"
            )
        result.extend(chosen)
    return result


def _shuffled(
    source: Source, exclude_licenses: Sequence[str], rng: np.random.Generator, wanted: int
) -> Iterator[dict[str, Any]]:
    """The records of a file in random order; only those at the front are kept in memory."""
    count = sum(1 for _ in read_records(source.path, exclude_licenses))
    order = rng.permutation(count)
    first, size = 0, 2 * wanted + 64
    while first < count:
        part = [int(index) for index in order[first : first + size]]
        places = set(part)
        records = enumerate(read_records(source.path, exclude_licenses))
        kept = {index: record for index, record in records if index in places}
        for index in part:
            yield kept[index]
        first, size = first + size, 4 * size


class _Opener:
    """Beginnings of records."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        rng: np.random.Generator,
        shortest: int,
        longest: int,
        longest_chat: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._writer = ChatWriter(tokenizer)
        self._own = has_our_roles(tokenizer)
        self._rng = rng
        self._shortest, self._longest = shortest, longest
        self.longest_chat = longest_chat

    def open(self, record: dict[str, Any]) -> list[int] | None:
        """Token ids that begin a record; None if it cannot be begun or is too short or long."""
        prompt = record.get("prompt")
        if isinstance(record.get("ids"), list) and isinstance(prompt, int) and prompt:
            ids = [int(token) for token in record["ids"][:prompt]]
            return ids if len(ids) <= self.longest_chat else None
        try:
            prompts = self._prompts(record)
        except RefusedError:
            return None
        if prompts is not None:
            fitting = [ids for ids in map(self._ids, prompts) if len(ids) <= self.longest_chat]
            return fitting[int(self._rng.integers(len(fitting)))] if fitting else None
        text = record.get("text")
        if not isinstance(text, str) or not is_unicode(text):
            return None
        ids = self._tokenizer.encode(text)
        length = int(self._rng.integers(self._shortest, self._longest + 1))
        return ids[:length] if len(ids) > length else None

    def _prompts(self, record: dict[str, Any]) -> list[str] | None:
        """The beginnings of a conversation that ask for an answer; None for other records."""
        try:
            talk = conversation_of(record)
        except RefusedError:
            asked = questions_of(record)  # questions without answers
            assert asked is not None
            return [self._writer.prompt(asked.messages, asked.tools)]
        if talk is None:
            return None
        places = [k for k in talk.answers if k]
        if talk.messages[-1]["role"] != "assistant":
            places.append(len(talk.messages))
        return [self._writer.prompt(talk.messages[:k], talk.tools) for k in places]

    def _ids(self, prompt: str) -> list[int]:
        # Our tokenizers write the first token themselves, templates of others write theirs.
        return list(self._tokenizer.encode(prompt, add_special_tokens=self._own))
