"""What products of few rows could cost: reading alone, multiplying alone, and both together.

    python benchmarks/native.py --roofline [--rows 1 4 8 16] [--rounds 5] [--json]

For each precision and number of rows, milliseconds for so many weights as SmolLM2-135M has (134.5
million): ``read`` is their bytes at the speed of a plain sum over memory, ``multiply`` a product
whose weights stay in the second cache, ``both`` one whose weights come from memory. ``gap`` is
``both`` by the larger of the two: what latency, conversion and waiting cost beyond either.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch

from measuring import alternate
from paceline.kernels.library import (
    BFLOAT16,
    OFFSETS_LEAST,
    SCALE_HALF,
    CWeight,
    check,
    instructions,
    library,
)
from paceline.lab.profiling.machine import read_bandwidth

WEIGHTS, INPUTS, PANEL = 134_500_000, 576, 32
CACHED, STREAMED, COPIES = 16, 1024, 8  # panels of a thread; of a matrix, and how many of these
FORMS = {
    "bf16": {},
    "8 bits": {"bits": 8, "repeat": 2, "scale_kind": SCALE_HALF},
    "4 bits": {"bits": 4, "repeat": 1, "scale_kind": SCALE_HALF, "offsets": OFFSETS_LEAST},
}


class Matrices:
    """``copies`` packed matrices [outputs, INPUTS] of any content, one behind the other."""

    def __init__(self, form: str, outputs: int, copies: int) -> None:
        self.outputs, self.copies = outputs, copies
        self.weight = CWeight(None, None, outputs, INPUTS, **FORMS[form])
        plain = form == "bf16"
        self.bytes = (
            library().pl_packed_bytes(BFLOAT16, outputs, INPUTS)
            if plain
            else library().pl_quantised_bytes(self.weight)
        )
        self._data = torch.randint(1, 50, (self.bytes * copies + (1 << 16),), dtype=torch.uint8)
        self.weight.data = self._data.data_ptr() + -self._data.data_ptr() % 64

    def seconds(self, rows: int, passes: int) -> float:
        """Of products with WEIGHTS weights in all, from a number of passes over the matrices."""
        x = torch.randn(rows, INPUTS, dtype=torch.bfloat16)
        y = torch.empty(rows, self.outputs, dtype=torch.bfloat16)
        apart = self.bytes if self.copies > 1 else 0
        call = (passes, apart, y.data_ptr(), torch.get_num_threads())
        began = time.perf_counter()
        check(library().pl_repeat_product(BFLOAT16, self.weight, x.data_ptr(), rows, *call))
        return (time.perf_counter() - began) / passes * WEIGHTS / (self.outputs * INPUTS)


def run(rows: Sequence[int], rounds: int, as_json: bool) -> None:
    threads, rate = torch.get_num_threads(), read_bandwidth(torch.device("cpu"), 1 << 28)
    records = []
    for form in FORMS:
        cached = Matrices(form, CACHED * threads * PANEL, 1)
        streamed = Matrices(form, STREAMED * PANEL, COPIES)
        read = streamed.bytes / (streamed.outputs * INPUTS) * WEIGHTS / rate
        for count in rows:
            times = alternate(
                {
                    "multiply": partial(cached.seconds, count, 200),
                    "both": partial(streamed.seconds, count, COPIES),
                },
                rounds,
            )
            multiply, both = (statistics.median(times[name]) for name in ("multiply", "both"))
            gap = both / max(read, multiply)
            record = {"read": read, "multiply": multiply, "both": both, "gap": gap}
            records.append({"form": form, "rows": count, **record})
    if as_json:
        print(json.dumps({"kernels": instructions(), "threads": threads, "rows": records}))
        return
    print(f"{instructions()}, {threads} threads, {rate / 1e9:.1f} GB/s; milliseconds")
    print("form    rows    read multiply    both   gap")
    for r in records:
        times_ = " ".join(f"{1e3 * r[name]:8.2f}" for name in ("read", "multiply", "both"))
        print(f"{r['form']:7} {r['rows']:4} {times_} {r['gap']:5.2f}")
