"""``paceline train sample``: a model answers prompts, for its drafts to be trained on.

Every answer is a record as soon as it is there: an interruption costs what was being written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import SamplingParams
from paceline.cli.options import expand, load_llm
from paceline.core.stages import info, stage
from paceline.files import LongRecord
from paceline.settings import LoadSettings, setting
from paceline.train.configs import AnswerConfig, PromptSelection
from paceline.train.records import RefusedError, Source

if TYPE_CHECKING:
    from paceline import LLM, Completion
    from paceline.request.request import Request
    from paceline.train.prompts import NumberedPrompt

_GROUP = 4  # batches of prompts that are sorted by length together


@expand
def sample(
    *,
    model: str = setting(MISSING, "The model that writes."),
    data: tuple[str, ...] = setting(
        MISSING,
        "Conversations, whose last question is answered, or texts, which are continued.",
        panel="Prompts",
        metavar="FILE[=WEIGHT]",
    ),
    out: Path = setting(MISSING, "JSONL file to write."),
    batch: int = setting(32, "Sequences at once.", low=1, panel="Engine"),
    prompts: PromptSelection,
    answers: AnswerConfig,
    engine: LoadSettings,
) -> None:
    """Let a model answer prompts or continue texts, as data to train its drafts on.

    Run the same command again to go on where it stopped: until all is written, the records lie in
    OUT.partial.
    """
    if out.is_file():
        info(f"{out} is there already; delete it to write it anew")
        return
    from paceline.train.prompts import prompts_of

    sources = [Source.parse(spec) for spec in data]
    params = SamplingParams(**asdict(answers))
    key = json.dumps({"model": model, "data": data, **asdict(prompts), **asdict(answers)})
    with LongRecord(out, "the records", key) as lines:
        if lines.lines:
            info(f"going on after {lines.lines:,} records in {lines.partial}")
        seed = prompts.seed + lines.lines
        llm = load_llm(engine, model, None, max_batch_size=batch, seed=seed)
        longest = min(prompts.max_prompt, llm.max_model_len - 1)
        chosen = prompts_of(sources, llm.tokenizer, replace(prompts, max_prompt=longest))
        writer = AnswerWriter(llm, params, longest, lines.add)
        writer.write(chosen, batch, lines.kept())
        failed = f" ({writer.failed} answers failed)" if writer.failed else ""
        info(f"{lines.lines:,} records in {out}{failed}")


class AnswerWriter:
    """Has prompts answered and writes them down, one JSON line an answer."""

    def __init__(
        self, llm: LLM, params: SamplingParams, max_prompt: int, add: Callable[[str], None]
    ) -> None:
        from paceline.train.chat import ChatWriter

        self._llm, self._params, self._max_prompt, self._add = llm, params, max_prompt, add
        self._writer = ChatWriter(llm.tokenizer)
        self.failed = 0  # answers that ended with an error

    def write(
        self, prompts: Sequence[NumberedPrompt], batch: int, kept: Iterable[str] = ()
    ) -> None:
        """Answer the prompts, but for the lines that an earlier run has ``kept``. At most ``batch``
        sequences of like length are decoded at once."""
        waiting = self._unanswered(prompts, kept)
        decoding: dict[Request, NumberedPrompt] = {}
        tokens, total, start = 0, len(waiting), time.monotonic()

        def begin(prompt: NumberedPrompt) -> None:
            (request,) = self._llm.prepare(prompt.token_ids, self._params, streams=False)
            self._llm.enqueue([request])
            decoding[request] = prompt

        with stage("writing answers", total, "records") as doing:
            while waiting or decoding:
                if len(decoding) < batch:
                    group, waiting = waiting[: _GROUP * batch], waiting[_GROUP * batch :]
                    for prompt in sorted(group, key=lambda prompt: len(prompt.token_ids)):
                        begin(prompt)
                for request, _ in self._llm.step():
                    answer = request.completion
                    if answer is None:
                        continue
                    self._llm.release([request])
                    prompt = decoding.pop(request)
                    self._note(prompt, answer)
                    tokens += len(answer.token_ids)
                    speed = tokens / max(1e-9, time.monotonic() - start)
                    doing.advance(1, f"{tokens:,} tokens, {speed:,.0f} tokens/s")
                    after = self._next(prompt, answer.token_ids, answer.finish_reason)
                    if after is not None:
                        total += 1
                        doing.resize(total)
                        begin(after)

    def _note(self, prompt: NumberedPrompt, answer: Completion) -> None:
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
        """The next question of a conversation, if there is one and the answer had an end."""
        talk = prompt.talk
        if finish != "stop" or talk is None or not talk.later:
            return None
        text = self._llm.tokenizer.decode(list(answer), skip_special_tokens=True)
        turns = {"role": "assistant", "content": text}, {"role": "user", "content": talk.later[0]}
        talk = replace(talk, messages=[*talk.messages, *turns], later=talk.later[1:])
        with suppress(RefusedError):
            ids = self._writer.prompt_ids(talk, len(talk.messages))
            if len(ids) <= self._max_prompt:
                return replace(prompt, token_ids=ids, talk=talk, turn=prompt.turn + 1)
        return None

    def _unanswered(
        self, prompts: Sequence[NumberedPrompt], kept: Iterable[str]
    ) -> list[NumberedPrompt]:
        """The first questions, and the next ones of what was kept."""
        left: dict[int, NumberedPrompt | None] = {prompt.number: prompt for prompt in prompts}
        for record in map(json.loads, kept):
            prompt = left.get(record["job"])
            if prompt is not None and prompt.turn == record["turn"]:
                answer = record["ids"][record["prompt"] :]
                left[prompt.number] = self._next(prompt, answer, record["finish"])
        return [prompt for prompt in left.values() if prompt is not None]
