"""Time of one forward: the module of transformers, the same with prepacked weights, the lean loop.

    python benchmarks/forward.py                        # random weights, two sizes
    python benchmarks/forward.py --model DIR --rows 1,5 # a checkpoint

The three take turns in one process, and each figure is a median. All run on the paged cache with
the engine's attention. GB/s counts every weight but the embedding's once per forward, whatever
the caches of the processor hold. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from paceline.core.batch import Batch, Span
from paceline.model.backends.reference.prepack import quicken
from paceline.model.paged.cache import PagedCache
from paceline.model.probe import ATTENTION, register
from paceline.model.target import CausalModel

SHAPES = {
    "tiny": {"layers": 12, "hidden": 256, "ffn": 768, "heads": 4, "kv_heads": 2},
    "tiny-draft": {"layers": 2, "hidden": 192, "ffn": 512, "heads": 3, "kv_heads": 3},
    "inflated": {"layers": 24, "hidden": 1152, "ffn": 3072, "heads": 18, "kv_heads": 9},
}
BLOCK = 16


def random_model(shape: str, dtype: torch.dtype) -> CausalModel:
    """A Llama of one of the sizes above, heads of 64, vocabulary 4096, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    register()
    size = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=size["hidden"],
        num_hidden_layers=size["layers"],
        intermediate_size=size["ffn"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        attn_implementation=ATTENTION,
    )
    torch.manual_seed(0)
    return CausalModel(LlamaForCausalLM(config).to(dtype), shape)


def make_batch(rows: int, context: int, vocab: int) -> Batch:
    """``rows`` pending tokens of one sequence behind ``context`` cached ones."""
    length = context + rows
    indices = range(context, length)
    table = list(range(-(-length // BLOCK)))
    ids = [index * 7919 % vocab for index in indices]
    return Batch(ids, indices, indices, (Span(0, 0, context, rows),), (table,))


def streamed_bytes(model: CausalModel) -> int:
    """Weights that a forward of few rows reads: all parameters, tied embeddings once."""
    parameters = {id(p): p for p in model.hf.parameters()}
    total = sum(p.numel() * p.element_size() for p in parameters.values())
    embedding, head = model.hf.get_input_embeddings(), model.hf.get_output_embeddings()
    if head is None or head.weight is embedding.weight:
        return total
    return total - embedding.weight.numel() * embedding.weight.element_size()


def alternate(
    contestants: dict[str, Callable[[], object]], seconds: float, clock: Callable[[], float]
) -> dict[str, tuple[float, float, int]]:
    """Median and minimum in milliseconds, and the number of turns, of each contestant."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        call()
    end = time.perf_counter() + seconds
    turns = 0
    while turns < 3 or time.perf_counter() < end:
        for name, call in contestants.items():
            start = clock()
            call()
            times[name].append(clock() - start)
        turns += 1
    return {
        name: (statistics.median(taken) * 1e3, min(taken) * 1e3, turns)
        for name, taken in times.items()
    }


def measure(
    plain: CausalModel,
    quick: CausalModel,
    rows: list[int],
    context: int,
    seconds: float,
    clock: Callable[[], float],
) -> list[dict[str, float]]:
    """One record per number of rows."""
    lean = quick.lean
    blocks = -(-(context + max(rows)) // BLOCK)
    cache = PagedCache(plain.cache_shapes, blocks, BLOCK, plain.dtype, plain.device)
    size = streamed_bytes(plain)
    records = []
    for count in rows:
        batch = make_batch(count, context, plain.vocab_size)

        def prepacked(batch: Batch = batch) -> None:
            quick.lean = None
            quick(batch, cache)
            quick.lean = lean

        contestants: dict[str, Callable[[], object]] = {
            "module": lambda batch=batch: plain(batch, cache),
            "packed": prepacked,
        }
        if lean is not None:
            contestants["lean"] = lambda batch=batch: quick(batch, cache)
        with torch.inference_mode():
            found = alternate(contestants, seconds, clock)
        record: dict[str, float] = {"rows": count}
        for name, (median, least, turns) in found.items():
            record |= {f"{name}_ms": round(median, 3), f"{name}_min_ms": round(least, 3)}
            record |= {f"{name}_gb_s": round(size / median / 1e6, 1), "turns": turns}
        best = "lean" if lean is not None else "packed"
        record["speedup"] = round(record["module_ms"] / record[f"{best}_ms"], 2)
        records.append(record)
    return records


def show(console: Console, title: str, records: list[dict[str, float]]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("rows", justify="right")
    names = [name for name in ("module", "packed", "lean") if f"{name}_ms" in records[0]]
    for name in names:
        table.add_column(f"{name} ms (least)", justify="right")
        table.add_column("GB/s", justify="right")
    table.add_column("speedup", justify="right")
    for record in records:
        cells = [f"{record['rows']:.0f}"]
        for name in names:
            cells += [f"{record[f'{name}_ms']:.2f} ({record[f'{name}_min_ms']:.2f})"]
            cells += [f"{record[f'{name}_gb_s']:.1f}"]
        table.add_row(*cells, f"{record['speedup']:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="tiny,tiny-draft,inflated", help="comma-separated")
    parser.add_argument("--model", help="a checkpoint instead of random weights")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", default="1,2,4,5,8,16,512", help="comma-separated")
    parser.add_argument("--context", type=int, default=200, help="cached tokens")
    parser.add_argument("--seconds", type=float, default=3.0, help="per number of rows")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time of the calling thread, for a busy machine; needs OMP_NUM_THREADS=1",
    )
    args = parser.parse_args()
    if args.cpu_time and torch.get_num_threads() > 1:
        parser.error("--cpu-time sees one thread only; set OMP_NUM_THREADS=1")
    clock = time.thread_time if args.cpu_time else time.perf_counter
    console = Console(width=max(100, Console().width))
    dtype = getattr(torch, args.dtype)
    rows = [int(part) for part in args.rows.split(",")]
    results: dict[str, list[dict[str, float]]] = {}
    for name in [args.model] if args.model else args.shape.split(","):
        if args.model:
            plain, quick = (CausalModel.load(name, dtype, "cpu", quick=False) for _ in range(2))
        else:
            plain, quick = random_model(name, dtype), random_model(name, dtype)
        quicken(quick)
        records = measure(plain, quick, rows, args.context, args.seconds, clock)
        label = os.path.basename(os.path.normpath(name))
        title = f"{label}, {args.dtype}, {args.context} cached tokens, "
        show(console, f"{title}{torch.get_num_threads()} thread(s)", records)
        results[label] = records
    print(
        json.dumps(
            {
                "benchmark": "forward",
                "dtype": args.dtype,
                "clock": "cpu" if args.cpu_time else "wall",
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
