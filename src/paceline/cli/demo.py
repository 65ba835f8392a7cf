"""``paceline demo``: the same prompts decoded plainly and speculatively, shown and measured.

Both take turns of a twentieth of a second, each on a clock of its own, prompt included. So both
meet the machine's moods alike, and drawing costs neither of them anything.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import table as rich_tables
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from paceline import SamplingParams
from paceline.cli.options import ModelOptions, expand, fetch, in_short
from paceline.cli.output import DRAFT_STYLE, TARGET_STYLE, Painter, print_json
from paceline.core.stages import info, stage
from paceline.errors import PacelineError
from paceline.lab.report.columns import (
    NONE_TRIED,
    UNTRIED,
    Column,
    record_of,
    share,
    table_of,
    times,
)
from paceline.lab.report.document import Table
from paceline.lab.report.render import rich_table
from paceline.model.names import DEFAULT_DRAFT, EMBEDDED, REAL, SMOLLM2, VARIABLE, pulled
from paceline.settings import setting

if TYPE_CHECKING:
    from paceline import LLM, Completion
    from paceline.draft.suffix import SuffixDrafter
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.lab.certify.difference import Difference

_ABOUT = (
    "SmolLM2-135M-Instruct is a real model, small enough to be here within a minute. Its weights "
    "were born in 4 bits, so its own 4-bit form drafts better for it than for most models."
)
_PROMPTS = Path(__file__).with_name("demo_prompts")  # for a real model, and for the built-in toy
_TURN = 0.05  # seconds
_LEAST_CONTEXT = 2048  # tokens that a model must see to be asked the real questions


@dataclass(frozen=True)
class DemoOptions(ModelOptions):
    """What is decoded, and how it is shown."""

    max_tokens: int = setting(120, "Tokens a prompt.", low=1)
    as_json: bool = setting(False, "Print one JSON object instead of the show.", flags=("--json",))
    pull: bool = setting(False, f"Fetch {REAL} first if it is not here.")

    def __post_init__(self) -> None:
        named = self.model or os.environ.get(VARIABLE)
        if self.pull and not named and pulled(SMOLLM2) is None:
            info(f"{in_short(SMOLLM2)} Fetching it, once.")
            try:
                fetch(SMOLLM2.name)
            except PacelineError as error:
                info(f"not fetched: {error}")
        super().__post_init__()  # chooses a model by what is here


@dataclass(frozen=True)
class Decoded:
    """New tokens, and what decoding them took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def __add__(self, other: Decoded) -> Decoded:
        return Decoded(self.tokens + other.tokens, self.seconds + other.seconds)


@dataclass(frozen=True)
class Measurement:
    """One prompt, decoded greedily by the target alone and with its draft.

    Behind a near tie the two answers may end at different lengths, so each has its own tokens, and
    the speedup is that of tokens a second.
    """

    name: str
    plain: Decoded
    fast: Decoded
    drafted: int
    accepted: int
    target_steps: int
    drafters: Counter[str]  # accepted tokens by drafter
    not_drafted: Counter[str]  # steps without a draft by reason
    difference: Difference | None  # where the two texts part, None if they are identical

    @property
    def speedup(self) -> float:
        return self.fast.rate / self.plain.rate

    @property
    def acceptance_rate(self) -> float | None:
        """None: no draft was tried."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_length(self) -> float:
        return self.fast.tokens / self.target_steps if self.target_steps else 0.0

    @property
    def in_words(self) -> str:
        """How much of the text was drafted, and by whom."""
        if not self.accepted:
            reasons = "".join(f": {reason}" for reason, _ in self.not_drafted.most_common(1))
            return f"No draft was of use{reasons}."
        by = ", ".join(f"{count} by {name}" for name, count in self.drafters.most_common() if count)
        return f"{self.accepted} of {self.fast.tokens} tokens were drafted{by and ': ' + by}."


def _acceptance(measured: Measurement) -> str:
    return NONE_TRIED if measured.acceptance_rate is None else share(measured.acceptance_rate)


def _identical(measured: Measurement) -> str:
    if measured.difference is None:
        return "yes"
    return "but a tie" if measured.difference.is_tie else "NO"


def _difference(difference: Difference | None) -> dict[str, Any] | None:
    return None if difference is None else {**asdict(difference), "is_tie": difference.is_tie}


_rate = "{:.0f}".format
_FIGURES = (
    Column("name", "prompt"),
    Column("tokens", "tokens", "fast.tokens"),
    Column("plain_tokens_per_second", "plain\ntok/s", "plain.rate", _rate),
    Column("speculative_tokens_per_second", "spec.\ntok/s", "fast.rate", _rate),
    Column("speedup", "speedup", shown=times),
    Column("acceptance_rate", "accept.\nrate", "", _acceptance, lambda m: m.acceptance_rate),
    Column("mean_accepted_length", "accepted\nlength", shown="{:.2f}".format),
    Column("drafters"),
    Column("not_drafted"),
    Column("identical", "identical", "", _identical, lambda measured: measured.difference is None),
    Column("difference", stored=_difference),
)


def total(measurements: Sequence[Measurement]) -> Measurement:
    """All prompts as one; it has a difference if any has, a tie only if there is nothing worse."""
    differences = [m.difference for m in measurements if m.difference is not None]
    worst = min(differences, key=lambda difference: difference.is_tie, default=None)
    names = [item.name for item in fields(Measurement) if item.name not in ("name", "difference")]
    sums = {name: reduce(add, (getattr(m, name) for m in measurements)) for name in names}
    return Measurement(name="total", difference=worst, **sums)


class Lane:
    """One side of a race; only its own work counts in ``done``."""

    def __init__(self, llm: LLM, ids: list[int], params: SamplingParams, shown: bool) -> None:
        self.most = params.max_tokens
        self.events = llm.stream([ids], params)
        self.painter = Painter(llm.tokenizer, shown, ids) if shown else None
        self.text = Text()
        self.done = Decoded()
        self.completion: Completion | None = None

    def work(self, turn: float) -> None:
        """Decode for ``turn`` seconds, at least a step."""
        until = self.done.seconds + turn
        while self.completion is None and self.done.seconds < until:
            start = time.perf_counter()
            event = next(self.events)
            self.done += Decoded(len(event.token_ids), time.perf_counter() - start)
            self.completion = event.completion
            if self.painter is not None:
                painted = self.painter.paint(event.text, event.token_ids, event.from_draft)
                self.text.append_text(painted)


def race(
    console: Console, plain: LLM, fast: LLM, ids: list[int], params: SamplingParams, shown: bool
) -> tuple[Lane, Lane]:
    """Decode a prompt by both, on the console as it goes; ``shown``: with the text of ``fast``."""
    lanes = Lane(plain, ids, params, False), Lane(fast, ids, params, shown)
    with Live(console=console, auto_refresh=False) as live:
        while any(lane.completion is None for lane in lanes):
            for lane in lanes:
                lane.work(_TURN)
            live.update(_drawn(*lanes), refresh=True)
    if not console.is_terminal:  # there it ends the last line itself
        console.line()
    return lanes


def _drawn(plain: Lane, fast: Lane) -> Group:
    ended = plain.completion is not None and fast.completion is not None
    bars = rich_tables.Table.grid(padding=(0, 1))
    for name, lane, style in (("plain", plain, "cyan"), ("speculative", fast, DRAFT_STYLE)):
        done, by = lane.done, plain.done.rate
        most = lane.most if lane.completion is None else max(1, done.tokens)
        times = f"{done.rate / by:.2f}x" if lane is fast and ended and by else ""
        bars.add_row(
            name,
            ProgressBar(most, done.tokens, width=36, complete_style=style, finished_style=style),
            Text(f"{done.rate:4.0f} tokens/s", justify="right"),
            Text(f"{done.seconds:5.2f} s"),
            Text(times, style="bold"),
        )
    return Group(*([fast.text] if fast.painter is not None else []), bars)


def prompts_for(model: str, llm: LLM) -> list[BenchPrompt]:
    """Questions that the model can take; those of a chat only where it has a chat template."""
    from paceline.lab.bench.prompts import load_prompts

    chats = llm.tokenizer.chat_template is not None
    real = chats and model != EMBEDDED and llm.max_model_len >= _LEAST_CONTEXT
    prompts = load_prompts(_PROMPTS / ("real.jsonl" if real else "toy.jsonl"))
    return [prompt for prompt in prompts if chats or not prompt.chat]


def measure(
    console: Console,
    plain: LLM,
    fast: LLM,
    prompt: BenchPrompt,
    params: SamplingParams,
    shown: bool,
) -> Measurement:
    """Decode a prompt by both in turns; ``shown``: with the text as it is written."""
    from paceline.lab.certify import difference

    ids = prompt.encode(plain)
    one, other = race(console, plain, fast, ids, params, shown)
    assert one.completion is not None and other.completion is not None
    tokens = one.completion.token_ids, other.completion.token_ids
    stats = other.completion.stats
    measured = Measurement(
        name=prompt.name,
        plain=one.done,
        fast=other.done,
        drafted=stats.drafted_tokens,
        accepted=stats.accepted_tokens,
        target_steps=stats.target_steps,
        drafters=Counter(stats.drafters),
        not_drafted=Counter(stats.not_drafted),
        difference=difference.explain(plain.target, ids, *tokens, SamplingParams()),
    )
    console.print(Text(measured.in_words, style="dim"))
    if measured.difference is not None:
        console.print(_difference_in_words(plain, measured.difference, *tokens))
    return measured


def _difference_in_words(
    llm: LLM, difference: Difference, plain: list[int], fast: list[int]
) -> Text:
    """Where two greedy outputs part, and why."""
    at = difference.at
    before, left, right = (
        llm.tokenizer.decode(tokens)
        for tokens in (plain[max(0, at - 8) : at], plain[at : at + 4], fast[at : at + 4])
    )
    reason = (
        f"their logits are {difference.gap:.3g} apart, a rounding step is {difference.step:.3g}: "
        "a tie"
        if difference.is_tie
        else "rounding does not explain this: please report it as a bug"
    )
    return Text(
        f"Token {at} differs after {before!r}: plain {left!r}, speculative {right!r}; {reason}"
    )


def _warm_up(*llms: LLM) -> None:
    """Kernels, buffers and lazy imports; a memory keeps none of it."""
    for llm in llms:
        llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=8, ignore_eos=True))
        for drafter in _with_memory(llm):
            drafter.clear()


def _with_memory(llm: LLM) -> list[SuffixDrafter]:
    """The drafters that look into answers of earlier requests."""
    from paceline.draft.base import with_members
    from paceline.draft.suffix import SuffixDrafter

    return [
        member for member in with_members(llm.engine.drafter) if isinstance(member, SuffixDrafter)
    ]


def _table(groups: Sequence[Sequence[Measurement]], draft: str) -> Table:
    """All prompts as they were asked first and, where that makes a difference, again."""
    silent = any(item.acceptance_rate is None for group in groups for item in group)
    first, *repeated = ([*group, total(group)] for group in groups)
    again = [replace(item, name=f"{item.name} again") for group in repeated for item in group]
    return table_of(
        [*first, *again],
        _FIGURES,
        "Whole requests, prompts included, both in turns of a twentieth of a second. "
        "Accepted length: tokens per target step." + (f" {UNTRIED}" if silent else ""),
        f"Greedy decoding, plain and with --draft {draft}",
    )


def _record(groups: Sequence[Sequence[Measurement]], draft: str) -> dict[str, Any]:
    first, *again = (
        {
            **record_of(total(group), _FIGURES[1:]),
            "prompts": [record_of(item, _FIGURES) for item in group],
        }
        for group in groups
    )
    return {"draft": draft, **first} | ({"repeated": again[0]} if again else {})


@expand
def demo(options: DemoOptions) -> None:
    """Decode some prompts plainly and speculatively side by side, and compare text and speed."""
    draft = options.resolved_draft
    if draft is None:
        raise typer.BadParameter(
            f"the demo needs a draft; leave it out, or try --draft {DEFAULT_DRAFT}"
        )
    if options.lossy:
        raise typer.BadParameter("the demo shows that drafts change no text; leave --lossy out")
    params = SamplingParams(max_tokens=options.max_tokens)
    console = Console(quiet=options.as_json)
    with stage("loading the models"):
        speculative = options.open(draft)
        plain = options.plain_beside(speculative)
        _warm_up(plain, speculative)
    words = "Accepted draft tokens are ", ("green", DRAFT_STYLE), ", the target's own are "
    console.print(Text.assemble(*words, ("bold", TARGET_STYLE), "."))
    if options.model == REAL:
        console.print(_ABOUT, style="dim")
    groups: list[list[Measurement]] = []
    prompts = prompts_for(options.model, speculative)
    for repeated in (False, True) if _with_memory(speculative) else (False,):
        groups.append([])
        for prompt in prompts:
            console.print()
            title = Text(prompt.name + (" again" if repeated else ""), style="bold")
            console.rule(title, align="left")
            if not repeated:
                console.print(Text(prompt.text, style="dim"), soft_wrap=True)
            shown = not (repeated or options.as_json)
            groups[-1].append(measure(console, plain, speculative, prompt, params, shown))
    if options.as_json:
        print_json(_record(groups, draft))
        return
    console.print(rich_table(_table(groups, draft)))
    following = "paceline pull smollm2" if options.model == EMBEDDED else "paceline chat"
    console.print(Text.assemble("Try next: ", (following, "bold")))
