"""``paceline train sample``: a model writes what drafts for it are trained on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paceline.cli.options import expand, quiet_libraries, set_threads
from paceline.cli.progress import showing
from paceline.cli.values import parse_bytes
from paceline.files import LongRecord
from paceline.stages import say, stage

if TYPE_CHECKING:
    from paceline import LLM, SamplingParams
    from paceline.request.request import Request
    from paceline.train.answers import Answer

_PROMPTS = "Prompts"
_ANSWERS = "Answers"


class _Decoder:
    """The engine, fed with prompts while it decodes."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._params = llm, params
        self._open: list[Request] = []

    def add(self, number: int, token_ids: list[int]) -> None:
        requests = self._llm.prepare(token_ids, self._params, number, streams=False)
        self._llm.enqueue(requests)
        self._open.extend(requests)

    def step(self) -> list[Answer]:
        from paceline.train.answers import Answer

        self._llm.step()
        found = []
        for request in self._open:
            if request.completion is not None:
                done = request.completion
                found.append(Answer(request.number, list(done.token_ids), done.finish_reason))
        if found:
            self._llm.release([r for r in self._open if r.completion is not None])
            self._open = [r for r in self._open if r.completion is None]
        return found


@dataclass(frozen=True)
class SamplePromptOptions:
    """Fields of PromptSelection, which cannot be imported here: it would load numpy for --help."""

    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompts to take.",
            show_default="all conversations, 1000 texts",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, help="Of choice and text.", rich_help_panel=_PROMPTS)
    ] = 0
    exclude_licenses: Annotated[
        list[str],
        typer.Option(
            "--exclude-license",
            help="Leave out such records; repeatable.",
            rich_help_panel=_PROMPTS,
        ),
    ] = field(default_factory=lambda: ["CC-BY-SA"])
    longest: Annotated[
        int,
        typer.Option(
            min=12, help="Longest beginning of a text, in tokens.", rich_help_panel=_PROMPTS
        ),
    ] = 96
    max_prompt: Annotated[
        int, typer.Option(min=1, help="Longest conversation, in tokens.", rich_help_panel=_PROMPTS)
    ] = 640
    follow_ups: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of the conversations that are asked a further question. Questions of "
            "several turns are always asked to the end.",
            rich_help_panel=_PROMPTS,
        ),
    ] = 0.0


@dataclass(frozen=True)
class AnswerOptions:
    """Fields of SamplingParams."""

    max_tokens: Annotated[
        int, typer.Option(min=1, help="New tokens of each.", rich_help_panel=_ANSWERS)
    ] = 256
    temperature: Annotated[
        float,
        typer.Option("--temperature", "-t", min=0, help="0 is greedy.", rich_help_panel=_ANSWERS),
    ] = 0.0
    top_p: Annotated[
        float, typer.Option(help="Keep this much probability.", rich_help_panel=_ANSWERS)
    ] = 1.0
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Go on past the end of a text.", rich_help_panel=_ANSWERS
        ),
    ] = False


@dataclass(frozen=True)
class SampleEngineOptions:
    """How the model is run; which texts come out depends on it for sampled ones alone."""

    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 32
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float32 ...")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto"
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="As in 2GB.", show_default="by batch and model"),
    ] = None
    threads: Annotated[
        int | None, typer.Option(min=1, help="Processor threads.", show_default=False)
    ] = None

    def load(self, model: str, seed: int) -> LLM:
        """Raises PacelineError."""
        from paceline import LLM

        memory = None if self.kv_cache_memory is None else parse_bytes(self.kv_cache_memory)
        with stage(f"loading {model}"):
            return LLM(
                model,
                dtype=self.dtype,
                device=self.device,
                max_batch_size=self.batch,
                kv_cache_memory=memory,
                seed=seed,
            )


@expand
def sample(
    model: Annotated[str, typer.Option(help="The model that writes.")],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="FILE[=WEIGHT]",
            help="Conversations, whose last question is answered (messages, conversations, turns), "
            "or text, whose beginning is continued; repeatable.",
            rich_help_panel=_PROMPTS,
        ),
    ],
    out: Annotated[Path, typer.Option(help="JSONL file to write.")],
    prompts: SamplePromptOptions,
    answers: AnswerOptions,
    engine: SampleEngineOptions,
) -> None:
    """Let a model answer prompts or continue texts, as data to train its drafts on.

    Run the same command again to go on where it stopped: until all is written, the records lie in
    OUT.partial.
    """
    console = Console(stderr=True)
    quiet_libraries()
    set_threads(engine.threads)
    if out.is_file():
        told = f"{out} is there already; delete it to write it anew"
        console.print(told, highlight=False, soft_wrap=True)
        return
    from paceline import SamplingParams
    from paceline.train.answers import AnswerWriter, PromptSelection, jobs_of
    from paceline.train.data import Source

    sources = [Source.parse(spec) for spec in data]
    params = SamplingParams(**asdict(answers))
    key = json.dumps({"model": model, "data": data, **asdict(prompts), **asdict(answers)})
    with showing(console), LongRecord(out, "the records", key) as lines:
        if lines.lines:
            say(f"going on after {lines.lines:,} records in {lines.partial}")
        llm = engine.load(model, prompts.seed + lines.lines)
        longest = min(prompts.max_prompt, llm.max_model_len - 1)
        excluded = tuple(prompts.exclude_licenses)
        selection = PromptSelection(
            **asdict(prompts) | {"max_prompt": longest, "exclude_licenses": excluded}
        )
        jobs = jobs_of(sources, llm.tokenizer, selection)
        decoder = _Decoder(llm, params)
        writer = AnswerWriter(decoder, llm.tokenizer, longest, answers.temperature, lines.add)
        writer.write(jobs, engine.batch, lines.kept())
        failed = f" ({writer.failed} answers failed)" if writer.failed else ""
        say(f"{lines.lines:,} records in {out}{failed}")
