"""``paceline demo``: the same prompts decoded plainly and speculatively, shown and measured."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.options import DEFAULT_DRAFT, ModelOptions, expand
from paceline.cli.output import DRAFT_STYLE, TARGET_STYLE, print_json
from paceline.cli.progress import showing
from paceline.cli.race import race, who
from paceline.cli.scenes import Scene, scenes_for
from paceline.core.stages import stage
from paceline.errors import PacelineError
from paceline.lab.report.columns import NONE_TRIED, UNTRIED, Column, record_of
from paceline.model.defaults import EMBEDDED, REAL, VARIABLE

if TYPE_CHECKING:
    from paceline import LLM, Completion, SamplingParams
    from paceline.draft.suffix import SuffixDrafter
    from paceline.lab.difference import Difference

_ABOUT = (
    "SmolLM2-135M-Instruct is a real model, small enough to be here within a minute. Its weights "
    "were born in 4 bits, so its own 4-bit form drafts better for it than for most models."
)


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
    drafters: dict[str, int]  # accepted tokens by drafter
    not_drafted: dict[str, int]  # steps without a draft by reason
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


def _identical(measured: Measurement) -> str:
    if measured.difference is None:
        return "yes"
    return "but a tie" if measured.difference.is_tie else "NO"


def _difference(difference: Difference | None) -> dict[str, Any] | None:
    return None if difference is None else {**asdict(difference), "is_tie": difference.is_tie}


_FIGURES = (
    Column("name", "prompt", "name"),
    Column("tokens", "tokens", "tokens", str),
    Column("plain_tokens_per_second", "plain\ntok/s", "plain_rate", "{:.0f}".format),
    Column("speculative_tokens_per_second", "spec.\ntok/s", "speculative_rate", "{:.0f}".format),
    Column("speedup", "speedup", "speedup", "{:.2f}x".format),
    Column("acceptance_rate", "accept.\nrate", "acceptance_rate", "{:.0%}".format),
    Column("mean_accepted_length", "accepted\nlength", "mean_accepted_length", "{:.2f}".format),
    Column("drafters", "", "drafters"),
    Column("not_drafted", "", "not_drafted"),
    Column("identical", "identical", "", _identical, lambda measured: measured.difference is None),
    Column("difference", "", "difference", stored=_difference),
)


def explain(llm: LLM, ids: list[int], plain: Completion, fast: Completion) -> Difference | None:
    """Where the greedy texts of a prompt part, re-scored by the target; None if they are equal."""
    from paceline import SamplingParams
    from paceline.lab import difference

    return difference.explain(llm.target, ids, plain.token_ids, fast.token_ids, SamplingParams())


def total(measurements: Sequence[Measurement]) -> Measurement:
    """All scenes as one; it has a difference if any scene has."""
    differences = [m.difference for m in measurements if m.difference is not None]
    worst = sorted(differences, key=lambda difference: difference.is_tie)
    counts = {
        name: dict(sum((Counter(getattr(m, name)) for m in measurements), Counter[str]()))
        for name in ("drafters", "not_drafted")
    }
    whole: dict[str, Any] = {"name": "total", "difference": worst[0] if worst else None, **counts}
    summed = [item.name for item in fields(Measurement) if item.name not in whole]
    return Measurement(**whole, **{n: sum(getattr(m, n) for m in measurements) for n in summed})


def prompt_ids(llm: LLM, scene: Scene) -> list[int]:
    if not scene.chat:
        return [int(token) for token in llm.tokenizer(scene.prompt)["input_ids"]]
    return llm.render_chat([{"role": "user", "content": scene.prompt}])


@dataclass(frozen=True)
class SceneResult:
    """A scene as it was measured, and the two completions."""

    measurement: Measurement
    plain: Completion
    fast: Completion


def measure(
    console: Console, plain: LLM, fast: LLM, scene: Scene, params: SamplingParams, shown: bool
) -> SceneResult:
    """Decode a scene by both in turns; ``shown``: with the text as it is written."""
    ids = prompt_ids(plain, scene)
    one, other = race(console, plain, fast, ids, params, shown)
    assert one.completion is not None and other.completion is not None
    stats = other.completion.stats
    measured = Measurement(
        name=scene.name,
        plain_tokens=one.tokens,
        tokens=other.tokens,
        plain_seconds=one.seconds,
        speculative_seconds=other.seconds,
        drafted=stats.drafted_tokens,
        accepted=stats.accepted_tokens,
        target_steps=stats.target_steps,
        drafters=getattr(stats, "drafters", {}),
        not_drafted=getattr(stats, "not_drafted", {}),
        difference=explain(plain, ids, one.completion, other.completion),
    )
    return SceneResult(measured, one.completion, other.completion)


def _said(measured: Measurement) -> Text:
    words = who(measured.drafters, measured.accepted, measured.tokens, measured.not_drafted)
    return Text(words, style="dim")


def _warm_up(*llms: LLM) -> None:
    """Kernels, buffers and lazy imports; a memory keeps none of it."""
    from paceline import SamplingParams

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


def _legend() -> Text:
    return Text.assemble(
        "Accepted draft tokens are ",
        ("green", DRAFT_STYLE),
        ", the target's own are ",
        ("bold", TARGET_STYLE),
        ".",
    )


def _table(groups: Sequence[Sequence[Measurement]], draft: str) -> Table:
    """All scenes as they were asked first and, where that makes a difference, again."""
    silent = any(item.acceptance_rate is None for group in groups for item in group)
    table = Table(
        title=f"Greedy decoding, plain and with --draft {draft}",
        caption="Whole requests, prompts included, both in turns of a twentieth of a second. "
        "Accepted length: tokens per target step." + (f" {UNTRIED}" if silent else ""),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    columns = [column for column in _FIGURES if column.heading]
    for column in columns:
        words = column in (columns[0], columns[-1])
        table.add_column(column.heading, justify="left" if words else "right")
    for group in groups:
        for item in [*group, total(group)]:
            if item.name == "total":
                table.add_section()
            again = " again" if group is not groups[0] else ""
            texts = (column.cell(item) for column in columns)
            name, *cells = (NONE_TRIED if cell is None else str(cell) for cell in texts)
            table.add_row(name + again, *cells)
        table.add_section()
    return table


def _explain_difference(
    console: Console,
    llm: LLM,
    name: str,
    difference: Difference,
    plain: Completion,
    fast: Completion,
) -> None:
    """Where two greedy outputs part, and why."""
    at = difference.at
    before = llm.tokenizer.decode(plain.token_ids[max(0, at - 8) : at])
    left, right = (llm.tokenizer.decode(c.token_ids[at : at + 4]) for c in (plain, fast))
    console.print(
        Text(f"{name}: token {at} differs after {before!r}: plain {left!r}, speculative {right!r}"),
    )
    reason = (
        f"their logits are {difference.gap:.3g} apart, "
        f"a rounding step is {difference.step:.3g}: a tie"
        if difference.is_tie
        else "rounding does not explain this: please report it as a bug"
    )
    console.print(Text(f"  {reason}", style="dim"))


def _record(groups: Sequence[Sequence[Measurement]], draft: str) -> dict[str, Any]:
    def of(group: Sequence[Measurement]) -> dict[str, Any]:
        record = record_of(total(group), _FIGURES[1:])
        return {**record, "prompts": [record_of(item, _FIGURES) for item in group]}

    first, *again = groups
    return {"draft": draft, **of(first)} | ({"repeated": of(again[0])} if again else {})


def _next(model: str) -> str:
    """The one command to try next, as this one was called."""
    called = Path(sys.argv[0])
    name = "paceline" if shutil.which("paceline") == str(called) else os.path.relpath(called)
    name = name if called.name == "paceline" else "paceline"
    return f"{name} chat" if model != EMBEDDED else f"{name} pull smollm2"


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


@expand
def demo(
    engine: ModelOptions,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens a prompt.")] = 120,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the show.")
    ] = False,
    pull: Annotated[
        bool,
        typer.Option("--pull", help=f"Fetch {REAL} first if it is not here.", callback=_pull_first),
    ] = False,
) -> None:
    """Decode some prompts plainly and speculatively side by side, and compare text and speed."""
    draft = engine.resolved_draft
    if draft is None:
        raise typer.BadParameter(
            f"the demo needs a draft; leave it out, or try --draft {DEFAULT_DRAFT}"
        )
    if engine.lossy:
        raise typer.BadParameter("the demo shows that drafts change no text; leave --lossy out")
    from paceline import SamplingParams

    params = SamplingParams(max_tokens=max_tokens)
    console = Console(quiet=as_json)
    with showing(), stage("loading the models"):
        speculative = engine.open(draft)
        plain = engine.plain_beside(speculative)
        _warm_up(plain, speculative)
    console.print(_legend())
    if engine.model == REAL:
        console.print(_ABOUT, style="dim")
    results: list[SceneResult] = []
    groups: list[list[Measurement]] = []
    scenes = scenes_for(engine.model, speculative)
    for repeated in (False, True) if _with_memory(speculative) else (False,):
        groups.append([])
        for scene in scenes:
            _announce(console, scene, repeated)
            result = measure(console, plain, speculative, scene, params, not (repeated or as_json))
            console.print(_said(result.measurement))
            results.append(result)
            groups[-1].append(result.measurement)
    if as_json:
        print_json(_record(groups, draft))
        return
    console.print(_table(groups, draft))
    for result in results:
        measured = result.measurement
        if measured.difference is not None:
            _explain_difference(
                console, plain, measured.name, measured.difference, result.plain, result.fast
            )
    console.print(Text.assemble("Try next: ", (_next(engine.model), "bold")))


def _announce(console: Console, scene: Scene, repeated: bool) -> None:
    console.print()
    console.rule(Text(scene.name + (" again" if repeated else ""), style="bold"), align="left")
    if not repeated:
        console.print(Text(scene.prompt, style="dim"), soft_wrap=True)
