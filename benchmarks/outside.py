"""Share of a decoding step spent outside the models' forwards, for kinds of requests and drafts.

    python benchmarks/outside.py --model FOLDER [--drafts none,ngram] [--json FILE]

For engines on a CPU. With one thread (OMP_NUM_THREADS=1) the processor's time is taken, not the
clock's, so that other programs move the shares little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from prompts import default_folder, read_texts
from stepclock import install

SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
}


def params_list() -> dict[str, dict[str, Any]]:
    """Parameters of each kind of request."""
    from paceline import Grammar

    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    sampled = {"temperature": 0.8, "top_p": 0.9}
    return {
        "greedy": {},
        "sampled": sampled,
        "seeded": sampled | {"seed": 7},
        "json": {"grammar": Grammar.json(SCHEMA)},
        "logprobs": {"logprobs": 5},
        "penalties": penalties,
    }


def prompts_of(tokenizer: Any, context: int, batch: int, folder: Path) -> list[list[int]]:
    """`batch` prompts of `context` tokens: one text, whose last 32 tokens differ.

    The beginning is shared, so it is read once, and stays cached for the next kind of request.
    """
    suites = [name for name in ("spec_bench", "mt_bench") if (folder / f"{name}.jsonl").is_file()]
    texts = [text for name in suites or ["chat"] for _, text in read_texts(folder, name)]
    ids: list[int] = tokenizer("\n\n".join(texts[: 40 + context // 20]))["input_ids"]
    while len(ids) < context + 32 * batch:
        ids = ids + ids
    tails = [ids[context + 32 * i : context + 32 * (i + 1)] for i in range(batch)]
    return [ids[: context - 32] + tail for tail in tails]


class Recorder:
    """Times an LLM's steps: shares by part, and what passes between two steps."""

    def __init__(self, llm: Any) -> None:
        # The processor's time of this thread: what other programs take does not count.
        self._timer = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        _, self._own = install(llm, self._timer)
        self.steps: list[dict[str, float]] = []  # of decoding alone
        self._end = 0.0
        step = llm.engine.step

        def recorded() -> Any:
            since = self._timer() - self._end
            commits = step()
            own = self._own[-1]
            own["between"] = since
            if all(c.tokens and c.scheduled == 1 and c.finish_reason is None for c in commits):
                self.steps.append(own)
            self._end = self._timer()
            return commits

        llm.engine.step = recorded

    def measure(self, llm: Any, prompts: list[list[int]], params: Any, warm: int) -> dict[str, Any]:
        """Medians over the steps of one call, the first `warm` left out."""
        self.steps.clear()
        done = llm.generate(prompts, params)
        steps = [own for own in self.steps[warm:] if own]
        totals = [sum(own.values()) for own in steps]
        pairs = list(zip(steps, totals, strict=True))
        if not pairs:
            return {"steps": 0}
        names = sorted({name for own in steps for name in own} - {"forward"})
        parts = {n: statistics.median(own.get(n, 0.0) / t for own, t in pairs) for n in names}
        outside = [1 - own.get("forward", 0.0) / total for own, total in pairs]
        return {
            "steps": len(steps),
            "outside": round(statistics.median(outside), 4),
            "step_ms": round(statistics.median(totals) * 1e3, 2),
            "outside_ms": round(
                statistics.median(o * t for o, t in zip(outside, totals, strict=True)) * 1e3, 3
            ),
            "parts": {n: round(share, 4) for n, share in parts.items() if share >= 0.002},
            "drafted": sum(sum(c.draft_mask) for c in done),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="paceline/tiny")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--drafts", default="none,ngram,suffix,hybrid:ngram+suffix,recycling")
    parser.add_argument("--kinds", default=",".join(params_list()))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--contexts", default="200,4000")
    parser.add_argument("--length", default="auto", help="draft length")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each request")
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--prompts", type=Path, default=default_folder())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    from paceline import LLM, SamplingParams

    kinds = params_list()
    batches = [int(b) for b in args.batches.split(",")]
    base = LLM(
        args.model, draft="none", dtype=args.dtype, max_batch_size=max(batches), draft_length=0
    )
    rows = []
    for draft in args.drafts.split(","):
        length: int | str = int(args.length) if args.length.isdigit() else args.length
        llm = base.beside(
            None if draft == "none" else draft,
            max_batch_size=max(batches),
            draft_length=0 if draft == "none" else length,
            seed=0,
        )
        recorder = Recorder(llm)
        for context in (int(c) for c in args.contexts.split(",")):
            for batch in batches:
                prompts = prompts_of(base.tokenizer, context, batch, args.prompts)
                for kind in args.kinds.split(","):
                    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, **kinds[kind])
                    found = recorder.measure(llm, prompts, params, args.warm)
                    row = {"draft": draft, "context": context, "batch": batch, "kind": kind}
                    rows.append(row | found)
                    if not found["steps"]:
                        continue  # a draft that knew the answer: it ended within the warm-up
                    parts = " ".join(f"{n} {share:.1%}" for n, share in found["parts"].items())
                    print(
                        f"{draft:10} {context:5} x{batch:<3} {kind:10} outside "
                        f"{found['outside']:6.1%} = {found['outside_ms']:7.2f} of "
                        f"{found['step_ms']:7.2f} ms ({found['steps']} steps)  {parts}",
                        flush=True,
                    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
