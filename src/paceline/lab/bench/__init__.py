"""Benchmarks of decoding: prompts, engines, timed rounds, figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paceline.settings import under

if TYPE_CHECKING:
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.lab.bench.runner import Sweep

_prompts, _measuring = under("Prompts"), under("Measuring")
_numbers = partial(_measuring, kind="numbers", metavar="N,N")


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts are decoded."""

    prompts: str | None = _prompts(
        None,
        "Prompts: JSONL or plain text. The layout of JSONL is that of Spec-Bench, MT-Bench, "
        "HumanEval, GSM8K or Paceline.",
        shown="the shipped set",
    )
    category: tuple[str, ...] = _prompts((), "Only this category.", shown="all")
    per_category: int | None = _prompts(None, "Number of prompts per category.", low=1)

    def load(self, per_category: int | None = None) -> list[BenchPrompt]:
        """``per_category`` is the command's own default. Raises DataError."""
        from paceline.lab.bench.prompts import load_prompts

        return load_prompts(self.prompts, self.category, self.per_category or per_category)


@dataclass(frozen=True)
class BenchOptions:
    """What is compared."""

    method: tuple[str, ...] = _measuring(
        (),
        "plain, draft or a spec. draft is that of --draft. A spec may have a length (ngram@5, "
        "eagle3:PATH@auto). Plain decoding is always included, by default also the EAGLE-3 head of "
        "the built-in model.",
        flags=("--method", "-m"),
        shown="draft, ngram",
    )
    concurrency: tuple[int, ...] = _numbers(
        (1,), "Requests that run at once. Several, such as 1,2,4,8, are compared.", low=1
    )
    temperature: tuple[float, ...] = _numbers(
        (0.0,),
        "Temperatures, as in 0,0.7,1; 0 is greedy.",
        flags=("--temperature", "-t"),
        shown="0",
        low=0,
        high=100,
    )
    max_tokens: int = _measuring(64, "New tokens per prompt.", low=1)
    rounds: int = _measuring(3, "Timed rounds; figures are their medians.", low=1)
    ignore_eos: bool = _measuring(
        True,
        "Decode all texts to the same length, or stop at the model's end token.",
        flags=("--ignore-eos/--stop-at-eos",),
    )
    seed: int | None = _measuring(None, "Makes sampled texts comparable.", low=0)

    def sweep(self, rule: str) -> Sweep:
        """The measurements that were asked for. The verification ``rule`` "coupled" needs a seed, 0
        by default."""
        from paceline.lab.bench.runner import Sweep

        return Sweep(
            self.max_tokens,
            sorted(set(self.concurrency)),
            list(dict.fromkeys(self.temperature)),
            self.rounds,
            ignore_eos=self.ignore_eos,
            seed=0 if self.seed is None and rule == "coupled" else self.seed,
        )
