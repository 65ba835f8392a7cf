"""``paceline train sample``: a model writes what drafts for it are trained on."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli.options import expand, load_llm, quiet_libraries
from paceline.cli.progress import showing
from paceline.files import LongRecord
from paceline.settings import LoadSettings, setting
from paceline.stages import say
from paceline.train.configs import AnswerConfig, PromptSelection

if TYPE_CHECKING:
    from paceline import LLM, SamplingParams
    from paceline.request.request import Request
    from paceline.train.answers import WrittenAnswer


class _Decoder:
    """The engine, fed with prompts while it decodes."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._params = llm, params
        self._open: list[Request] = []

    def add(self, number: int, token_ids: list[int]) -> None:
        requests = self._llm.prepare(token_ids, self._params, number, streams=False)
        self._llm.enqueue(requests)
        self._open.extend(requests)

    def step(self) -> list[WrittenAnswer]:
        from paceline.train.answers import WrittenAnswer

        self._llm.step()
        found = []
        for request in self._open:
            if request.completion is not None:
                done = request.completion
                found.append(
                    WrittenAnswer(request.number, list(done.token_ids), done.finish_reason)
                )
        if found:
            self._llm.release([r for r in self._open if r.completion is not None])
            self._open = [r for r in self._open if r.completion is None]
        return found


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
    console, out = Console(stderr=True), run.out
    quiet_libraries()
    if out.is_file():
        told = f"{out} is there already; delete it to write it anew"
        console.print(told, highlight=False, soft_wrap=True)
        return
    from paceline import SamplingParams
    from paceline.train.answers import AnswerWriter, jobs_of
    from paceline.train.records import Source

    sources = [Source.parse(spec) for spec in run.data]
    params = SamplingParams(**asdict(answers))
    key = json.dumps({"model": run.model, "data": run.data, **asdict(prompts), **asdict(answers)})
    with showing(console), LongRecord(out, "the records", key) as lines:
        if lines.lines:
            say(f"going on after {lines.lines:,} records in {lines.partial}")
        seed = prompts.seed + lines.lines
        llm = load_llm(engine, run.model, None, max_batch_size=run.batch, seed=seed)
        longest = min(prompts.max_prompt, llm.max_model_len - 1)
        jobs = jobs_of(sources, llm.tokenizer, replace(prompts, max_prompt=longest))
        decoder = _Decoder(llm, params)
        writer = AnswerWriter(decoder, llm.tokenizer, longest, answers.temperature, lines.add)
        writer.write(jobs, run.batch, lines.kept())
        failed = f" ({writer.failed} answers failed)" if writer.failed else ""
        say(f"{lines.lines:,} records in {out}{failed}")
