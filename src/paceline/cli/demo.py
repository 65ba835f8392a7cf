"""``paceline demo``: the same prompts decoded plainly and speculatively, shown and measured."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.options import DEFAULT_DRAFT, ModelOptions, expand
from paceline.cli.output import DRAFT_STYLE, TARGET_STYLE, print_json, stream_to
from paceline.cli.progress import showing
from paceline.cli.scenes import Scene, scenes_for
from paceline.defaults import REAL, VARIABLE, default_draft
from paceline.errors import PacelineError
from paceline.stages import stage
from paceline.tools.report.columns import NONE_TRIED, UNTRIED, Column, record_of

if TYPE_CHECKING:
    from paceline import LLM, Completion, SamplingParams
    from paceline.difference import Difference
    from paceline.draft.suffix import SuffixDrafter


@dataclass(frozen=True)
class Measurement:
    """One scene, decoded greedily by the target alone and with its draft. Times in seconds.

    Behind a near tie the two answers may end at different lengths, so each has its own tokens, and
    the speedup is that of tokens a second.
    """

    name: str
    plain_tokens: int
    tokens: int
    plain_seconds: float
    speculative_seconds: float
    drafted: int
    accepted: int
    target_steps: int
    difference: Difference | None  # where the two texts part, None if they are identical

    @property
    def plain_rate(self) -> float:
        return self.plain_tokens / self.plain_seconds

    @property
    def speculative_rate(self) -> float:
        return self.tokens / self.speculative_seconds

    @property
    def speedup(self) -> float:
        return self.speculative_rate / self.plain_rate

    @property
    def acceptance_rate(self) -> float | None:
        """None: no draft was tried."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_length(self) -> float:
        return self.tokens / self.target_steps if self.target_steps else 0.0


def _identical(found: Measurement) -> str:
    if found.difference is None:
        return "yes"
    return "but a tie" if found.difference.is_tie else "NO"


def _difference(found: Difference | None) -> dict[str, Any] | None:
    return None if found is None else {**asdict(found), "is_tie": found.is_tie}


_FIGURES = (
    Column("name", "prompt", "name"),
    Column("tokens", "tokens", "tokens", str),
    Column("plain_tokens_per_second", "plain\ntok/s", "plain_rate", "{:.0f}".format),
    Column("speculative_tokens_per_second", "spec.\ntok/s", "speculative_rate", "{:.0f}".format),
    Column("speedup", "speedup", "speedup", "{:.2f}x".format),
    Column("acceptance_rate", "accept.\nrate", "acceptance_rate", "{:.0%}".format),
    Column("mean_accepted_length", "accepted\nlength", "mean_accepted_length", "{:.2f}".format),
    Column("identical", "identical", "", _identical, lambda found: found.difference is None),
    Column("difference", "", "difference", stored=_difference),
)


def explain(llm: LLM, ids: list[int], plain: Completion, fast: Completion) -> Difference | None:
    """Where the greedy texts of a prompt part, re-scored by the target; None if they are equal."""
    from paceline import SamplingParams, difference

    return difference.explain(llm.target, ids, plain.token_ids, fast.token_ids, SamplingParams())


def total(measurements: Sequence[Measurement]) -> Measurement:
    """All scenes as one; it has a difference if any scene has."""
    differences = [m.difference for m in measurements if m.difference is not None]
    worst = sorted(differences, key=lambda difference: difference.is_tie)
    whole: dict[str, Any] = {"name": "total", "difference": worst[0] if worst else None}
    counted = [item.name for item in fields(Measurement) if item.name not in whole]
    sums = {name: sum(getattr(m, name) for m in measurements) for name in counted}
    return Measurement(**whole, **sums)


def prompt_ids(llm: LLM, scene: Scene) -> list[int]:
    if not scene.chat:
        return [int(token) for token in llm.tokenizer(scene.prompt)["input_ids"]]
    return llm.render_chat([{"role": "user", "content": scene.prompt}])


def _timed(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[float, Completion]:
    start = time.perf_counter()
    (completion,) = llm.generate([ids], params)
    return time.perf_counter() - start, completion


@dataclass(frozen=True)
class SceneResult:
    """A scene as it was measured, and the texts. ``again``: asked a second time, of a drafter
    that looks into earlier answers; None of others, which draft the same every time."""

    measurement: Measurement
    again: Measurement | None
    plain: Completion
    fast: Completion


def measure(
    plain: LLM, speculative: LLM, scene: Scene, params: SamplingParams, rounds: int
) -> SceneResult:
    """Time both alternately, after one untimed run each; medians over the rounds.

    The clock runs around the whole call, prompt included; nothing is printed meanwhile. A drafter
    with a memory forgets before every round, and is asked again after it.
    """
    ids = prompt_ids(plain, scene)
    memory = _with_memory(speculative)
    for llm in (plain, speculative):
        _timed(llm, ids, params)
    asked = {"plain": plain, "fast": speculative} | ({"again": speculative} if memory else {})
    seconds: dict[str, list[float]] = {which: [] for which in asked}
    said: dict[str, Completion] = {}
    for _ in range(rounds):
        for drafter in memory:
            drafter.clear()
        for which, llm in asked.items():
            took, said[which] = _timed(llm, ids, params)
            seconds[which].append(took)

    def figures(which: str) -> Measurement:
        expected, fast = said["plain"], said[which]
        return Measurement(
            name=scene.name,
            plain_tokens=len(expected.token_ids),
            tokens=len(fast.token_ids),
            plain_seconds=statistics.median(seconds["plain"]),
            speculative_seconds=statistics.median(seconds[which]),
            drafted=fast.stats.drafted_tokens,
            accepted=fast.stats.accepted_tokens,
            target_steps=fast.stats.target_steps,
            difference=explain(plain, ids, expected, fast),
        )

    again = figures("again") if memory else None
    return SceneResult(figures("fast"), again, said["plain"], said["fast"])


def _with_memory(llm: LLM) -> list[SuffixDrafter]:
    """The drafters that look into answers of earlier requests."""
    from paceline.draft.base import with_members
    from paceline.draft.suffix import SuffixDrafter

    return [own for own in with_members(llm.engine.drafter) if isinstance(own, SuffixDrafter)]


def _perform(console: Console, llm: LLM, scene: Scene, params: SamplingParams) -> None:
    """Stream one scene with its colours."""
    console.rule(Text(scene.name, style="bold"), align="left")
    console.print(Text(scene.prompt, style="dim"), end="\n" if scene.chat else "", soft_wrap=True)
    stream_to(console, llm, [prompt_ids(llm, scene)], params, show_draft=True)


def _legend() -> Text:
    return Text.assemble(
        "Accepted draft tokens are ",
        ("green", DRAFT_STYLE),
        ", the target's own are ",
        ("bold", TARGET_STYLE),
        ".",
    )


def _table(results: Sequence[SceneResult], draft: str, rounds: int) -> Table:
    silent = any(item.acceptance_rate is None for g in _groups(results) for item in g)
    table = Table(
        title=f"Greedy decoding, plain and with --draft {draft}",
        caption=f"Median of {rounds} alternating rounds without printing, prompts included. "
        "Accepted length: tokens per target step." + (f" {UNTRIED}" if silent else ""),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    columns = [column for column in _FIGURES if column.heading]
    for column in columns:
        words = column in (columns[0], columns[-1])
        table.add_column(column.heading, justify="left" if words else "right")
    for group in _groups(results):
        for item in [*group, total(group)]:
            if item.name == "total":
                table.add_section()
            again = " again" if group[0] is results[0].again else ""
            found = (column.cell(item) for column in columns)
            name, *cells = (NONE_TRIED if cell is None else str(cell) for cell in found)
            table.add_row(name + again, *cells)
        table.add_section()
    return table


def _groups(results: Sequence[SceneResult]) -> list[list[Measurement]]:
    """All scenes as they were asked first and, where that makes a difference, a second time."""
    first = [result.measurement for result in results]
    again = [result.again for result in results if result.again is not None]
    return [first, again] if again else [first]


def _explain_difference(
    console: Console,
    llm: LLM,
    name: str,
    found: Difference,
    plain: Completion,
    fast: Completion,
) -> None:
    """Where two greedy outputs part, and why."""
    at = found.at
    before = llm.tokenizer.decode(plain.token_ids[max(0, at - 8) : at])
    left, right = (llm.tokenizer.decode(c.token_ids[at : at + 4]) for c in (plain, fast))
    console.print(
        Text(f"{name}: token {at} differs after {before!r}: plain {left!r}, speculative {right!r}"),
    )
    reason = (
        f"their logits are {found.gap:.3g} apart, a rounding step is {found.step:.3g}: a tie"
        if found.is_tie
        else "rounding does not explain this: please report it as a bug"
    )
    console.print(Text(f"  {reason}", style="dim"))


def _record(results: Sequence[SceneResult]) -> dict[str, Any]:
    def of(group: list[Measurement]) -> dict[str, Any]:
        record = record_of(total(group), _FIGURES[1:])
        return {**record, "prompts": [record_of(item, _FIGURES) for item in group]}

    first, *again = _groups(results)
    return of(first) | ({"repeated": of(again[0])} if again else {})


def _pull_first(context: typer.Context, wanted: bool) -> None:
    """Fetch the real model for the show unless it is here, or another one was named.

    (Before the command begins: it chooses its model by what is here.)
    """
    from paceline.cli.pull import fetch, in_short
    from paceline.model.store import SMOLLM2, pulled

    named = context.params.get("model") or os.environ.get(VARIABLE)
    if not wanted or named or pulled(SMOLLM2) is not None:
        return
    print(f"{in_short(SMOLLM2)} Fetching it, once.", file=sys.stderr, flush=True)
    try:
        fetch(SMOLLM2.name, quiet=True)
    except PacelineError as error:
        print(f"not fetched: {error}", file=sys.stderr)


def _setting(engine: ModelOptions) -> ModelOptions:
    """With the draft of the demo where none was named."""
    if engine.draft is None and engine.profile is None and engine.model == REAL:
        return replace(engine, draft=default_draft(REAL))
    return engine


@expand
def demo(
    engine: ModelOptions,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens a prompt.")] = 120,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; the median counts.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the show.")
    ] = False,
    pull: Annotated[
        bool,
        typer.Option("--pull", help=f"Fetch {REAL} first if it is not here.", callback=_pull_first),
    ] = False,
) -> None:
    """Decode some prompts plainly and speculatively, and compare text and speed."""
    engine = _setting(engine)
    draft = engine.resolved_draft
    if draft is None:
        raise typer.BadParameter(f"the demo needs a draft; try --draft {DEFAULT_DRAFT} or ngram")
    if engine.lossy:
        raise typer.BadParameter("the demo shows that drafts change no text; leave --lossy out")
    from paceline import SamplingParams

    params = SamplingParams(max_tokens=max_tokens)
    console = Console(quiet=as_json)
    with showing(), stage("loading the models"):
        speculative = engine.open(draft)
        plain = engine.plain_beside(speculative)
    console.print(_legend())
    scenes = scenes_for(engine.model, speculative)
    if not as_json:
        for scene in scenes:
            _perform(console, speculative, scene, params)
    console.rule(style="dim")
    results = []
    with showing(), stage("measuring both in turn", len(scenes), "prompts") as progress:
        for scene in scenes:
            results.append(measure(plain, speculative, scene, params, rounds))
            progress.advance()
    if as_json:
        print_json(_record(results))
        return
    console.print(_table(results, draft, rounds))
    for result in results:
        found = result.measurement
        if found.difference is not None:
            _explain_difference(
                console, plain, found.name, found.difference, result.plain, result.fast
            )
