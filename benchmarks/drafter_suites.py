"""The prompts of the drafters' benchmark, by suite and temperature, and the same once more."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import real
from paceline.draft.spec import Loading
from paceline.tools.bench.prompts import evenly
from prompts import encode, read_texts

LARGEST_DRAFT = 16  # levels that a draft may reach beyond the last token


@dataclass(frozen=True)
class Amount:
    """How much is measured of one target."""

    prompts: int  # of a suite and temperature, at a fixed length; 0: only timed runs
    timed: int
    tokens: int


@dataclass(frozen=True)
class Suite:
    """Token ids by temperature, and the greedy ones once more."""

    name: str
    prompts: dict[float, list[list[int]]]
    repeated: list[list[int]]


def varied(form: str, text: str) -> str:
    """Nearly the same request: a chat asks once more politely, a text starts a little later."""
    if form == "chat":
        return f"{text} Please answer."
    start = text.find(" ", len(text) // 8) + 1
    return text[start:]


def _texts(args: argparse.Namespace) -> dict[str, list[tuple[str, str]]]:
    """{suite: (format, text)}; the real model gets everything as a user's message."""
    names = args.suites.split(",")
    if args.models == [real.NAME]:
        every = real.texts(args.prompts_dir, names)
        return {name: [("chat", text) for text in own] for name, own in every.items()}
    return {name: read_texts(args.prompts_dir, name) for name in names}


def load_suites(args: argparse.Namespace, loading: Loading, amount: Amount) -> list[Suite]:
    """Prompts that fit into the context with the answer; the longer ones are left out."""
    limit = loading.target.max_positions - amount.tokens - LARGEST_DRAFT
    count = max(amount.prompts, amount.timed)
    suites = []
    for name, texts in _texts(args).items():
        every = [(encode(loading.tokenizer, *text), text) for text in texts]
        fitting = [item for item in every if len(item[0]) <= limit]
        if len(fitting) < len(every):
            left = len(every) - len(fitting)
            print(f"{name}: {left} of {len(every)} prompts are too long: left out", file=sys.stderr)
        chosen = evenly(fitting, count * len(args.temperatures) or None)
        if not chosen:
            raise SystemExit(f"error: no prompt of {name} fits into {limit} tokens")
        parts = len(args.temperatures) if len(chosen) >= len(args.temperatures) else 1
        prompts = {
            temperature: [ids for ids, _ in chosen[index % parts :: parts]]
            for index, temperature in enumerate(args.temperatures)
        }
        greedy = chosen[::parts]
        repeated = [
            ids if index % 2 == 0 else encode(loading.tokenizer, text[0], varied(*text))
            for index, (ids, text) in enumerate(greedy)
        ]
        suites.append(Suite(name, prompts, [ids[-limit:] for ids in repeated]))
    return suites
