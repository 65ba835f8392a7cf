"""All that a benchmark found, and the JSON object of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.tools.bench.bought import BenchSpending
from paceline.tools.bench.figures import Row
from paceline.tools.bench.methods import PLAIN, Method
from paceline.tools.bench.predictions import Predicted
from paceline.tools.bench.texts import Comparison
from paceline.tools.perplexity import TextPerplexity
from paceline.tuned import MachineIdentity

if TYPE_CHECKING:
    from paceline.model.target import CausalModel


@dataclass(frozen=True)
class BenchResult:
    """``idle`` says of speculative methods that did nothing what they lacked."""

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    methods: Sequence[Method]
    rows: Sequence[Row]
    texts: Comparison
    idle: dict[str, str]
    predictions: Sequence[Predicted] = ()
    left_out: Sequence[str] = ()  # names of prompts too long for the model
    price: float | None = None
    interrupted: bool = False
    bought: BenchSpending | None = None
    unequal: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of other engines
    perplexities: Sequence[TextPerplexity] = ()

    def record(self) -> dict[str, Any]:
        """Everything, for machines: medians and spreads, unrounded, in seconds."""
        return {
            "model": self.model,
            "interrupted": self.interrupted,
            "machine": self.machine,
            "settings": self.settings,
            "methods": [asdict(method) for method in self.methods],
            "figures": [row.record(self.price) for row in self.rows],
            "predicted": [
                {
                    "method": found.method,
                    "concurrency": found.concurrency,
                    **found.prediction.record(),
                }
                for found in self.predictions
            ],
            "texts": {
                "counts": self.texts.counts,
                "partings": [parting.record() for parting in self.texts.partings],
            },
            "idle": self.idle,
            "unequal": {name: dict(words) for name, words in self.unequal.items()},
            "perplexity": [found.record() for found in self.perplexities],
            "bugs": self.bugs(),
            "prompts_left_out": list(self.left_out),
            "budget": None if self.bought is None else self.bought.record(),
        }

    def bugs(self) -> list[str]:
        """Methods of ours whose text is not plain decoding's, beyond what rounding explains."""
        return [
            method.name
            for method in self.methods
            if method.variant is None and self.texts.different(method.name)
        ]

    def complaints(self, allow_idle: bool = False) -> list[str]:
        """One line for each thing that makes the run a failure."""
        lines = [self._bug(name) for name in self.bugs()]
        if not allow_idle:
            lines += [idle_line(name, lack, self._method(name)) for name, lack in self.idle.items()]
        return lines

    def _bug(self, name: str) -> str:
        first = self.texts.different(name)[0]
        found = first.difference
        return (
            f"{name} wrote another text than {PLAIN} decoding ({first.category}, request "
            f"{first.prompt}, token {found.at}: {found.left} became {found.right}, their scores "
            f"{found.gap:.3g} apart, a rounding step is {found.step:.3g}); this is a bug, please "
            "report it"
        )

    def _method(self, name: str) -> Method:
        return next(method for method in self.methods if method.name == name)


def idle_line(name: str, lack: str, method: Method) -> str:
    """Why a method's figures are not speculation's, and what to do."""
    advice = "try other prompts or another draft"
    if lack == "drafted nothing" and method.length == "auto":
        advice = (
            "either the automatic length found drafting too dear here or the drafter had nothing "
            f"to propose; {name}@4 tells which"
        )
    return (
        f"{name} {lack} in the whole run, so its figures are those of plain decoding; {advice}, "
        "or accept this with --allow-idle"
    )


def labels(names: Sequence[str]) -> dict[str, str]:
    """Names for tables: folders lose their parents unless two would then be called the same."""
    short = {name: re.sub(r"[^:+,@=]*/(?=[^/])", "", name) for name in names}
    used = list(short.values())
    return {name: text if used.count(text) == 1 else name for name, text in short.items()}


def machine_of(target: CausalModel) -> dict[str, Any]:
    """What the figures were measured on, and how busy it was before."""
    about = asdict(MachineIdentity.of(target))
    about["cores"] = os.cpu_count()
    if hasattr(os, "getloadavg"):
        about["load_before"] = os.getloadavg()[0]
    return about
