"""Prompts for a target: questions of conversations and prefixes of texts. Its answers are training
data (such on-policy data raise acceptance: DistillSpec, Zhou et al. 2023, arXiv 2310.08461)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import count, islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from paceline.core.params import SamplingParams
from paceline.core.stages import stage
from paceline.errors import DataError
from paceline.train.chat import ChatWriter, conversation_from_record
from paceline.train.configs import PromptSelection
from paceline.train.data import checked_ids
from paceline.train.records import RecordError, Records, Source, checked_text

_DEFAULT_TEXTS = 1000  # number of text prefixes if no number of prompts is given
_MIN_PREFIX = 12  # tokens
_BATCHES_PER_GROUP = 16  # the prompts of this many batches are answered in the order of length


@dataclass(frozen=True)
class NumberedPrompt:
    """The token ids of a prompt, and what is known of its origin."""

    token_ids: list[int]
    source: str
    license: str
    number: int = 0


def load_prompts(
    sources: Sequence[Source], tokenizer: PreTrainedTokenizerFast, selection: PromptSelection
) -> list[NumberedPrompt]:
    """Load prompts from all files, in an order that depends only on the files and the selection.
    ``selection.num_prompts`` is divided between files by weight. Raises DataError."""
    total, before = sum(source.weight for source in sources), 0.0
    prompts: list[NumberedPrompt] = []
    for number, source in enumerate(sources):
        wanted = selection.num_prompts
        if wanted is None:  # texts if the first record is one
            first = next(iter(Records(source.path, selection.exclude_licenses)), {"text": ""})
            is_text = first.get("ids") is not None or first.get("text") is not None
            wanted = _DEFAULT_TEXTS if is_text else None
        after = before + source.weight
        if wanted is not None:  # rounded so that the shares of all files add up to the number
            wanted = round(wanted * after / total) - round(wanted * before / total)
        before = after
        seed = (selection.seed, number)
        share = replace(selection, num_prompts=wanted)
        prompts += load_file_prompts(source, tokenizer, share, seed)
    order = np.random.default_rng(selection.seed).permutation(len(prompts))
    return [replace(prompts[index], number=int(index)) for index in order]


def load_file_prompts(
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    selection: PromptSelection,
    seed: Sequence[int],
    any_turn: bool = False,
) -> list[NumberedPrompt]:
    """Load ``selection.num_prompts`` prompts (None: all) from random records of a file. A
    conversation is cut after its last question or, with ``any_turn``, before a random answer; other
    text after a random number of tokens; token ids after their prompt. Raises DataError."""
    wanted = selection.num_prompts
    if wanted == 0:
        return []
    rng = np.random.default_rng(seed)
    maker = _PromptMaker(tokenizer, ChatWriter(tokenizer), selection, rng, any_turn)
    records = Records(source.path, selection.exclude_licenses)
    prompts: list[NumberedPrompt] = []
    what = f"reading the prompts of {source.path.name}"
    with stage(what, total=wanted, unit="prompts") as progress:
        numbered = records.numbered()
        if wanted is not None:  # sample twice as many and some more, as not all may be usable
            keyed = zip(iter(rng.random, None), count(), numbered)
            numbered = (item for *_, item in nsmallest(2 * wanted + 64, keyed))
        for _, prompt in islice(records.convert(maker.prompt, numbered), wanted):
            prompts.append(prompt)
            progress.advance()
    if not prompts:
        why = records.refused_lines or "it is empty; give conversations or texts"
        raise DataError(f"{source.path} has no prompt that can be answered: {why}")
    records.report(len(prompts))
    return prompts


@dataclass(frozen=True)
class _PromptMaker:
    tokenizer: PreTrainedTokenizerFast
    writer: ChatWriter
    selection: PromptSelection
    rng: np.random.Generator
    any_turn: bool

    def prompt(self, record: dict[str, Any]) -> NumberedPrompt:
        """Raises RecordError."""
        source, licence = str(record.get("source", "")), str(record.get("license", ""))
        conversation = conversation_from_record(record)
        if conversation is None:
            return NumberedPrompt(
                self._text_prefix(record), f"continued from {source or 'texts'}", licence
            )
        if not conversation.answer_positions:
            raise RecordError("it has no message of the user to answer")
        turns = conversation.answer_positions[-1:]
        if self.any_turn:
            turns = self.rng.permutation(conversation.answer_positions).tolist()
        for turn in turns:
            ids = self.writer.prompt_ids(conversation, turn)
            if len(ids) <= self.selection.max_prompt_len:
                break
        else:
            raise RecordError(f"it has {len(ids)} tokens, more than --max-prompt-len")
        return NumberedPrompt(ids, source, licence)

    def _text_prefix(self, record: dict[str, Any]) -> list[int]:
        given, text = np.zeros(0, np.int64), record.get("text")
        if record.get("ids") is not None:
            given, prompt = checked_ids(record, len(self.tokenizer), after=0)
            if prompt > self.selection.max_prompt_len:
                raise RecordError(f"its prompt has {prompt} tokens, more than --max-prompt-len")
            if prompt:
                return [int(token) for token in given[:prompt]]
        ids = given.tolist() if len(given) else self.tokenizer.encode(checked_text(text))
        longest = min(self.selection.max_text_len, self.selection.max_prompt_len, len(ids) - 1)
        if longest < _MIN_PREFIX:
            raise RecordError(f"it has {len(ids)} tokens, too few for a prefix of {_MIN_PREFIX}")
        return list(ids[: int(self.rng.integers(_MIN_PREFIX, longest + 1))])


class AnswerWriter:
    """Has an ``LLM`` answer prompts, and passes each ``Completion`` as a JSON line to ``add``."""

    def __init__(self, llm: Any, params: SamplingParams, add: Callable[[str], None]) -> None:
        self._llm, self._params, self._add = llm, params, add
        self.failed = 0  # answers that ended with an error

    def write(
        self, prompts: Sequence[NumberedPrompt], batch: int, kept: Iterable[str] = ()
    ) -> None:
        """Answer the prompts in groups of several batches, sorted by length, except those of an
        earlier run's lines (``kept``)."""
        done = {json.loads(line)["job"] for line in kept}
        waiting = [prompt for prompt in prompts if prompt.number not in done]
        tokens, start = 0, time.monotonic()
        size = _BATCHES_PER_GROUP * batch
        with stage("writing answers", len(waiting), "records") as progress:
            for first in range(0, len(waiting), size):
                group = waiting[first : first + size]
                group.sort(key=lambda prompt: len(prompt.token_ids))
                for event in self._llm.stream([prompt.token_ids for prompt in group], self._params):
                    if event.completion is None:
                        continue
                    self._write_record(group[event.request], event.completion)
                    tokens += len(event.completion.token_ids)
                    speed = tokens / max(1e-9, time.monotonic() - start)
                    progress.advance(1, f"{tokens:,} tokens, {speed:,.0f} tokens/s")

    def _write_record(self, prompt: NumberedPrompt, answer: Any) -> None:
        if answer.finish_reason == "error" or not answer.token_ids:
            self.failed += 1
            return
        ids = [*prompt.token_ids, *answer.token_ids]
        record = {
            "job": prompt.number,
            "source": prompt.source,
            "license": prompt.license,
            "prompt": len(prompt.token_ids),
            "ids": ids,
            "text": self._llm.tokenizer.decode(ids),
            "finish": answer.finish_reason,
        }
        self._add(json.dumps({k: v for k, v in record.items() if v != ""}, ensure_ascii=False))
