"""Steps with LoRA adapters relative to steps without, native and in bf16, on one thread, in turns.

    python benchmarks/lora.py [MODEL]

Adapters with random weights change all seven matrices of each layer. Each figure is the median over
rounds of the ratio of a step to the plain step of the same round, after 64 cached tokens: of one
sequence by rank, of eight with one adapter, and of eight, six of which share three adapters."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from measuring import alternate, median_ratio
from paceline.core.adapter import Adapter
from paceline.core.batch import Span
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel

ROUNDS, CONTEXT, RANKS, MIXED = 40, 64, (8, 16, 64), 16  # the rank of the three adapters


def adapter(model: CausalModel, rank: int) -> Adapter:
    pairs = {}
    for name, module in model.hf.named_modules():
        if ".layers." in name and name.endswith("_proj"):
            a, b = torch.randn(rank, module.in_features), torch.randn(module.out_features, rank)
            pairs[name] = (a.to(model.dtype) / rank, b.to(model.dtype) / rank)
    made = Adapter(f"rank {rank}", "", pairs)
    model.backend.check_adapter(made)
    return made


def step(model: CausalModel, cache: PagedCache, adapters: list[Adapter | None]) -> float:
    """Milliseconds of a step with one sequence for each of ``adapters``."""
    spans = [Span.of(n, CONTEXT, [n], adapter=adapter) for n, adapter in enumerate(adapters)]
    batch = cache.batch_of(spans)
    began = time.perf_counter()
    model(batch, cache)
    return 1e3 * (time.perf_counter() - began)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    name = sys.argv[1] if len(sys.argv) > 1 else "paceline/smollm2"
    model = CausalModel.load(name, torch.bfloat16, "cpu", backend="native")
    cache = model.new_cache(64, 16)
    for number in range(8):
        cache.admit(number, [])
        cache.reserve(number, CONTEXT + 1)
    kinds: dict[str, list[Adapter | None]] = {"1 plain": [None], "8 plain": [None] * 8}
    for rank in RANKS:
        made = adapter(model, rank)
        kinds |= {f"1 rank {rank}": [made], f"8 rank {rank}": [made] * 8}
    three = [adapter(model, MIXED) for _ in range(3)]
    kinds["8 mixed"] = [shared for shared in (*three, None) for _ in range(2)]
    runs: dict[str, Callable[[], float]] = {
        kind: partial(step, model, cache, adapters) for kind, adapters in kinds.items()
    }
    took = alternate(runs, ROUNDS)
    ratios = {
        kind: round(median_ratio(times, took[f"{kind[0]} plain"]), 3)
        for kind, times in took.items()
    }
    print(ratios, {kind: round(min(times), 2) for kind, times in took.items()}, file=sys.stderr)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
