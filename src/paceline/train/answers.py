"""A target answers prompts, for a draft to be trained on: what is asked, and what is written down.

A prompt is the last question of a conversation or the beginning of a text. Every answer is a
record of its own as soon as it is there, so that whatever interrupts hours of writing costs only
what was being written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerFast

from paceline.core.stages import stage
from paceline.errors import DataError
from paceline.train.chat import ChatMessages, ChatWriter, has_our_roles, questions_of
from paceline.train.configs import PromptSelection as PromptSelection
from paceline.train.records import Refusals, RefusedError, Source, numbered_records
from paceline.train.sample import Opening, openings

# What is asked about an answer, where a conversation has no further question of its own.
FOLLOW_UPS = (
    "Rewrite your previous response in fewer words.",
    "Can you explain that again, in simpler words?",
    "Now rewrite it as a list of bullet points.",
    "Are you sure? Check your answer step by step.",
    "Give me one more example.",
    "Translate the main idea into a single sentence.",
    "What would change if the numbers were doubled?",
    "Write a short poem about it.",
    "Please make it more detailed.",
    "Modify your answer so that a child understands it.",
)
_GROUP = 4  # batches of prompts that are sorted by length together
_OPENINGS = 1000  # of text, where no count is given


@dataclass(frozen=True)
class AnswerJob:
    """A prompt, and what is asked next when it has been answered."""

    number: int
    token_ids: list[int]
    source: str
    license: str
    task: str = ""
    messages: ChatMessages | None = None
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenAnswer:
    """What the target wrote for job ``number``: its tokens with the end token, and why it ended."""

    number: int
    token_ids: list[int]
    finish: str


class Decoder(Protocol):
    """A batched engine: takes prompts at any time and tells which have been answered."""

    def add(self, number: int, token_ids: list[int]) -> None: ...

    def step(self) -> list[WrittenAnswer]: ...


# -- prompts ---------------------------------------------------------------------------------------


def jobs_of(
    sources: Sequence[Source], tokenizer: PreTrainedTokenizerFast, selection: PromptSelection
) -> list[AnswerJob]:
    """The prompts of all files; the same for the same files and selection. Raises DataError."""
    total = sum(source.weight for source in sources)
    jobs: list[AnswerJob] = []
    for number, source in enumerate(sources):
        share = source.weight / total
        wanted = None if selection.count is None else round(selection.count * share)
        if _asks(source, selection):
            asked = _asked(
                source, tokenizer, selection, (selection.seed, number), wanted, len(jobs)
            )
        else:
            count = round(_OPENINGS * share) if wanted is None else wanted
            starts = openings(
                [source],
                tokenizer,
                count,
                selection.seed,
                selection.exclude_licenses,
                longest=selection.longest,
            )
            asked = [_opened(len(jobs) + n, opening) for n, opening in enumerate(starts)]
        jobs.extend(asked)
    order = np.random.default_rng(selection.seed).permutation(len(jobs))
    return [jobs[int(index)] for index in order]


def _asks(source: Source, selection: PromptSelection) -> bool:
    """Whether a file holds conversations in one of the layouts for them, going by its first
    record."""
    for _, record in numbered_records(source.path, selection.exclude_licenses):
        return all(record.get(name) is None for name in ("ids", "text"))
    return False


def _opened(number: int, opening: Opening) -> AnswerJob:
    return AnswerJob(number, opening.token_ids, f"continued from {opening.source}", opening.license)


def _asked(
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    selection: PromptSelection,
    seed: tuple[int, int],
    wanted: int | None,
    first: int,
) -> list[AnswerJob]:
    """``wanted`` (None: all) of a file's questions, numbered from ``first``."""
    rng = np.random.default_rng(seed)
    prompter, refused = Prompter(tokenizer, selection.max_prompt), Refusals(source.path)
    jobs: list[AnswerJob] = []
    with stage(f"reading the prompts of {source.path.name}", unit="prompts") as doing:
        for line, record in numbered_records(source.path, selection.exclude_licenses, refused):
            try:
                asked = questions_of(record)
                if asked is None:
                    raise RefusedError("it asks nothing")
                ids = prompter.ids(asked.messages, asked.tools)
            except RefusedError as why:
                refused.add(line, str(why))
                continue
            later = asked.later
            if rng.random() < selection.follow_ups and not later:
                later = (FOLLOW_UPS[int(rng.integers(len(FOLLOW_UPS)))],)
            source_name, licence = str(record.get("source", "")), str(record.get("license", ""))
            task = str(record.get("task", record.get("category", "")))
            number = first + len(jobs)
            jobs.append(AnswerJob(number, ids, source_name, licence, task, asked.messages, later))
            doing.advance()
    if not jobs:
        raise DataError(f"{source.path} has no prompt that can be answered: {refused.named}")
    refused.report(len(jobs))
    if wanted is None or wanted >= len(jobs):
        return jobs
    return [jobs[int(index)] for index in sorted(rng.permutation(len(jobs))[:wanted])]


@dataclass
class Prompter:
    """Conversations as token ids that ask for an answer."""

    tokenizer: PreTrainedTokenizerFast
    max_prompt: int

    def __post_init__(self) -> None:
        self._writer = ChatWriter(self.tokenizer)
        self._own = has_our_roles(self.tokenizer)

    def ids(self, messages: ChatMessages, tools: list[Any] | None = None) -> list[int]:
        """Raises RefusedError for what the template refuses and what is too long."""
        text = self._writer.prompt(messages, tools)
        try:
            ids = list(self.tokenizer.encode(text, add_special_tokens=self._own))
        except (UnicodeError, TypeError):
            raise RefusedError("it has half a surrogate pair, which is no character") from None
        if len(ids) > self.max_prompt:
            raise RefusedError(f"it has {len(ids)} tokens, more than --max-prompt")
        return ids


# -- answers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Turn:
    job: AnswerJob
    number: int  # 1 is the first answer
    token_ids: list[int]
    messages: ChatMessages | None


class AnswerWriter:
    """Has jobs answered and writes them down, one JSON line an answer."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerFast,
        max_prompt: int,
        temperature: float,
        add: Callable[[str], None],
    ) -> None:
        self._decoder, self._tokenizer, self._add = decoder, tokenizer, add
        self._prompter = Prompter(tokenizer, max_prompt)
        self._temperature = temperature
        self.failed = 0  # answers that ended with an error

    def write(self, jobs: Sequence[AnswerJob], batch: int, kept: Iterable[str] = ()) -> int:
        """Answer the jobs, but for the lines that an earlier run has ``kept``; returns how many
        records were written. At most ``batch`` sequences of like length are decoded at once."""
        waiting = self._left(jobs, kept)
        open_turns: dict[int, _Turn] = {}
        written = tokens = 0
        start = time.monotonic()
        total = len(waiting)
        with stage("writing answers", total=total, unit="records") as doing:
            while waiting or open_turns:
                if waiting and len(open_turns) < batch:
                    group, waiting = waiting[: _GROUP * batch], waiting[_GROUP * batch :]
                    for turn in sorted(group, key=lambda turn: len(turn.token_ids)):
                        self._begin(turn, open_turns)
                for answer in self._decoder.step():
                    turn = open_turns.pop(answer.number)
                    written += self._note(turn, answer)
                    tokens += len(answer.token_ids)
                    speed = tokens / max(1e-9, time.monotonic() - start)
                    doing.advance(1, f"{tokens:,} tokens, {speed:,.0f} tokens/s")
                    after = self._next(turn, answer.token_ids, answer.finish)
                    if after is not None:
                        total += 1
                        doing.resize(total)
                        self._begin(after, open_turns)
        return written

    def _begin(self, turn: _Turn, open_turns: dict[int, _Turn]) -> None:
        open_turns[turn.job.number] = turn
        self._decoder.add(turn.job.number, turn.token_ids)

    def _note(self, turn: _Turn, answer: WrittenAnswer) -> int:
        """Write one record down; 0 if there is none."""
        if answer.finish == "error" or not answer.token_ids:
            self.failed += 1
            return 0
        job, ids = turn.job, [*turn.token_ids, *answer.token_ids]
        record = {
            "job": job.number,
            "turn": turn.number,
            "task": job.task,
            "source": job.source,
            "license": job.license,
            "temperature": self._temperature,
            "prompt": len(turn.token_ids),
            "ids": ids,
            "text": self._tokenizer.decode(ids),
            "finish": answer.finish,
        }
        self._add(json.dumps({k: v for k, v in record.items() if v != ""}, ensure_ascii=False))
        return 1

    def _next(self, turn: _Turn, written: Sequence[int], finish: str) -> _Turn | None:
        """The next question of a conversation, if there is one and the answer had an end."""
        later, messages = turn.job.later, turn.messages
        if finish != "stop" or messages is None or turn.number > len(later):
            return None
        text = self._tokenizer.decode(list(written), skip_special_tokens=True)
        asked = {"role": "user", "content": later[turn.number - 1]}
        talk = [*messages, {"role": "assistant", "content": text}, asked]
        try:
            return _Turn(turn.job, turn.number + 1, self._prompter.ids(talk), talk)
        except RefusedError:
            return None

    def _left(self, jobs: Sequence[AnswerJob], kept: Iterable[str]) -> list[_Turn]:
        """What is yet to be answered: the first turns, and the next ones of what was kept."""
        turns: dict[int, _Turn | None] = {
            job.number: _Turn(job, 1, job.token_ids, job.messages) for job in jobs
        }
        for line in kept:
            record = json.loads(line)
            number = record["job"]
            turn = turns.get(number)
            if turn is not None and turn.number == record["turn"]:
                written = record["ids"][record["prompt"] :]
                turns[number] = self._next(turn, written, record["finish"])
        return [turn for turn in turns.values() if turn is not None]
