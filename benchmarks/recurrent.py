"""Recurrent layers on the reference backend, on one thread, in turns, with random weights. Times
are processor times, which other processes disturb less.

Measures steps of one row and of eight (a token and a chain of seven drafts) relative to their
products alone, of four layers of width 1024, three of them recurrent (Falcon-H1: all). For one
layer of a real model's width: bytes and milliseconds of keeping a state for each node, and of
replaying accepted tokens from the last state.

    python benchmarks/recurrent.py [KIND ...]    # such as lfm2; default: all"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from measuring import alternate
from paceline.core.batch import Batch, Span
from paceline.model.backends.reference.recurrent import Mixer
from paceline.model.paged.states import bytes_per_state
from paceline.model.target import CausalModel
from support.engine_models import random_recurrent

ROUNDS, ROWS, CONTEXT = 30, 8, 20
_LAYERS = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_MAMBA: dict[str, Any] = {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
_MAMBA |= {"mamba_chunk_size": 256, "num_local_experts": 0}
_DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4}
STEPS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "qwen3_5_text": {"linear_num_key_heads": 8, "linear_num_value_heads": 16} | _DELTA | _LAYERS,
    "granitemoehybrid": {"mamba_n_heads": 32, "shared_intermediate_size": 3072} | _MAMBA | _LAYERS,
    "bamba": {"mamba_n_heads": 32, "attn_layer_indices": [3]} | _MAMBA,
    "falcon_h1": {"mamba_n_heads": 32, "mamba_d_ssm": 2048} | _MAMBA,
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"]},
        **{"num_hidden_layers": 8, "mamba_num_heads": 32, "mamba_head_dim": 64},
        **{"ssm_state_size": 128, "n_groups": 8, "chunk_size": 128},
    },
    "jamba": {
        **{"attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 1},
        **{"mamba_dt_rank": 64, "mamba_d_state": 16},
    },
}
REAL: dict[str, dict[str, Any]] = {  # LFM2-1.2B, Qwen3.5-4B, Granite 4-H tiny
    "lfm2": {"hidden_size": 2048, "layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {"hidden_size": 2560, "linear_num_key_heads": 16} | _DELTA,
    "granitemoehybrid": {"hidden_size": 1536, "mamba_n_heads": 48} | _MAMBA,
}
REAL["qwen3_5_text"]["linear_num_value_heads"] = 32


def turns(jobs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of processor time for each job, the minimum over all rounds."""

    def run(job: Callable[[], object]) -> float:
        start = time.thread_time()
        job()
        return 1e3 * (time.thread_time() - start)

    took = alternate({name: partial(run, job) for name, job in jobs.items()}, ROUNDS, warm_up=0)
    return {name: min(times) for name, times in took.items()}


def steps(kind: str, dtype: torch.dtype) -> dict[str, float]:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    hf = random_recurrent(kind, vocab=8192, **WIDE | heads | STEPS[kind]).to(dtype)
    linear = [module for module in hf.modules() if isinstance(module, torch.nn.Linear)]
    model = CausalModel(hf, kind)
    cache = model.new_cache(16, 16)
    prompt = Span(0, 0, 0, CONTEXT)
    model(Batch(range(CONTEXT), range(CONTEXT), range(CONTEXT), (prompt,), ((0, 1),)), cache)

    def step(rows: int) -> None:
        span = Span(0, 0, CONTEXT, 1, parents=tuple(range(-1, rows - 2)))
        numbers = range(CONTEXT, CONTEXT + rows)
        model(Batch(range(rows), numbers, numbers, (span,), ((0, 1, 2, 3),)), cache)

    def products(rows: int) -> None:
        for module in linear:
            module(torch.ones(1, rows, module.in_features, dtype=dtype))

    took = turns(
        {
            f"{job.__name__} {rows}": lambda job=job, rows=rows: job(rows)
            for rows in (1, ROWS)
            for job in (products, step)
        }
    )
    return took | {f"ratio {n}": took[f"step {n}"] / took[f"products {n}"] for n in (1, ROWS)}


def states(kind: str) -> dict[str, float]:
    hf = random_recurrent(kind, **{"num_hidden_layers": 2} | REAL[kind]).bfloat16()
    mixer = next(m for m in CausalModel(hf, kind).hf.modules() if isinstance(m, Mixer))
    hidden = torch.randn(1, 1, hf.config.hidden_size).bfloat16()
    parts = mixer.probe(torch.randn(1, 3, hf.config.hidden_size).bfloat16())
    store = [torch.zeros(2 + ROWS, *shape, dtype=dtype) for shape, dtype in parts]
    inputs = [getattr(mixer, name)(hidden) for name in mixer.first]

    def copies() -> None:
        for row in range(ROWS):
            for state in store:
                state[row + 1] = state[row]

    def replay() -> None:
        """A step of one row without its products."""
        mixer.advance(hidden, [state[:1].clone() for state in store])

    def products() -> None:
        for name in (*mixer.first, mixer.last):
            module = getattr(mixer, name)
            module(torch.zeros(1, 1, module.in_features, dtype=torch.bfloat16))

    took = turns({"copies": copies, "replay": replay, "products": products})
    return {
        "bytes per state": bytes_per_state([parts]),
        "bytes of inputs": sum(made.nbytes for made in inputs),
        "ms per state kept": took["copies"] / ROWS,
        "ms per token replayed": took["replay"] - took["products"],
    }


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    made: dict[str, Any] = {}
    for kind in sys.argv[1:] or STEPS:
        if kind in REAL:
            made[f"{kind} states"] = states(kind)
        for dtype in (torch.float32, torch.bfloat16):
            made[f"{kind} {dtype}"] = steps(kind, dtype)
    for name, figures in made.items():
        print(name, {key: round(value, 3) for key, value in figures.items()}, file=sys.stderr)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
