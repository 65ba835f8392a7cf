"""The demo's prompts and figures: a row per prompt compares plain decoding with drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.lab.report.document import (
    Column,
    Table,
    number,
    record_of,
    share,
    table_of,
    times,
)
from paceline.model.names import EMBEDDED

if TYPE_CHECKING:
    from paceline.core.sequence import DraftCounts
    from paceline.draft.suffix import SuffixDrafter
    from paceline.engine.driver import StepTotals
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.llm import LLM

PROMPTS = Path(__file__).with_name("demo_prompts")  # for a real model, and for the built-in toy
_MIN_CONTEXT = 2048  # tokens of context that the real questions need


@dataclass(frozen=True)
class Measurement:
    """One prompt, decoded greedily by the target alone and with its draft.

    After a near tie the answers may differ in length, so the speedup compares tokens per second."""

    name: str
    plain: StepTotals
    fast: StepTotals
    counts: DraftCounts  # of ``fast``
    identical: bool  # whether the texts are

    @property
    def speedup(self) -> float:
        return self.fast.rate / self.plain.rate

    @property
    def mean_accepted_length(self) -> float:
        return self.fast.tokens / self.counts.target_steps if self.counts.target_steps else 0.0

    @property
    def in_words(self) -> str:
        """How much of the text was drafted, and by which drafters."""
        counts = self.counts
        if not counts.accepted:
            reasons = Counter(counts.not_drafted).most_common(1)
            return f"No draft was accepted{''.join(f': {reason}' for reason, _ in reasons)}."
        drafters = Counter(counts.by_drafter).most_common()
        by = ", ".join(f"{accepted} by {name}" for name, accepted in drafters if accepted)
        return f"{counts.accepted} of {self.fast.tokens} tokens came from drafts{by and ': ' + by}."


def total(measurements: Sequence[Measurement]) -> Measurement:
    """The sum over all prompts."""
    identical = all(item.identical for item in measurements)
    plain, fast, counts = zip(*((m.plain, m.fast, m.counts) for m in measurements), strict=True)
    return Measurement(
        "total", reduce(add, plain), reduce(add, fast), reduce(add, counts), identical
    )


_rate = "{:.0f}".format
_FIGURES = (
    Column("name", "prompt"),
    Column("tokens", "tokens", "fast.tokens"),
    Column("plain_tokens_per_second", "plain\ntok/s", "plain.rate", _rate),
    Column("speculative_tokens_per_second", "spec.\ntok/s", "fast.rate", _rate),
    Column("speedup", "speedup", shown=times),
    Column("acceptance_rate", "accept.\nrate", "counts.acceptance_rate", share),
    Column("mean_accepted_length", "accepted\nlength", shown=number),
    Column("drafters", path="counts.by_drafter"),
    Column("not_drafted", path="counts.not_drafted"),
    Column("identical", "identical", shown=lambda same: "yes" if same else "NO"),
)


def prompts_for(model: str, llm: LLM) -> list[BenchPrompt]:
    """Questions that fit the model; chats only if it has a chat template."""
    from paceline.lab.bench.prompts import load_prompts

    chats = llm.tokenizer.chat_template is not None
    real = chats and model != EMBEDDED and llm.max_model_len >= _MIN_CONTEXT
    prompts = load_prompts(PROMPTS / ("real.jsonl" if real else "toy.jsonl"))
    return [prompt for prompt in prompts if chats or not prompt.chat]


def with_memory(llm: LLM) -> list[SuffixDrafter]:
    """The drafters that look up tokens in the answers of earlier requests."""
    from paceline.draft.base import with_members
    from paceline.draft.suffix import SuffixDrafter

    members = with_members(llm.engine.drafter)
    return [member for member in members if isinstance(member, SuffixDrafter)]


def demo_table(groups: Sequence[Sequence[Measurement]], draft: str) -> Table:
    """The first run of all prompts and, for drafters that learn from answers, the second run."""
    first, *repeated = ([*group, total(group)] for group in groups)
    again = [replace(item, name=f"{item.name} again") for group in repeated for item in group]
    note = (
        "Speeds include reading the prompt; the two methods take turns every 0.05 s. "
        "Accepted length: tokens per target step."
    )
    if again:
        note += " Again: the same prompts once more; the drafter now remembers the answers."
    title = f"Greedy decoding, plain and with --draft {draft}"
    return table_of([*first, *again], _FIGURES, note, title)


def demo_record(groups: Sequence[Sequence[Measurement]], draft: str) -> dict[str, Any]:
    first, *again = (
        record_of(total(group), _FIGURES[1:])
        | {"prompts": [record_of(item, _FIGURES) for item in group]}
        for group in groups
    )
    return {"draft": draft, **first} | ({"repeated": again[0]} if again else {})
