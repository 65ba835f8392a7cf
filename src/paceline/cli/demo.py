"""``paceline demo``: the same prompts decoded plainly and speculatively, shown and measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.options import DEFAULT_DRAFT, ModelOptions, expand
from paceline.cli.output import DRAFT_STYLE, TARGET_STYLE, print_json, stream_to

if TYPE_CHECKING:
    from paceline import LLM, Completion, SamplingParams
    from paceline.difference import Difference


@dataclass(frozen=True)
class Scene:
    """One prompt of the demo; ``chat`` puts it into the chat template."""

    name: str
    prompt: str
    chat: bool = False


SCENES = (
    Scene(
        "story",
        "Once upon a time, there was a little girl named Lily. She loved to play in the garden. "
        "One day, she found a shiny",
    ),
    Scene("arithmetic", "Nina has 36 pencils and buys 14 more. How many does she have?", True),
    Scene("code", "def factorial(n):\n"),
    Scene("chat", "How do I copy a folder to another machine?", True),
)


@dataclass(frozen=True)
class Measurement:
    """One scene, decoded greedily by the target alone and with its draft. Times in seconds."""

    name: str
    tokens: int
    plain_seconds: float
    speculative_seconds: float
    drafted: int
    accepted: int
    target_steps: int
    difference: Difference | None  # where the two texts part, None if they are identical

    @property
    def plain_rate(self) -> float:
        return self.tokens / self.plain_seconds

    @property
    def speculative_rate(self) -> float:
        return self.tokens / self.speculative_seconds

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.speculative_seconds

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        return self.tokens / self.target_steps if self.target_steps else 0.0

    def record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tokens": self.tokens,
            "plain_tokens_per_second": self.plain_rate,
            "speculative_tokens_per_second": self.speculative_rate,
            "speedup": self.speedup,
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "identical": self.difference is None,
            "difference": None
            if self.difference is None
            else {**asdict(self.difference), "is_tie": self.difference.is_tie},
        }


def explain(llm: LLM, ids: list[int], plain: Completion, fast: Completion) -> Difference | None:
    """Where the greedy texts of a prompt part, re-scored by the target; None if they are equal."""
    from paceline import SamplingParams, difference

    return difference.explain(llm.target, ids, plain.token_ids, fast.token_ids, SamplingParams())


def total(measurements: Sequence[Measurement]) -> Measurement:
    """All scenes as one; it has a difference if any scene has."""
    differences = [m.difference for m in measurements if m.difference is not None]
    worst = sorted(differences, key=lambda difference: difference.is_tie)
    return Measurement(
        name="total",
        tokens=sum(m.tokens for m in measurements),
        plain_seconds=sum(m.plain_seconds for m in measurements),
        speculative_seconds=sum(m.speculative_seconds for m in measurements),
        drafted=sum(m.drafted for m in measurements),
        accepted=sum(m.accepted for m in measurements),
        target_steps=sum(m.target_steps for m in measurements),
        difference=worst[0] if worst else None,
    )


def prompt_ids(llm: LLM, scene: Scene) -> list[int]:
    if not scene.chat:
        return [int(token) for token in llm.tokenizer(scene.prompt)["input_ids"]]
    return llm.render_chat([{"role": "user", "content": scene.prompt}])


def _timed(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[float, Completion]:
    start = time.perf_counter()
    (completion,) = llm.generate([ids], params)
    return time.perf_counter() - start, completion


def measure(
    plain: LLM, speculative: LLM, scene: Scene, params: SamplingParams, rounds: int
) -> tuple[Measurement, Completion, Completion]:
    """Time both alternately, after one untimed run each; medians over the rounds.

    The clock runs around the whole call, prompt included; nothing is printed meanwhile.
    """
    ids = prompt_ids(plain, scene)
    for llm in (plain, speculative):
        _timed(llm, ids, params)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        plain_seconds, expected = _timed(plain, ids, params)
        fast_seconds, completion = _timed(speculative, ids, params)
        seconds[0].append(plain_seconds)
        seconds[1].append(fast_seconds)
    stats = completion.stats
    measurement = Measurement(
        name=scene.name,
        tokens=len(completion.token_ids),
        plain_seconds=statistics.median(seconds[0]),
        speculative_seconds=statistics.median(seconds[1]),
        drafted=stats.drafted_tokens,
        accepted=stats.accepted_tokens,
        target_steps=stats.target_steps,
        difference=explain(plain, ids, expected, completion),
    )
    return measurement, expected, completion


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


def _table(measurements: Sequence[Measurement], rounds: int) -> Table:
    table = Table(
        title="Greedy decoding, plain and speculative",
        caption=f"Median of {rounds} alternating rounds without printing, prompts included. "
        "Accepted length: tokens per target step.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("prompt")
    for heading in (
        "tokens",
        "plain\ntok/s",
        "spec.\ntok/s",
        "speedup",
        "accept.\nrate",
        "accepted\nlength",
    ):
        table.add_column(heading, justify="right")
    table.add_column("identical")
    for item in [*measurements, total(measurements)]:
        if item.name == "total":
            table.add_section()
        table.add_row(
            item.name,
            str(item.tokens),
            f"{item.plain_rate:.0f}",
            f"{item.speculative_rate:.0f}",
            f"{item.speedup:.2f}x",
            f"{item.acceptance_rate:.0%}",
            f"{item.mean_accepted_length:.2f}",
            _identical(item.difference),
        )
    return table


def _identical(difference: Difference | None) -> str:
    if difference is None:
        return "yes"
    return "but a tie" if difference.is_tie else "NO"


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


@expand
def demo(
    engine: ModelOptions,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens a prompt.")] = 120,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; the median counts.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the show.")
    ] = False,
) -> None:
    """Decode four prompts plainly and speculatively, and compare text and speed."""
    if engine.resolved_draft is None:
        raise typer.BadParameter(f"the demo needs a draft; try --draft {DEFAULT_DRAFT} or ngram")
    if engine.lossy:
        raise typer.BadParameter("the demo shows that drafts change no text; leave --lossy out")
    from paceline import SamplingParams

    params = SamplingParams(max_tokens=max_tokens)
    console = Console(quiet=as_json)
    with console.status("loading the models"):
        speculative = engine.open(engine.resolved_draft)
        plain = engine.open(None)
    console.print(_legend())
    scenes = [s for s in SCENES if not s.chat or speculative.tokenizer.chat_template is not None]
    if not as_json:
        for scene in scenes:
            _perform(console, speculative, scene, params)
    console.rule(style="dim")
    console.print("measuring both in turn, without printing ...", style="dim")
    results = [measure(plain, speculative, scene, params, rounds) for scene in scenes]
    measurements = [result[0] for result in results]
    if as_json:
        record = total(measurements).record()
        del record["name"]
        print_json({**record, "prompts": [item.record() for item in measurements]})
        return
    console.print(_table(measurements, rounds))
    for item, expected, completion in results:
        if item.difference is not None:
            _explain_difference(console, plain, item.name, item.difference, expected, completion)
