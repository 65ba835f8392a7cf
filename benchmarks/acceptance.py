"""Draft acceptance at temperature 0.

`tiny`: with transformers alone, no line of the engine is used. The target's greedy text comes
first (batched). Then speculative decoding is walked along it: from a position the draft continues
greedily by `--length` tokens, the run of tokens that agree with the target's text is accepted, the
next position is after them and the target's own token. All positions of a text are drafted in one
batch (the draft's answer depends on the text before it only), so the walk itself costs nothing.

    python benchmarks/acceptance.py --target DIR --draft DIR --per-suite 20

`smollm2`: the real model with its head, draft and Medusa heads, in our engine; see
head_acceptance.py. `--ignore-eos` is for `tiny` alone: the real model ends its answers.

    python benchmarks/acceptance.py --pairs smollm2 --eagle3 FOLDER

The last line of the output is one JSON object: per suite and their mean, `acceptance` (accepted /
drafted tokens) and `mean_accepted_length` (tokens per target step).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import head_acceptance
import real
from inflate import InflateError, resolve
from prompts import SUITES, Prompt, default_folder, load_suites


@dataclass
class Walk:
    """Counts of one or more walks; `steps` are target steps."""

    length: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    by_position: list[int] = field(default_factory=list)  # how often draft token i was accepted
    tried: list[int] = field(default_factory=list)  # how often token i was reached

    def __post_init__(self) -> None:
        self.by_position = self.by_position or [0] * self.length
        self.tried = self.tried or [0] * self.length

    def summary(self) -> dict[str, Any]:
        """Rates, each with its own denominator: token i counts only where i - 1 was accepted."""
        return {
            "acceptance": round(self.accepted / max(1, self.drafted), 4),
            "mean_accepted_length": round(self.committed / max(1, self.steps), 4),
            "per_position": [
                round(a / max(1, t), 4) for a, t in zip(self.by_position, self.tried, strict=True)
            ],
            "drafted": self.drafted,
            "accepted": self.accepted,
        }


def walk(text: list[int], drafts: list[list[int]], length: int, into: Walk) -> None:
    """Walk speculative decoding along `text`, the target's greedy tokens.

    `drafts[i]` is the draft's continuation after `text[:i]`. As an engine does, a draft is cut so
    that it and the target's own token fit into what is left of the text.
    """
    at = 0
    while at < len(text):
        want = min(length, len(text) - at - 1)
        run = 0
        while run < want and drafts[at][run] == text[at + run]:
            run += 1
        into.steps += 1
        into.drafted += want
        into.accepted += run
        into.committed += run + 1
        for i in range(want):
            into.tried[i] += i <= run
            into.by_position[i] += i < run
        at += run + 1


@torch.inference_mode()
def greedy_texts(
    model: Any, prompts: list[list[int]], tokens: int, stops: frozenset[int]
) -> list[list[int]]:
    """The greedy continuations of a batch, each cut after its first stop token."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=sorted(stops) or None,
        pad_token_id=0,
        use_cache=True,
    )
    texts = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        texts.append(row[:end])
    return texts


@torch.inference_mode()
def greedy_drafts(model: Any, prompt: list[int], text: list[int], length: int) -> list[list[int]]:
    """The draft's greedy continuation of every prefix `prompt + text[:i]`, `length` tokens each.

    One forward over the text gives every first token and all keys and values. The further tokens
    of all prefixes are decoded together: as rows of one packed sequence with a block mask, so
    that row i sees the text before i and its own tokens only.
    """
    n, start = len(text), len(prompt)
    known = torch.tensor([prompt + text[:-1]], device=model.device)
    out = model(known, use_cache=True)
    token = out.logits[0, start - 1 :].argmax(-1)  # [n]
    drafts, cache = [token], out.past_key_values
    device, dtype = model.device, model.dtype
    seen = (
        torch.arange(known.shape[1], device=device)
        < torch.arange(start, start + n, device=device)[:, None]
    )  # [n, text]: prefix i ends before position start + i
    own = torch.eye(n, dtype=torch.bool, device=device)
    for depth in range(length - 1):
        seen = torch.cat([seen, own], dim=1)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        mask.masked_fill_(~seen, torch.finfo(dtype).min)
        positions = torch.arange(start, start + n, device=device) + depth
        out = model(
            token[None],
            position_ids=positions[None],
            attention_mask=mask[None, None],
            past_key_values=cache,
            use_cache=True,
        )
        token, cache = out.logits[0].argmax(-1), out.past_key_values
        drafts.append(token)
    columns: Tensor = torch.stack(drafts, dim=1)
    return columns.tolist()


def measure(
    target: Any, draft: Any, suites: dict[str, list[Prompt]], args: argparse.Namespace
) -> dict[str, Any]:
    """Walk all suites; returns {suite: summary}."""
    stops: frozenset[int] = frozenset()
    if not args.ignore_eos:
        eos = target.generation_config.eos_token_id
        stops = frozenset([eos] if isinstance(eos, int) else eos or [])
    console = Console(stderr=True)
    result: dict[str, Any] = {}
    for suite, entries in suites.items():
        counts = Walk(args.length)
        # Similar lengths share a batch, so that little of it is padding.
        ordered = sorted((e.token_ids for e in entries), key=len)
        batches = [ordered[i : i + args.batch] for i in range(0, len(ordered), args.batch)]
        for batch in track(batches, description=f"{suite:10}", console=console, transient=True):
            for prompt, text in zip(
                batch, greedy_texts(target, batch, args.max_tokens, stops), strict=True
            ):
                drafts = greedy_drafts(draft, prompt, text, args.length)
                walk(text, drafts, args.length, counts)
        result[suite] = counts.summary()
        console.print(f"{suite:10} {result[suite]}", highlight=False)
    return result


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; what is not given is the pair's own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", default="tiny", choices=["tiny", real.NAME])
    parser.add_argument("--target", help=f"default: paceline/tiny, or {real.TARGET}")
    real.add_weights(parser)
    parser.add_argument("--length", type=int, default=4, help="draft length of chains")
    parser.add_argument("--nodes", type=int, default=16, help="of a tree (the real model)")
    parser.add_argument("--depth", type=int, default=6, help="levels of a tree (the real model)")
    parser.add_argument("--width", type=int, default=4, help="of a tree (the real model)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the real model")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, help="prompts together; default: 16, or 8")
    parser.add_argument("--per-suite", type=int, help="prompts; 0: all; default: 20, or 12")
    parser.add_argument("--suites", help="comma-separated; see README.md for the defaults")
    parser.add_argument("--prompts-dir", default=str(default_folder()))
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="file to write the JSON object to")
    args = parser.parse_args(arguments)
    is_real = args.pairs == real.NAME
    args.batch = args.batch or (8 if is_real else 16)
    if args.per_suite is None:
        args.per_suite = 12 if is_real else 20
    args.suites = args.suites or ",".join(real.ACCEPTANCE_SETS if is_real else SUITES)
    if min(args.length, args.nodes, args.depth, args.width, args.batch, args.max_tokens) < 1:
        parser.error("all numbers but --per-suite and --temperature must be at least 1")
    if is_real and args.ignore_eos:
        parser.error(f"--ignore-eos is for tiny: {real.NAME} ends its answers")
    if not is_real and (args.eagle3 or args.medusa or args.temperature):
        parser.error(f"--eagle3, --medusa and --temperature need --pairs {real.NAME}")
    return args


def main() -> None:
    """Measure as the command line says; the last line of the output is JSON."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    args = parse(sys.argv[1:])
    if args.pairs == real.NAME:
        head_acceptance.run(args)
    names = args.target or "paceline/tiny", args.draft or "paceline/tiny-draft"
    try:
        folders = [resolve(name) for name in names]
    except InflateError as error:
        raise SystemExit(f"error: {error}") from None
    dtype = getattr(torch, args.dtype)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device).eval()
        for folder in folders
    )
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    limit = target.config.max_position_embeddings - args.max_tokens - args.length
    suites = load_suites(args.prompts_dir, args.suites.split(","), tokenizer, args.per_suite, limit)
    result = measure(target, draft, suites, args)
    mean = sum(s["acceptance"] for s in result.values()) / len(result)
    length = sum(s["mean_accepted_length"] for s in result.values()) / len(result)
    result["mean"] = {"acceptance": round(mean, 4), "mean_accepted_length": round(length, 4)}
    line = json.dumps(result)
    if args.json:
        Path(args.json).write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
