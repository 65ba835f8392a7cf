"""``paceline train sample``: a model answers prompts, for its drafts to be trained on.

Every answer is a record of its own as soon as it is there, so that whatever interrupts hours of
writing costs only what was being written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, replace
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


@dataclass(frozen=True)
class SampleOptions:
    """What writes what, from what."""

    model: str = setting(MISSING, "The model that writes.")
    data: tuple[str, ...] = setting(
        MISSING,
        "Conversations, whose last question is answered (messages, conversations, turns), or text, "
        "whose beginning is continued; repeatable.",
        panel="Prompts",
        metavar="FILE[=WEIGHT]",
    )
    out: Path = setting(MISSING, "JSONL file to write.")
    batch: int = setting(32, "Sequences at once.", low=1, panel="Engine")


@expand
def sample(
    run: SampleOptions, prompts: PromptSelection, answers: AnswerConfig, engine: LoadSettings
) -> None:
    """Let a model answer prompts or continue texts, as data to train its drafts on.

    Run the same command again to go on where it stopped: until all is written, the records lie in
    OUT.partial.
    """
    out = run.out
    if out.is_file():
        info(f"{out} is there already; delete it to write it anew")
        return
    from paceline.train.prompts import prompts_of

    sources = [Source.parse(spec) for spec in run.data]
    params = SamplingParams(**asdict(answers))
    key = json.dumps({"model": run.model, "data": run.data, **asdict(prompts), **asdict(answers)})
    with LongRecord(out, "the records", key) as lines:
        if lines.lines:
            info(f"going on after {lines.lines:,} records in {lines.partial}")
        seed = prompts.seed + lines.lines
        llm = load_llm(engine, run.model, None, max_batch_size=run.batch, seed=seed)
        longest = min(prompts.max_prompt, llm.max_model_len - 1)
        chosen = prompts_of(sources, llm.tokenizer, replace(prompts, max_prompt=longest))
        writer = AnswerWriter(llm, params, longest, lines.add)
        writer.write(chosen, run.batch, lines.kept())
        failed = f" ({writer.failed} answers failed)" if writer.failed else ""
        info(f"{lines.lines:,} records in {out}{failed}")


@dataclass(frozen=True, eq=False)
class _Turn:
    prompt: NumberedPrompt
    number: int = 1  # 1 is the first answer


class AnswerWriter:
    """Has prompts answered and writes them down, one JSON line an answer."""

    def __init__(
        self, llm: LLM, params: SamplingParams, max_prompt: int, add: Callable[[str], None]
    ) -> None:
        from paceline.train.chat import ChatWriter

        self._llm, self._params, self._max_prompt, self._add = llm, params, max_prompt, add
        self._writer = ChatWriter(llm.tokenizer)
        self.failed = 0  # answers that ended with an error

    def write(self, prompts: Sequence[NumberedPrompt], batch: int, kept: Iterable[str] = ()) -> int:
        """Answer the prompts, but for the lines that an earlier run has ``kept``; returns how many
        records were written. At most ``batch`` sequences of like length are decoded at once."""
        waiting = self._left(prompts, kept)
        decoding: dict[_Turn, Request] = {}
        written = tokens = 0
        start, total = time.monotonic(), len(waiting)
        with stage("writing answers", total=total, unit="records") as doing:
            while waiting or decoding:
                if waiting and len(decoding) < batch:
                    group, waiting = waiting[: _GROUP * batch], waiting[_GROUP * batch :]
                    group.sort(key=lambda turn: len(turn.prompt.token_ids))
                    decoding |= {turn: self._begun(turn) for turn in group}
                self._llm.step()
                for turn, request in list(decoding.items()):
                    answer = request.completion
                    if answer is None:
                        continue
                    self._llm.release([decoding.pop(turn)])
                    written += self._note(turn, answer)
                    tokens += len(answer.token_ids)
                    speed = tokens / max(1e-9, time.monotonic() - start)
                    doing.advance(1, f"{tokens:,} tokens, {speed:,.0f} tokens/s")
                    after = self._next(turn, answer.token_ids, answer.finish_reason)
                    if after is not None:
                        total += 1
                        doing.resize(total)
                        decoding[after] = self._begun(after)
        return written

    def _begun(self, turn: _Turn) -> Request:
        (request,) = self._llm.prepare(turn.prompt.token_ids, self._params, streams=False)
        self._llm.enqueue([request])
        return request

    def _note(self, turn: _Turn, answer: Completion) -> int:
        """Write one record down; 0 if there is none."""
        if answer.finish_reason == "error" or not answer.token_ids:
            self.failed += 1
            return 0
        prompt = turn.prompt
        ids = [*prompt.token_ids, *answer.token_ids]
        record = {
            "job": prompt.number,
            "turn": turn.number,
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
        return 1

    def _next(self, turn: _Turn, written: Sequence[int], finish: str) -> _Turn | None:
        """The next question of a conversation, if there is one and the answer had an end."""
        talk = turn.prompt.talk
        if finish != "stop" or talk is None or not talk.later:
            return None
        text = self._llm.tokenizer.decode(list(written), skip_special_tokens=True)
        turns = [("assistant", text), ("user", talk.later[0])]
        messages = [*talk.messages, *({"role": role, "content": words} for role, words in turns)]
        talk = replace(talk, messages=messages, later=talk.later[1:])
        try:
            ids = self._writer.prompt_ids(talk, len(talk.messages))
        except RefusedError:
            return None
        asked = _Turn(replace(turn.prompt, token_ids=ids, talk=talk), turn.number + 1)
        return asked if len(ids) <= self._max_prompt else None

    def _left(self, prompts: Sequence[NumberedPrompt], kept: Iterable[str]) -> list[_Turn]:
        """What is yet to be answered: the first turns, and the next ones of what was kept."""
        turns: dict[int, _Turn | None] = {prompt.number: _Turn(prompt) for prompt in prompts}
        for line in kept:
            record = json.loads(line)
            turn = turns.get(record["job"])
            if turn is not None and turn.number == record["turn"]:
                written = record["ids"][record["prompt"] :]
                turns[record["job"]] = self._next(turn, written, record["finish"])
        return [turn for turn in turns.values() if turn is not None]
