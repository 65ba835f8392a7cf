"""A model's answers to prompts, as training data for its drafts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from paceline.core.params import SamplingParams
from paceline.core.stages import stage
from paceline.train.chat import ChatWriter
from paceline.train.prompts import NumberedPrompt
from paceline.train.records import RecordError

_BATCHES_PER_GROUP = 16  # the prompts of this many batches are sorted by length


class AnswerWriter:
    """Has an ``LLM`` answer prompts, and passes each ``Completion`` as a JSON line to ``add``."""

    def __init__(
        self, llm: Any, params: SamplingParams, max_prompt: int, add: Callable[[str], None]
    ) -> None:
        self._llm, self._params, self._max_prompt, self._add = llm, params, max_prompt, add
        self._writer = ChatWriter(llm.tokenizer)
        self.failed = 0  # answers that ended with an error

    def write(
        self, prompts: Sequence[NumberedPrompt], batch: int, kept: Iterable[str] = ()
    ) -> None:
        """Answer the prompts in groups of several batches, sorted by length, except those of an
        earlier run's lines (``kept``). A conversation's next question goes to the next group."""
        pending: dict[int, NumberedPrompt | None] = {prompt.number: prompt for prompt in prompts}
        for record in map(json.loads, kept):  # of conversations, the next prompt is left
            last = pending.get(record["job"])
            if last is not None and last.turn == record["turn"]:
                answer = record["ids"][record["prompt"] :]
                pending[last.number] = self._next(last, answer, record["finish"])
        waiting = [prompt for prompt in pending.values() if prompt is not None]
        tokens, total, start = 0, len(waiting), time.monotonic()
        size = _BATCHES_PER_GROUP * batch
        with stage("writing answers", total, "records") as progress:
            while waiting:
                group, waiting = waiting[:size], waiting[size:]
                group.sort(key=lambda prompt: len(prompt.token_ids))
                for event in self._llm.stream([prompt.token_ids for prompt in group], self._params):
                    prompt, answer = group[event.request], event.completion
                    if answer is None:
                        continue
                    self._write_record(prompt, answer)
                    tokens += len(answer.token_ids)
                    speed = tokens / max(1e-9, time.monotonic() - start)
                    progress.advance(1, f"{tokens:,} tokens, {speed:,.0f} tokens/s")
                    following = self._next(prompt, answer.token_ids, answer.finish_reason)
                    if following is not None:
                        total += 1
                        progress.resize(total)
                        waiting.insert(0, following)

    def _write_record(self, prompt: NumberedPrompt, answer: Any) -> None:
        if answer.finish_reason == "error" or not answer.token_ids:
            self.failed += 1
            return
        ids = [*prompt.token_ids, *answer.token_ids]
        record = {
            "job": prompt.number,
            "turn": prompt.turn,
            "task": prompt.task,
            "source": prompt.source,
            "license": prompt.license,
            "temperature": self._params.temperature,
            "prompt": len(prompt.token_ids),
            "ids": ids,
            "text": self._llm.tokenizer.decode(ids),
            "finish": answer.finish_reason,
        }
        self._add(json.dumps({k: v for k, v in record.items() if v != ""}, ensure_ascii=False))

    def _next(
        self, prompt: NumberedPrompt, answer: Sequence[int], finish: str
    ) -> NumberedPrompt | None:
        """The next prompt of a conversation: None if it has no further question, the answer was
        cut off, or the prompt would be too long."""
        conversation = prompt.conversation
        if finish != "stop" or conversation is None or not conversation.next_questions:
            return None
        text = self._llm.tokenizer.decode(list(answer), skip_special_tokens=True)
        question, *later = conversation.next_questions
        turns = {"role": "assistant", "content": text}, {"role": "user", "content": question}
        conversation = replace(
            conversation, messages=[*conversation.messages, *turns], next_questions=tuple(later)
        )
        with suppress(RecordError):
            ids = self._writer.prompt_ids(conversation, len(conversation.messages))
            if len(ids) <= self._max_prompt:
                turn = prompt.turn + 1
                return replace(prompt, token_ids=ids, conversation=conversation, turn=turn)
        return None
