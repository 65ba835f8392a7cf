"""Paceline inside transformers compared with its own decoding: plain, assisted, prompt lookup.

    python benchmarks/assisted.py [MODEL] [--draft SPEC ...] [--assistant FOLDER] [--dtype bfloat16]
        [--max-tokens 64] [--rounds 3] [--json]

Each method answers the shipped prompts one by one, greedily; the methods take turns in rotated
order. A figure is tokens divided by the median seconds of the rounds, with the range over the
rounds. ``same`` counts the answers that equal those of plain ``generate``: with bfloat16 they may
differ at near ties, with float32 they may not. Engines are built before the timing starts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from measuring import alternate, finish
from paceline.integrations.transformers import generate
from paceline.lab.bench.prompts import load_prompts
from paceline.model.names import DEFAULT_DRAFT, default_model, resolve
from prompts import SHIPPED

Method = Callable[[torch.Tensor], torch.Tensor]


def methods_of(
    models: list[Any], assistant: Any, drafts: list[str], tokens: int
) -> dict[str, Method]:
    """All methods by name; each of ours has its own model object, and so its own engine."""
    how = {"max_new_tokens": tokens, "do_sample": False}
    first = models[0]

    def assisted(**more: Any) -> Method:
        return lambda ids: first.generate(ids, **how, **more)

    methods: dict[str, Method] = {"plain": assisted()}
    methods["prompt lookup"] = assisted(prompt_lookup_num_tokens=8)
    if assistant is not None:
        methods["assisted"] = assisted(assistant_model=assistant)
    for model, draft in zip(models[1:], drafts, strict=True):
        methods[f"paceline {draft}"] = lambda ids, model=model, draft=draft: model.generate(
            ids, custom_generate=generate, draft=draft, **how
        )
    return methods


def measure(methods: dict[str, Method], prompts: list[torch.Tensor], rounds: int) -> dict[str, Any]:
    """Tokens per second of each method, and how many answers equal plain decoding's."""
    answers: dict[str, list[torch.Tensor]] = {}

    def run(name: str) -> float:
        began = time.perf_counter()
        answers[name] = [methods[name](ids) for ids in prompts]
        return time.perf_counter() - began

    figures = {}
    for name, seconds in alternate({name: partial(run, name) for name in methods}, rounds).items():
        generated = sum(
            a.shape[1] - p.shape[1] for a, p in zip(answers[name], prompts, strict=True)
        )
        pairs = zip(answers[name], answers["plain"], strict=True)
        figures[name] = {
            "tokens_per_second": generated / statistics.median(seconds),
            "range": [generated / max(seconds), generated / min(seconds)],
            "same": sum(torch.equal(a, b) for a, b in pairs),
            "of": len(prompts),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=default_model()[0])
    parser.add_argument("--draft", action="append", help="our draft spec; may be repeated")
    parser.add_argument("--assistant", help="folder of a draft model, used by both")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", "--tokens", type=int, default=64)
    parser.add_argument("--num-prompts", "--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    drafts = options.draft or [DEFAULT_DRAFT, "suffix"]
    if options.assistant:
        drafts.append(f"model:{options.assistant}")
    dtype = getattr(torch, options.dtype)

    def load(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(resolve(name), dtype=dtype).eval()

    tokenizer = AutoTokenizer.from_pretrained(resolve(options.model))
    texts = [prompt.text for prompt in load_prompts(None, list(SHIPPED.values()), 2)]
    prompts = [
        tokenizer(text, return_tensors="pt").input_ids for text in texts[: options.num_prompts]
    ]
    models = [load(options.model) for _ in range(1 + len(drafts))]
    assistant = load(options.assistant) if options.assistant else None
    methods = methods_of(models, assistant, drafts, options.max_tokens)
    figures = measure(methods, prompts, options.rounds)
    if options.json:
        finish({"model": options.model, "dtype": options.dtype, "ways": figures}, None)
        return
    for name, figure in figures.items():
        low, high = figure["range"]
        print(
            f"{name:48} {figure['tokens_per_second']:8.1f} tokens/s "
            f"({low:.1f} to {high:.1f})  same {figure['same']} of {figure['of']}"
        )


if __name__ == "__main__":
    main()
