"""Forwards of the native and the reference backend in turns: rows, context and prompts.

    python benchmarks/native.py [MODEL] [--dtype bfloat16] [--quantize int4] [--rounds 5] [--json]
    python benchmarks/native.py --wide 3      # random weights: 3 layers of an 8B model
    python benchmarks/native.py [MODEL] --kv-cache-dtype int8 --context 4096 [--rows 1 8]
    python benchmarks/native.py --context 2000 --concurrency 16 --rows 1
    python benchmarks/native.py [MODEL] --roofline   # where the time of a forward goes

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
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from measuring import alternate
from paceline.core.batch import Span
from paceline.kernels.library import DTYPES, CWeight, check, instructions, library
from paceline.kernels.pages import zeros
from paceline.lab.profiling.limits import read_bandwidth
from paceline.model.backends.native.packing import PackedFormat, PackedLinear, PackedMatrix
from paceline.model.paged.cache import PagedCache, bytes_per_token
from paceline.model.paged.int8 import INT8, cache_dtype, encode
from paceline.model.precision import matrix_sizes
from paceline.model.target import CausalModel

ROWS = (1, 2, 4, 8, 16, 32)
PANEL = 32  # outputs that the kernels store together
IN_CACHE = 400_000  # bytes for each thread that stay in the L2 cache


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


class Products:
    """The matrix products of a model's forward, on random weights."""

    def __init__(self, model: CausalModel) -> None:
        linears = [m for m in model.hf.modules() if isinstance(m, PackedLinear)]
        matrices = {id(linear.packed): linear.packed for linear in linears}.values()
        self.dtype, self.threads = DTYPES[model.dtype], torch.get_num_threads()
        self.bytes = sum(matrix.data.nbytes for matrix in matrices)
        widest = max(max(matrix.inputs, matrix.outputs) for matrix in matrices)
        self.x = torch.randn(max(ROWS), widest, dtype=model.dtype)
        self.y = torch.empty_like(self.x)
        self._data: list[torch.Tensor] = []  # of the weights
        # For each kind of matrix: all of them one behind the other, their number and bytes each; a
        # part that stays in the cache, and how much larger the matrix is.
        self.kinds: list[tuple[CWeight, int, int, CWeight, float]] = []
        for form, *shape, size in dict.fromkeys(map(_kind, matrices)):
            count = sum(_kind(matrix) == (form, *shape, size) for matrix in matrices)
            panels = max(1, IN_CACHE * shape[0] // (size * PANEL)) * self.threads
            part = min(shape[0], panels * PANEL)
            weights = [
                CWeight(None, None, outputs, shape[1], *(form or ()))
                for outputs in (shape[0], part)
            ]
            for weight, room in zip(weights, (count, 1), strict=True):
                self._data.append(zeros(room * size + (1 << 16)).random_(1, 50))
                weight.data = self._data[-1].data_ptr()
            self.kinds.append((weights[0], count, size, weights[1], shape[0] / part))

    def _seconds(self, weight: CWeight, rows: int, passes: int, stride: int = 0) -> float:
        call = (0.0, passes, stride, self.y.data_ptr(), self.threads)
        began = time.perf_counter()
        check(library().pl_product(self.dtype, weight, self.x.data_ptr(), rows, *call))
        return time.perf_counter() - began

    def products(self, rows: int) -> float:
        """Seconds of all products, their weights read from memory."""
        return sum(self._seconds(all_, rows, count, size) for all_, count, size, *_ in self.kinds)

    def multiply(self, rows: int) -> float:
        """Seconds of as many multiplications by weights that stay in the L2 cache."""
        kinds = ((part, count * more) for _, count, _, part, more in self.kinds)
        return sum(self._seconds(part, rows, 100) / 100 * times for part, times in kinds)


def _kind(matrix: PackedMatrix) -> tuple[PackedFormat | None, int, int, int]:
    """Format, outputs, inputs and bytes."""
    weight = matrix.struct()
    return matrix.form, weight.outputs, weight.inputs, matrix.data.nbytes


def roofline(models: Mapping[str, CausalModel], options: argparse.Namespace) -> None:
    """What a forward costs beyond reading its weights. ``read``: reading them at the speed of a sum
    over memory; ``multiply``: the products, if their weights were in the L2 cache; ``products``:
    all products, their weights read from memory; ``forward``: a whole forward.

    ``loss`` names the largest part above ``read``. "multiply": what ``multiply`` takes longer.
    "loads": what the products take longer than the slower of the two, as loads wait. "rest": what
    the forward takes longer than its products: attention, norms, threads that wait."""
    rate = read_bandwidth(torch.device("cpu"), 1 << 28)
    records = []
    for form, model in models.items():
        parts, cache = Products(model), filled(model, options.context // 16 + 4, "auto")
        for rows in options.rows:
            runs = {
                "multiply": partial(parts.multiply, rows),
                "products": partial(parts.products, rows),
                "forward": partial(forward, model, cache, options.context, rows, False),
            }
            times = {n: statistics.median(t) for n, t in alternate(runs, options.rounds).items()}
            times["forward"] /= 1e3
            records.append({"form": form, "rows": rows, **_losses(parts.bytes / rate, times)})
    if options.json:
        threads = torch.get_num_threads()
        print(json.dumps({"kernels": instructions(), "threads": threads, "rows": records}))
        return
    print(f"{instructions()}, {rate / 1e9:.1f} GB/s; milliseconds")
    columns = ("read", "multiply", "products", "forward")
    print("form          rows" + "".join(f"{name:>10}" for name in columns) + "   largest loss")
    for r in records:
        numbers = "".join(f"{1e3 * r[name]:10.2f}" for name in columns)
        loss = f"{r['loss']} {1e3 * r['losses'][r['loss']]:.2f}"
        print(f"{r['form']:12} {r['rows']:5}{numbers}   {loss}")


def _losses(read: float, times: Mapping[str, float]) -> dict[str, object]:
    losses = {
        "multiply": max(0.0, times["multiply"] - read),
        "loads": max(0.0, times["products"] - max(read, times["multiply"])),
        "rest": max(0.0, times["forward"] - times["products"]),
    }
    return {"read": read, **times, "losses": losses, "loss": max(losses, key=losses.__getitem__)}


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
        "--roofline",
        action="store_true",
        help="bf16, 8 and 4 bits: what reading and multiplying take, and the largest loss",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.roofline:
        load = partial(CausalModel.load, options.model, options.dtype, "cpu", backend="native")
        forms = {"unquantised": None, "8 bits": "int8", "4 bits": "int4"}
        with torch.inference_mode():
            return roofline({form: load(quantize=q) for form, q in forms.items()}, options)
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
