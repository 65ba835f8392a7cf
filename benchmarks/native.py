"""Forwards of the native and the reference backend in turns: rows, context and prompts.

    python benchmarks/native.py [MODEL] [--dtype bfloat16] [--quantize int4] [--rounds 5] [--json]
    python benchmarks/native.py --wide 3      # random weights: 3 layers of an 8B model
    python benchmarks/native.py [MODEL] --kv-cache-dtype int8 --context 4096 [--rows 1 8]
    python benchmarks/native.py --context 2000 --concurrency 16 --rows 1
    python benchmarks/native.py --roofline    # the least that products of few rows could cost

Each figure is the median over rounds of the milliseconds of one forward of a chain after
``context`` cached tokens, logits of all rows included; ``ratio`` is relative to one row of the same
backend. With ``--quantize`` the native backend runs weights of 8 or 4 bits, the reference plain
ones, because its code for quantised weights is slow. With ``--kv-cache-dtype`` the native backend
runs twice, with unquantised and with 8-bit keys and values. The last line says how fast the native
backend's one row reads weights and cache, compared with a sum over memory in the same run."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from measuring import alternate
from paceline.core.batch import Span
from paceline.kernels.library import (
    BFLOAT16,
    OFFSETS_UNSIGNED,
    SCALE_HALF,
    CWeight,
    check,
    instructions,
    library,
)
from paceline.kernels.pages import zeros
from paceline.lab.profiling.limits import read_bandwidth
from paceline.model.paged.cache import PagedCache, bytes_per_token
from paceline.model.paged.int8 import INT8, cache_dtype, encode
from paceline.model.precision import matrix_sizes
from paceline.model.target import CausalModel

ROWS = (1, 2, 4, 8, 16, 32)
WEIGHTS, INPUTS, PANEL = 134_500_000, 576, 32  # those of SmolLM2-135M
CACHED, STREAMED, COPIES = 16, 1024, 8  # panels per thread and per matrix; matrices
# 8-bit weights with activations of 16 bits, and of 8 bits ("narrow": gate, up and head).
_INT8 = {"bits": 8, "groups_per_scale": 2, "scale_kind": SCALE_HALF}
FORMS = {
    "bf16": {},
    "8 bits": {**_INT8, "int16_activations": True},
    "narrow": _INT8,
    "4 bits": {
        "bits": 4,
        "groups_per_scale": 1,
        "scale_kind": SCALE_HALF,
        "offset_kind": OFFSETS_UNSIGNED,
    },
}


def filled(model: CausalModel, blocks: int, kind: str) -> PagedCache:
    """A cache of random numbers, because pages that were never written may not be in memory."""
    dtype = cache_dtype(kind, model.dtype)
    cache = PagedCache(model.cache_shapes, blocks, 16, dtype, "cpu")
    for layer, (heads, *widths) in enumerate(model.cache_shapes):
        for part, width in zip(cache.kv(layer), widths, strict=True):
            numbers = torch.randn(blocks * 16, heads, width)
            part.copy_(encode(numbers) if dtype == INT8 else numbers)
    return cache


def forward(
    model: CausalModel,
    cache: PagedCache,
    context: int,
    rows: int,
    prompt: bool,
    sequences: int = 1,
) -> float:
    """Milliseconds of a forward over a chain or over a prompt (logits of the last row only)."""
    ids = [(7919 * n + 1) % model.vocab_size for n in range(rows)]
    parents = () if prompt else tuple(range(-1, rows - 2))
    nodes = ids[1:] if parents else ()
    for number in range(sequences):
        cache.admit(number, [])
        cache.reserve(number, context + rows)
    begin = ids if prompt else ids[:1]
    spans = [Span.of(number, context, begin, parents, nodes) for number in range(sequences)]
    batch = cache.batch_of(spans)
    began = time.perf_counter()
    model(batch, cache)
    took = time.perf_counter() - began
    for number in range(sequences):
        cache.free(number)
    return 1e3 * took


def wide(layers: int, folder: str | Path, vocabulary: int = 32000) -> str | Path:
    """Write a Llama with random weights and the width of an 8B model to ``folder``."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    hf.save_pretrained(folder, max_shard_size="1GB")
    return folder


def bytes_read(model: CausalModel, cache: PagedCache, context: int) -> int:
    """Bytes of weights and cache that a forward of one row reads."""
    cached = (context + 1) * bytes_per_token(model.cache_shapes, cache.dtype)
    return cached + sum(matrix.bytes for matrix in matrix_sizes(model.hf))


class Matrices:
    """``copies`` consecutive packed matrices [outputs, INPUTS] with random content."""

    def __init__(self, form: str, outputs: int, copies: int) -> None:
        self.outputs, self.copies = outputs, copies
        self.weight = CWeight(None, None, outputs, INPUTS, **FORMS[form])
        plain = form == "bf16"
        self.bytes = (
            library().pl_packed_bytes(BFLOAT16, outputs, INPUTS)
            if plain
            else library().pl_quantised_bytes(self.weight)
        )
        self._data = zeros(self.bytes * copies + (1 << 16)).random_(1, 50)  # huge pages
        self.weight.data = self._data.data_ptr()

    def seconds(self, rows: int, passes: int) -> float:
        """Seconds of products with WEIGHTS weights, from ``passes`` passes over the matrices."""
        x = torch.randn(rows, INPUTS, dtype=torch.bfloat16)
        y = torch.empty(rows, self.outputs, dtype=torch.bfloat16)
        stride = self.bytes if self.copies > 1 else 0
        call = (0.0, passes, stride, y.data_ptr(), torch.get_num_threads())
        began = time.perf_counter()
        check(library().pl_product(BFLOAT16, self.weight, x.data_ptr(), rows, *call))
        return (time.perf_counter() - began) / passes * WEIGHTS / (self.outputs * INPUTS)


def roofline(rows: Sequence[int], rounds: int, as_json: bool) -> None:
    """For each precision and number of rows, milliseconds for as many weights as SmolLM2-135M has:
    ``read``: reading their bytes at the speed of a sum over memory; ``multiply``: a product whose
    weights stay in the L2 cache; ``both``: a product whose weights come from memory. ``gap``:
    ``both`` divided by the larger of the two, the extra cost of latency, conversion and waiting."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="paceline/smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument(
        "--kv-cache-dtype", choices=("int8",), help="compared with the model's dtype"
    )
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument(
        "--concurrency", "--sequences", type=int, default=1, help="sequences, each with rows"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--prompt", type=int, default=0, help="measure prompts of this many tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--wide", type=int, metavar="LAYERS", help="use a wide model with random weights"
    )
    parser.add_argument(
        "--roofline", action="store_true", help="measure products only, without a model"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.roofline:
        return roofline(options.rows, options.rounds, options.json)
    with tempfile.TemporaryDirectory() as folder:
        source = wide(options.wide, folder) if options.wide else options.model
        load = partial(CausalModel.load, source, options.dtype, "cpu")
        native, kind = load(quantize=options.quantize, backend="native"), options.kv_cache_dtype
        other = native if kind else load(backend="reference")
    name = kind or "reference"
    lengths = (options.prompt,) if options.prompt else tuple(options.rows)
    blocks = options.concurrency * (-(-(options.context + max(lengths)) // 16) + 1)
    more = bool(options.prompt), options.concurrency
    runs = {
        name: (other, filled(other, blocks, kind or "auto")),
        "native": (native, filled(native, blocks, "auto")),
    }
    with torch.inference_mode():
        times = alternate(
            {
                (run, rows): partial(forward, *model, options.context, rows, *more)
                for rows in lengths
                for run, model in runs.items()
            },
            options.rounds,
        )
        size = bytes_read(*runs["native"], options.context)
        best = read_bandwidth(torch.device("cpu"), 1 << 28)
    medians = {run: {n: statistics.median(times[run, n]) for n in lengths} for run in runs}
    if options.json:
        print(json.dumps(medians))
        return
    print(f" rows {name:>10}   native native/{name[:3]} ratio {name[:3]}  native")
    for rows in lengths:
        first, ours = medians[name], medians["native"]
        print(
            f"{rows:5} {first[rows]:10.2f} {ours[rows]:8.2f} {ours[rows] / first[rows]:10.2f} "
            f"{first[rows] / first[lengths[0]]:9.2f} {ours[rows] / ours[lengths[0]]:7.2f}"
        )
    if not options.prompt and options.concurrency == 1:
        rate = size / medians["native"][1] * 1e3
        print(
            f"one row: {size / 1e6:.0f} MB, {rate / 1e9:.1f} GB/s, {rate / best:.0%} of the "
            f"{best / 1e9:.1f} GB/s of a sum over memory"
        )


if __name__ == "__main__":
    main()
