"""What a target is asked: the questions of conversations and the beginnings of texts, for data of
its own (on-policy data raise acceptance: DistillSpec, Zhou et al. 2023, arXiv 2310.08461)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from paceline.core.stages import stage
from paceline.errors import DataError
from paceline.train.chat import ChatWriter, Conversation, conversation_of
from paceline.train.configs import PromptSelection
from paceline.train.records import Records, RefusedError, Source, unicode_text

# What is asked about an answer, where a conversation has no further question of its own.
FOLLOW_UPS = Path(__file__).with_name("follow_ups.txt").read_text(encoding="utf-8").splitlines()
_TEXTS = 1000  # beginnings of texts, where no count is given
_SHORTEST = 12  # tokens of one


@dataclass(frozen=True)
class NumberedPrompt:
    """``token_ids`` to go on from; of a conversation its messages, and what is asked ``later``.
    ``turn`` counts its answers."""

    token_ids: list[int]
    source: str
    license: str
    task: str = ""
    talk: Conversation | None = None
    number: int = 0
    turn: int = 1


def prompts_of(
    sources: Sequence[Source], tokenizer: PreTrainedTokenizerFast, selection: PromptSelection
) -> list[NumberedPrompt]:
    """The numbered prompts of all files in random order; the same for the same files and selection.

    Files share ``selection.num_prompts`` by weight. Raises DataError.
    """
    total = sum(source.weight for source in sources)
    prompts: list[NumberedPrompt] = []
    for number, source in enumerate(sources):
        wanted = selection.num_prompts
        if wanted is None and not _holds_conversations(source, selection):
            wanted = _TEXTS
        share = None if wanted is None else round(wanted * source.weight / total)
        seed = (selection.seed, number)
        prompts += prompts_of_file(source, tokenizer, replace(selection, num_prompts=share), seed)
    order = np.random.default_rng(selection.seed).permutation(len(prompts))
    return [replace(prompts[index], number=int(index)) for index in order]


def _holds_conversations(source: Source, selection: PromptSelection) -> bool:
    """Going by its first record."""
    record = next(iter(Records(source.path, selection.exclude_licenses)), {"text": ""})
    return record.get("ids") is None and record.get("text") is None


def prompts_of_file(
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    selection: PromptSelection,
    seed: Sequence[int],
    any_turn: bool = False,
) -> list[NumberedPrompt]:
    """``selection.num_prompts`` prompts of a file (None: all), of random records.

    A conversation is opened at its last question or, with ``any_turn``, before a random answer;
    other text after a random number of tokens; ids after their prompt. DataError without any."""
    wanted = selection.num_prompts
    if wanted == 0:
        return []
    rng = np.random.default_rng(seed)
    opener = _Opener(tokenizer, ChatWriter(tokenizer), selection, rng, any_turn)
    records = Records(source.path, selection.exclude_licenses)
    prompts: list[NumberedPrompt] = []
    what = f"reading the prompts of {source.path.name}"
    with stage(what, total=wanted, unit="prompts") as doing:
        numbered = records.numbered()
        if wanted is not None:  # twice as many and some more: not all can be used
            keyed = zip(iter(rng.random, None), count(), numbered)
            numbered = (item for *_, item in nsmallest(2 * wanted + 64, keyed))
        for _, prompt in islice(records.made(opener.prompt, numbered), wanted):
            prompts.append(prompt)
            doing.advance()
    if not prompts:
        why = records.named if records.refused else "it is empty; give conversations or texts"
        raise DataError(f"{source.path} has no prompt that can be answered: {why}")
    records.report(len(prompts))
    return prompts


@dataclass(frozen=True)
class _Opener:
    """Makes prompts of records."""

    tokenizer: PreTrainedTokenizerFast
    writer: ChatWriter
    selection: PromptSelection
    rng: np.random.Generator
    any_turn: bool

    def prompt(self, record: dict[str, Any]) -> NumberedPrompt:
        """Raises RefusedError."""
        source, licence = str(record.get("source", "")), str(record.get("license", ""))
        talk = conversation_of(record)
        if talk is None:
            return NumberedPrompt(self._beginning(record), f"continued from {source}", licence)
        if not talk.openings:
            raise RefusedError("it has no message of a user to answer")
        turns = self.rng.permutation(talk.openings) if self.any_turn else talk.openings[-1:]
        for turn in map(int, turns):
            ids = self.writer.prompt_ids(talk, turn)
            if len(ids) <= self.selection.max_prompt_len:
                break
        else:
            raise RefusedError(f"it has {len(ids)} tokens, more than --max-prompt-len")
        later = talk.later
        if not later and self.rng.random() < self.selection.follow_ups:
            later = (FOLLOW_UPS[int(self.rng.integers(len(FOLLOW_UPS)))],)
        task = str(record.get("task", record.get("category", "")))
        talk = replace(talk, messages=talk.messages[:turn], later=later)
        return NumberedPrompt(ids, source, licence, task, talk)

    def _beginning(self, record: dict[str, Any]) -> list[int]:
        prompt, text = record.get("prompt"), record.get("text")
        if isinstance(record.get("ids"), list) and isinstance(prompt, int) and prompt:
            given: list[int] = record["ids"][:prompt]
            if not all(isinstance(token, int) for token in given):
                raise RefusedError("its ids are not a list of whole numbers")
            if len(given) > self.selection.max_prompt_len:
                raise RefusedError(
                    f"its prompt has {len(given)} tokens, more than --max-prompt-len"
                )
            return given
        ids = self.tokenizer.encode(unicode_text(text))
        longest = min(self.selection.max_text_len, self.selection.max_prompt_len, len(ids) - 1)
        if longest < _SHORTEST:
            raise RefusedError(f"it has no beginning of {_SHORTEST} tokens")
        return list(ids[: int(self.rng.integers(_SHORTEST, longest + 1))])
