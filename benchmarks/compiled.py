"""What torch.compile makes of a forward's products and norms, beside the native kernels' forward.

    python benchmarks/compiled.py [MODEL] [--dtype bfloat16] [--rounds 7]

Attention is left out of the compiled one, and its weights are frozen and packed by Inductor, so it
is a lower bound of what a compiled forward could take; the native one is whole, behind 64 cached
tokens. `bits`: whether the first row has the same bits among so many rows as alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F

from native import forward
from paceline.model.loading import load_module
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 64


class Products(torch.nn.Module):
    """All of a Llama-shaped decoder but its attention."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.hf.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            y = layer.input_layernorm(x)
            q, k, v = attention.q_proj(y), attention.k_proj(y), attention.v_proj(y)
            groups = q.shape[-1] // k.shape[-1]
            x = x + attention.o_proj(q + (k + v).repeat(1, groups))
            y = layer.post_attention_layernorm(x)
            x = x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
        logits: torch.Tensor = self.hf.lm_head(self.hf.model.norm(x))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="paceline/smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch._inductor.config.freezing = True  # type: ignore[attr-defined]
    hf = load_module(options.model, options.dtype, "cpu").eval()
    native = CausalModel.load(options.model, options.dtype, "cpu", backend="native")
    cache = PagedCache(native.cache_shapes, 8, 16, native.dtype, "cpu")
    embedded = hf.model.embed_tokens(torch.arange(1, 1 + max(ROWS))).detach()
    print(" rows  compiled  native  ratio compiled  native  bits compiled")
    with torch.inference_mode(False), torch.no_grad():
        run = torch.compile(Products(hf), dynamic=False)
        first = {}
        for rows in ROWS:  # compiles
            first[rows] = run(embedded[:rows].clone())[0]
        took: dict[tuple[str, int], list[float]] = {}
        for turn in range(options.rounds + 1):
            for rows in ROWS:
                x = embedded[:rows].clone()
                began = time.perf_counter()
                run(x)
                compiled = 1e3 * (time.perf_counter() - began)
                ours = forward(native, cache, CONTEXT, rows, prompt=False)
                if turn:
                    took.setdefault(("compiled", rows), []).append(compiled)
                    took.setdefault(("native", rows), []).append(ours)
    median = {key: statistics.median(values) for key, values in took.items()}
    for rows in ROWS:
        a, b = median["compiled", rows], median["native", rows]
        same = "equal" if torch.equal(first[rows], first[1]) else "differ"
        print(
            f"{rows:5} {a:9.2f} {b:7.2f} {a / median['compiled', 1]:15.2f} "
            f"{b / median['native', 1]:7.2f}  {same}"
        )


if __name__ == "__main__":
    main()
