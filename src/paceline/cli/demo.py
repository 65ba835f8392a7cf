"""``paceline demo``: decodes the same prompts plainly and speculatively, side by side.

Both engines take turns of a twentieth of a second, and the time of each is measured separately,
including the prompt. So both have the same machine, and drawing on the screen slows neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich import table as rich_tables
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from paceline import SamplingParams
from paceline.cli.options import ModelOptions, expand
from paceline.cli.output import DRAFT_STYLE, TARGET_STYLE, JsonOptions, Painter
from paceline.core.stages import stage
from paceline.errors import PacelineError
from paceline.lab.demo import Measurement, demo_record, demo_table, prompts_for, with_memory
from paceline.lab.report.document import times
from paceline.model.names import DEFAULT_DRAFT, EMBEDDED, REAL, default_model
from paceline.settings import setting

if TYPE_CHECKING:
    from paceline import LLM
    from paceline.engine.driver import Drive
    from paceline.lab.bench.prompts import BenchPrompt

_ABOUT_REAL_MODEL = (
    "SmolLM2-135M-Instruct is a real model that downloads within a minute. Its weights were "
    "dequantised from a 4-bit file, so drafts of its 4-bit copy are accepted more often than with "
    "most other models."
)
_DIFFERENT = (
    "The texts differ. With the reference backend, rounding may decide between tokens that are "
    "almost equally likely; paceline certify tells whether it did."
)
_TURN = 0.05  # seconds


def measure(
    console: Console,
    plain: LLM,
    fast: LLM,
    prompt: BenchPrompt,
    params: SamplingParams,
    shown: bool,
) -> Measurement:
    """Decode a prompt with both LLMs in turns, with bars on the console and, if ``shown``, the text
    of ``fast``. Raises PacelineError if a request fails."""
    from paceline.engine.driver import Drive, StepTotals, sequence

    llms, ids = (plain, fast), prompt.encode(plain)
    drives = [Drive(llm.engine, [sequence(ids, params, llm.end_tokens)]) for llm in llms]
    painter, text = Painter(fast.tokenizer, shown, ids), Text()
    with drives[0], drives[1], Live(console=console, auto_refresh=False) as live:
        while any(drive.busy for drive in drives):
            for drive in drives:
                until = drive.seconds + _TURN
                while drive.busy and drive.seconds < until:
                    for commit in drive.step().commits:
                        if commit.error is not None:
                            raise PacelineError(f"a request failed: {commit.error}")
                        if shown and drive is drives[1]:
                            drafted = (i < len(commit.path) for i in range(len(commit.tokens)))
                            text.append_text(painter.paint(commit.tokens, drafted))
                            if commit.finish_reason is not None:
                                text.append_text(painter.rest())
            live.update(Group(*([text] if shown else []), _bars(*drives)), refresh=True)
    if not console.is_terminal:  # on a terminal, Live ends the last line
        console.line()
    plain_tokens, fast_tokens = (drive.seqs[0].tokens[len(ids) :] for drive in drives)
    identical = plain_tokens == fast_tokens
    plain_sums, fast_sums = (StepTotals.of(drive.steps) for drive in drives)
    measured = Measurement(prompt.name, plain_sums, fast_sums, drives[1].counts, identical)
    console.print(Text(measured.in_words, style="dim"))
    if not identical:
        console.print(_DIFFERENT)
    return measured


def _bars(plain: Drive, fast: Drive) -> rich_tables.Table:
    bars, speedup = rich_tables.Table.grid(padding=(0, 1)), ""
    for name, drive, style in (("plain", plain, "cyan"), ("speculative", fast, DRAFT_STYLE)):
        rate = drive.tokens / drive.seconds
        total = drive.seqs[0].params.max_tokens if drive.busy else max(1, drive.tokens)
        if drive is fast and plain.tokens and not (plain.busy or fast.busy):
            speedup = times(rate * plain.seconds / plain.tokens)
        bars.add_row(
            name,
            ProgressBar(total, drive.tokens, width=36, complete_style=style, finished_style=style),
            Text(f"{rate:4.0f} tokens/s", justify="right"),
            Text(f"{drive.seconds:5.2f} s"),
            Text(speedup, style="bold"),
        )
    return bars


@expand
def demo(
    output: JsonOptions,
    options: ModelOptions,
    max_tokens: int = setting(120, "New tokens per prompt.", low=1),
) -> None:
    """Compare text and speed with and without drafts, side by side."""
    draft = options.resolved_draft
    if draft is None:
        raise typer.BadParameter(
            f"the demo needs a draft; leave out --draft none, or try --draft {DEFAULT_DRAFT}"
        )
    params = SamplingParams(max_tokens=max_tokens)
    console = Console(quiet=output.as_json)
    with stage("loading the models"):
        speculative = options.open(draft)
        plain = options.plain_beside(speculative)
        for llm in (plain, speculative):  # warm up kernels, buffers and lazy imports
            llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=8, ignore_eos=True))
    memories = with_memory(speculative)
    for memory in memories:
        memory.clear()
    legend = "Accepted draft tokens are ", ("green", DRAFT_STYLE), ", the target's own are "
    console.print(Text.assemble(*legend, ("bold", TARGET_STYLE), "."))
    if options.model == REAL:
        console.print(_ABOUT_REAL_MODEL, style="dim")
    groups: list[list[Measurement]] = []
    prompts = prompts_for(options.model, speculative)
    for again in ("", " again") if memories else ("",):
        groups.append([])
        for prompt in prompts:
            console.print()
            console.rule(Text(prompt.name + again, style="bold"), align="left")
            if not again:
                console.print(Text(prompt.text, style="dim"), soft_wrap=True)
            shown = not (again or output.as_json)
            groups[-1].append(measure(console, plain, speculative, prompt, params, shown))
    output.show(demo_record(groups, draft), demo_table(groups, draft))
    missing = options.model == EMBEDDED == default_model()[0]
    suggestion = "paceline pull smollm2" if missing else "paceline chat"
    console.print(Text.assemble("Try next: ", (suggestion, "bold")))
