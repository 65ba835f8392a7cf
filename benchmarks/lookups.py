"""Microseconds of a lookup, for one sequence and step, and tokens a second of a first reading.

    python benchmarks/lookups.py            # the kernels' indexes and the searching reference

No model: texts of a skewed random vocabulary in which parts come again, as they do in answers. A
step commits two tokens and drafts 8; "guess" is the lookup alone, "propose" all that the engine
calls, tensors included. The suffix drafter has a full memory of earlier outputs beside the text.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from paceline.core.batch import Commit, Plan, Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.ngram import NGramDrafter
from paceline.draft.suffix import SuffixDrafter

CONTEXTS = (100, 2_000, 50_000)
STEPS, LENGTH, VOCABULARY = 400, 8, 49_152
OUTPUTS = 1_000  # finished before, of 450 tokens each


def text(length: int, seed: int) -> list[int]:
    """A third of it are parts that stood before."""
    chooser, tokens = random.Random(seed), list[int]()
    while len(tokens) < length:
        if len(tokens) > 50 and chooser.random() < 0.05:
            begin = chooser.randrange(len(tokens) - 20)
            tokens += tokens[begin : begin + chooser.randrange(5, 20)]
        tokens.append(int(VOCABULARY * chooser.random() ** 4))
    return tokens[:length]


def remember(drafter: Any) -> None:
    if hasattr(drafter, "note"):
        for number in range(OUTPUTS):
            output = text(450, 1000 + number)
            seq = SequenceState(-1, output[:16], 16, SamplingParams(max_tokens=1000))
            drafter.begin(seq.view())
            drafter.note(Commit(-1, tuple(output[16:]), finish_reason="stop"))
            drafter.forget(-1)
        assert drafter.stored_tokens


def timed(drafter: Any, context: int, seq_id: int) -> tuple[float, float, float]:
    """Medians of guess and propose in microseconds; tokens a second of the first reading."""
    tokens = text(context + 4 * STEPS, context)
    seq = SequenceState(seq_id, tokens[:context], context, SamplingParams(max_tokens=9999))
    if hasattr(drafter, "begin"):
        drafter.begin(seq.view())
    began, read = time.perf_counter(), 0
    while drafter.unread(seq.view()):
        read += drafter.read(seq.view(), 16_384)
    speed = read / (time.perf_counter() - began)
    times: tuple[list[float], list[float]] = [], []
    for step in range(2 * STEPS):
        seq.tokens += tokens[len(seq.tokens) : len(seq.tokens) + 2]
        seq.cached = len(seq.tokens) - 1
        item = Slice(seq.view(), 1, LENGTH)
        plan = Plan((item,))
        began = time.perf_counter()
        if step % 2:
            drafter.propose(plan)
        else:
            drafter.take_in(plan.slices)
            drafter.guess(item)
        times[step % 2].append(time.perf_counter() - began)
    drafter.forget(seq_id)
    return 1e6 * statistics.median(times[0]), 1e6 * statistics.median(times[1]), speed


def compare(made: dict[str, Callable[[], Any]], rounds: int = 2) -> None:
    drafters = {}
    for name, make in made.items():
        os.environ["PACELINE_NATIVE"] = "off" if "searched" in name else ""
        drafters[name] = make()
        remember(drafters[name])
    print(f"{'drafter':24}{'context':>9}{'guess us':>10}{'propose us':>12}{'read M/s':>10}")
    for number in range(rounds):
        for context in CONTEXTS:
            for name, drafter in drafters.items():
                os.environ["PACELINE_NATIVE"] = "off" if "searched" in name else ""
                guess, propose, read = timed(drafter, context, 10 * number + 1)
                print(f"{name:24}{context:9}{guess:10.1f}{propose:12.1f}{read / 1e6:10.1f}")


if __name__ == "__main__":
    compare(
        {
            "ngram": lambda: NGramDrafter("cpu"),
            "suffix": lambda: SuffixDrafter("cpu", VOCABULARY),
            "ngram, searched": lambda: NGramDrafter("cpu"),
            "suffix, searched": lambda: SuffixDrafter("cpu", VOCABULARY),
        }
    )
