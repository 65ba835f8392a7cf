"""One prompt decoded plainly and speculatively side by side, with bars that show both as they go.

Both take turns of a twentieth of a second, each on a clock of its own, prompt included. So both
meet the machine's moods alike, and drawing costs neither of them anything.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.cli.output import DRAFT_STYLE, Painter

if TYPE_CHECKING:
    from paceline import LLM, Completion, SamplingParams

_TURN = 0.05  # seconds


class Lane:
    """One side of a race. ``seconds`` is what its own work took."""

    def __init__(self, llm: LLM, ids: list[int], params: SamplingParams, shown: bool) -> None:
        self.most = params.max_tokens
        self.events = llm.stream([ids], params)
        self.painter = Painter(llm.tokenizer, shown, ids) if shown else None
        self.text = Text()
        self.seconds = 0.0
        self.tokens = 0
        self.completion: Completion | None = None

    def work(self, turn: float) -> None:
        """Decode for ``turn`` seconds, at least a step."""
        until = self.seconds + turn
        while self.completion is None and self.seconds < until:
            start = time.perf_counter()
            event = next(self.events)
            self.seconds += time.perf_counter() - start
            self.tokens += len(event.token_ids)
            self.completion = event.completion
            if self.painter is not None:
                painted = self.painter.paint(event.text, event.token_ids, event.from_draft)
                self.text.append_text(painted)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


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
    bars = Table.grid(padding=(0, 1))
    for name, lane, style in (("plain", plain, "cyan"), ("speculative", fast, DRAFT_STYLE)):
        most = lane.most if lane.completion is None else max(1, lane.tokens)
        times = f"{lane.rate / plain.rate:.2f}x" if lane is fast and ended and plain.rate else ""
        bars.add_row(
            name,
            ProgressBar(most, lane.tokens, width=36, complete_style=style, finished_style=style),
            Text(f"{lane.rate:4.0f} tokens/s", justify="right"),
            Text(f"{lane.seconds:5.2f} s"),
            Text(times, style="bold"),
        )
    return Group(*([fast.text] if fast.painter is not None else []), bars)
