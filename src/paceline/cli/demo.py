"""``paceline demo``: the same prompts decoded plainly and speculatively, shown and measured.

Both take turns of a twentieth of a second, each on a clock of its own, prompt included: both have
the same machine, and drawing costs neither of them anything.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import table as rich_tables
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from paceline import SamplingParams
from paceline.cli.options import ModelOptions, expand, fetch, in_short
from paceline.cli.output import DRAFT_STYLE, TARGET_STYLE, JsonOptions, Painter
from paceline.core.stages import info, stage
from paceline.errors import PacelineError
from paceline.lab.report.document import (
    NONE_TRIED,
    UNTRIED,
    Column,
    Table,
    number,
    record_of,
    share,
    table_of,
    times,
)
from paceline.model.names import DEFAULT_DRAFT, EMBEDDED, REAL, SMOLLM2, VARIABLE, pulled
from paceline.settings import entries, setting

if TYPE_CHECKING:
    from paceline import LLM
    from paceline.core.sequence import DraftCounts
    from paceline.draft.suffix import SuffixDrafter
    from paceline.engine.driver import Drive, StepSums
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.lab.certify.decoding import Difference

_ABOUT = (
    "SmolLM2-135M-Instruct is a real model, small enough to be here within a minute. Its weights "
    "were made from 4-bit ones, so its 4-bit form drafts better for it than for most models."
)
_PROMPTS = Path(__file__).with_name("demo_prompts")  # for a real model, and for the built-in toy
_TURN = 0.05  # seconds
_LEAST_CONTEXT = 2048  # tokens that a model must see to be asked the real questions


# -- figures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """One prompt, decoded greedily by the target alone and with its draft.

    Behind a near tie the answers may end at different lengths: the speedup is of tokens a second.
    """

    name: str
    plain: StepSums
    fast: StepSums
    counts: DraftCounts  # of ``fast``
    difference: Difference | None  # where the two texts part, None if they are identical

    @property
    def speedup(self) -> float:
        return self.fast.rate / self.plain.rate

    @property
    def mean_accepted_length(self) -> float:
        return self.fast.tokens / self.counts.target_steps if self.counts.target_steps else 0.0

    @property
    def in_words(self) -> str:
        """How much of the text was drafted, and by whom."""
        counts = self.counts
        if not counts.accepted:
            reasons = Counter(counts.not_drafted).most_common(1)
            return f"No draft was of use{''.join(f': {reason}' for reason, _ in reasons)}."
        drafters = Counter(counts.by_drafter).most_common()
        by = ", ".join(f"{accepted} by {name}" for name, accepted in drafters if accepted)
        return f"{counts.accepted} of {self.fast.tokens} tokens were drafted{by and ': ' + by}."


def total(measurements: Sequence[Measurement]) -> Measurement:
    """All prompts as one; it has a difference if any has, a tie only if there is nothing worse."""
    differences = [m.difference for m in measurements if m.difference is not None]
    worst = min(differences, key=lambda difference: difference.is_tie, default=None)
    plain, fast, counts = zip(*((m.plain, m.fast, m.counts) for m in measurements), strict=True)
    return Measurement("total", reduce(add, plain), reduce(add, fast), reduce(add, counts), worst)


def _acceptance(counts: DraftCounts) -> str:
    return NONE_TRIED if counts.acceptance_rate is None else share(counts.acceptance_rate)


def _identical(measured: Measurement) -> str:
    difference = measured.difference
    return "yes" if difference is None else "but a tie" if difference.is_tie else "NO"


_rate = "{:.0f}".format
_FIGURES = (
    Column("name", "prompt"),
    Column("tokens", "tokens", "fast.tokens"),
    Column("plain_tokens_per_second", "plain\ntok/s", "plain.rate", _rate),
    Column("speculative_tokens_per_second", "spec.\ntok/s", "fast.rate", _rate),
    Column("speedup", "speedup", shown=times),
    Column("acceptance_rate", "accept.\nrate", "counts", _acceptance, lambda c: c.acceptance_rate),
    Column("mean_accepted_length", "accepted\nlength", shown=number),
    Column("drafters", path="counts.by_drafter"),
    Column("not_drafted", path="counts.not_drafted"),
    Column("identical", "identical", "", _identical, lambda m: m.difference is None),
    Column("difference", stored=lambda d: d and {**asdict(d), "is_tie": d.is_tie}),
)


# -- the race --------------------------------------------------------------------------------------


def measure(
    console: Console,
    plain: LLM,
    fast: LLM,
    prompt: BenchPrompt,
    params: SamplingParams,
    shown: bool,
) -> Measurement:
    """Decode a prompt by both in turns, on the console as it goes; ``shown``: with the text of
    ``fast``. Raises PacelineError if a request fails."""
    from paceline.engine.driver import Drive, StepSums, sequence
    from paceline.lab.certify.decoding import explain

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
                            drafted = (at < len(commit.path) for at in range(len(commit.tokens)))
                            text.append_text(painter.paint(commit.tokens, drafted))
                            if commit.finish_reason is not None:
                                text.append_text(painter.rest())
            live.update(Group(*([text] if shown else []), _bars(*drives)), refresh=True)
    if not console.is_terminal:  # there it ends the last line itself
        console.line()
    left, right = (drive.seqs[0].tokens[len(ids) :] for drive in drives)
    difference = explain(plain.target, ids, left, right, SamplingParams())
    one, other = (StepSums.of(drive.steps) for drive in drives)
    measured = Measurement(prompt.name, one, other, drives[1].counts, difference)
    console.print(Text(measured.in_words, style="dim"))
    if difference is not None:
        console.print(_difference_in_words(plain, difference, left, right))
    for drive in drives:
        if seconds := _standstill(drive):
            console.print(f"The machine stood still for {seconds:.0f} s: run the demo again.")
    return measured


def _standstill(drive: Drive) -> float:
    """Seconds of a step behind the prompt's that took most of an answer's time, else 0."""
    slowest = max((sum(step.seconds.values()) for step in drive.steps[1:]), default=0.0)
    return slowest if slowest > max(1.0, drive.seconds / 2) else 0.0


def _bars(plain: Drive, fast: Drive) -> rich_tables.Table:
    bars, speedup = rich_tables.Table.grid(padding=(0, 1)), ""
    for name, drive, style in (("plain", plain, "cyan"), ("speculative", fast, DRAFT_STYLE)):
        rate = drive.tokens / drive.seconds
        most = drive.seqs[0].params.max_tokens if drive.busy else max(1, drive.tokens)
        if drive is fast and plain.tokens and not (plain.busy or fast.busy):
            speedup = times(rate * plain.seconds / plain.tokens)
        bars.add_row(
            name,
            ProgressBar(most, drive.tokens, width=36, complete_style=style, finished_style=style),
            Text(f"{rate:4.0f} tokens/s", justify="right"),
            Text(f"{drive.seconds:5.2f} s"),
            Text(speedup, style="bold"),
        )
    return bars


def _difference_in_words(
    llm: LLM, difference: Difference, plain: list[int], fast: list[int]
) -> Text:
    """Where two greedy outputs part, and why."""
    at, decode = difference.at, llm.tokenizer.decode
    reason = (
        f"their logits are {difference.gap:.3g} apart, a rounding step is {difference.step:.3g}: "
        "a tie"
        if difference.is_tie
        else "rounding does not explain this: please report it as a bug"
    )
    return Text(
        f"Token {at} differs after {decode(plain[max(0, at - 8) : at])!r}: plain "
        f"{decode(plain[at : at + 4])!r}, speculative {decode(fast[at : at + 4])!r}; {reason}"
    )


# -- the show --------------------------------------------------------------------------------------


def prompts_for(model: str, llm: LLM) -> list[BenchPrompt]:
    """Questions that the model can take; those of a chat only where it has a chat template."""
    from paceline.lab.bench.prompts import load_prompts

    chats = llm.tokenizer.chat_template is not None
    real = chats and model != EMBEDDED and llm.max_model_len >= _LEAST_CONTEXT
    prompts = load_prompts(_PROMPTS / ("real.jsonl" if real else "toy.jsonl"))
    return [prompt for prompt in prompts if chats or not prompt.chat]


def _with_memory(llm: LLM) -> list[SuffixDrafter]:
    """The drafters that look into answers of earlier requests."""
    from paceline.draft.base import with_members
    from paceline.draft.suffix import SuffixDrafter

    members = with_members(llm.engine.drafter)
    return [member for member in members if isinstance(member, SuffixDrafter)]


def _table(groups: Sequence[Sequence[Measurement]], draft: str) -> Table:
    """All prompts as they were asked first and, where that makes a difference, again."""
    silent = any(item.counts.acceptance_rate is None for group in groups for item in group)
    first, *repeated = ([*group, total(group)] for group in groups)
    again = [replace(item, name=f"{item.name} again") for group in repeated for item in group]
    return table_of(
        [*first, *again],
        _FIGURES,
        "Time of whole requests, prompts included; the two take turns every 0.05 s. "
        "Accepted length: tokens per target step."
        + (" Again: the same prompts, of which the drafter remembers the answers." if again else "")
        + (f" {UNTRIED}" if silent else ""),
        f"Greedy decoding, plain and with --draft {draft}",
    )


def _record(groups: Sequence[Sequence[Measurement]], draft: str) -> dict[str, Any]:
    first, *again = (
        record_of(total(group), _FIGURES[1:])
        | {"prompts": [record_of(item, _FIGURES) for item in group]}
        for group in groups
    )
    return {"draft": draft, **first} | ({"repeated": again[0]} if again else {})


def _fetch_real() -> None:
    info(f"{in_short(SMOLLM2)} Fetching it, once.")
    try:
        fetch(SMOLLM2.name)
    except PacelineError as error:
        info(f"not fetched: {error}")


@expand
def demo(
    output: JsonOptions,
    pair: Annotated[dict[str, Any], entries(ModelOptions, "command")],
    max_tokens: int = setting(120, "Tokens a prompt.", low=1),
    pull: bool = setting(False, f"Fetch {REAL} first if it is not here."),
) -> None:
    """Decode some prompts plainly and speculatively side by side, and compare text and speed."""
    if pull and not (pair["model"] or os.environ.get(VARIABLE)) and pulled(SMOLLM2) is None:
        _fetch_real()
    options = ModelOptions(**pair)  # chooses a model by what is here
    draft = options.resolved_draft
    if draft is None:
        raise typer.BadParameter(
            f"the demo needs a draft; leave it out, or try --draft {DEFAULT_DRAFT}"
        )
    if options.lossy:
        raise typer.BadParameter("the demo shows that drafts change no text; leave --lossy out")
    params = SamplingParams(max_tokens=max_tokens)
    console = Console(quiet=output.as_json)
    with stage("loading the models"):
        speculative = options.open(draft)
        plain = options.plain_beside(speculative)
        for llm in (plain, speculative):  # kernels, buffers, lazy imports
            llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=8, ignore_eos=True))
    memories = _with_memory(speculative)
    for memory in memories:
        memory.clear()
    words = "Accepted draft tokens are ", ("green", DRAFT_STYLE), ", the target's own are "
    console.print(Text.assemble(*words, ("bold", TARGET_STYLE), "."))
    if options.model == REAL:
        console.print(_ABOUT, style="dim")
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
    output.show(_record(groups, draft), _table(groups, draft))
    following = "paceline pull smollm2" if options.model == EMBEDDED else "paceline chat"
    console.print(Text.assemble("Try next: ", (following, "bold")))
