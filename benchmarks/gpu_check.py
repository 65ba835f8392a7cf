"""Compares a GPU with the CPU: texts, the cost of a step, and a captured step.

    python benchmarks/gpu_check.py [--device cuda:0] [--model paceline/tiny] [--json FILE]

In float32, greedy and seeded, every drafter's text on the device is compared with that of plain
decoding on the CPU, and the logits of the same forward row by row (rounding differs, so texts may
differ at near ties; the largest difference is shown). Then the cost of a step over 1 to 32 rows is
measured, and of a step captured by torch.cuda.graphs if possible. Exit code 1 if a text differs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from measuring import finish
from paceline import LLM, SamplingParams
from paceline.core.batch import Batch, Span
from paceline.drafters import DRAFTERS
from paceline.model.measure import measure

PROMPTS = ["Once upon a time there was a", "one two one two one two", "def add(a, b):\n    return"]
PARAMS = {
    "greedy": SamplingParams(max_tokens=32, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, seed=5, max_tokens=32, ignore_eos=True),
}
ROWS = (1, 2, 4, 8, 16, 32)


def specs(model: str) -> dict[str, str]:
    """A draft of each kind that needs only the embedded models."""
    other = ("quantized", "datastore", "mtp")  # need a CPU, a file, layers in the checkpoint
    weights = {"target": model} | {r.weights: f"{model}-{r.weights}" for r in DRAFTERS.values()}
    return {
        kind: record.examples[0].format(**weights)
        for kind, record in DRAFTERS.items()
        if kind not in other
    }


def texts(llm: LLM) -> dict[str, list[list[int]]]:
    return {
        name: [done.token_ids for done in llm.generate(PROMPTS, params)]
        for name, params in PARAMS.items()
    }


def step_of(llm: LLM, rows: int) -> Callable[[], torch.Tensor]:
    """A forward over a chain of ``rows`` rows after 64 tokens."""
    target = llm.target
    cache = target.new_cache(8, 16)
    at = range(64, 64 + rows)
    span = Span(0, 0, 64, rows)
    batch = Batch([n % target.vocab_size for n in at], at, at, (span,), (tuple(range(8)),))

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return target(batch, cache).logits

    return step


def captured(step: Callable[[], torch.Tensor], device: torch.device) -> float | str:
    """Seconds of the step as a CUDA graph, or the reason why it cannot be captured."""
    if device.type != "cuda":
        return "no CUDA device"
    try:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return measure(lambda _: graph.replay(), [1], device).seconds[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="cuda:N; cpu tests the script itself")
    parser.add_argument("--model", default="paceline/tiny")
    parser.add_argument("--only", nargs="+", help="only these kinds of drafters")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args(arguments)
    options: dict[str, Any] = {"dtype": "float32", "backend": "reference", "seed": 1}
    console = Console()
    host = LLM(args.model, "none", device="cpu", **options)
    plain = LLM(args.model, "none", device=args.device, **options)
    device = plain.target.device
    wanted, wrong = texts(host), []
    for kind, spec in {"none": "none", **specs(args.model)}.items():
        if args.only and kind not in args.only:
            continue
        written = texts(plain.with_draft(spec, draft_length=4))
        differing = [name for name in PARAMS if written[name] != wanted[name]]
        wrong += [f"{kind} ({name})" for name in differing]
        console.print(
            f"{kind:14} {'differs: ' + ', '.join(differing) if differing else 'the same texts'}"
        )
    largest = max(
        float((step_of(plain, n)().cpu() - step_of(host, n)()).abs().max()) for n in (1, 8)
    )
    steps = {rows: step_of(plain, rows) for rows in ROWS}
    curve = measure(lambda rows: steps[rows](), ROWS, device)
    costs = dict(zip(ROWS, curve.seconds, strict=True))
    graphs = {rows: captured(step_of(plain, rows), device) for rows in (1, 8)}
    console.print(f"logits differ by at most {largest:.1e} (float32, 1 and 8 rows)")
    for rows, cost in costs.items():
        console.print(f"{rows:3} rows {1e3 * cost:8.3f} ms  {cost / costs[1]:.2f} times one row")
    for rows, graph in graphs.items():
        text = graph if isinstance(graph, str) else f"{1e3 * graph:.3f} ms"
        console.print(f"{rows:3} rows as a CUDA graph: {text}")
    record = {"device": str(device), "differ": wrong, "logits_apart": largest}
    record |= {"seconds": costs, "graph_seconds": graphs, "torch": torch.__version__}
    finish(record, args.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
