"""Targets, drafts and requests of the engine's random events, and each request's text alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from paceline import LLM, Grammar, SamplingParams
from paceline.core.adapter import Adapter
from paceline.request.completion import Completion
from support.engine_models import write_pair
from support.every_drafter import write_texts
from support.made_adapters import write_adapter
from support.medusa_models import write_medusa
from support.random_heads import write_block, write_eagle
from support.scripted_model import scripted, write_scripted

LONG = [5, 9, 301, 36, 309, 73, 248, 7, 12, 44, 19, 88, 3, 61, 200, 17] * 3
PROMPTS: tuple[str | list[int], ...] = (
    "Once upon a time there was a little",
    "the cat the cat the cat the",
    "a",
    LONG,
    LONG[:35],
    [*LONG[:20], *range(40, 60)],
)
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 3}
LAST = "the last"  # the last drafter of several
ASKED: tuple[dict[str, Any], ...] = (
    {"max_tokens": 1},
    {"max_tokens": 7},
    {"max_tokens": 40},
    {"max_tokens": 40} | SEEDED,
    {"max_tokens": 40, "ignore_eos": False, "stop": ("am", " and the"), "min_tokens": 5},
    {"max_tokens": 30, "stop_token_ids": (73, 309), "min_tokens": 9} | SEEDED,
    {"max_tokens": 12, "logprobs": 2, "prompt_logprobs": 1},
    {"max_tokens": 30, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "top_k": 9} | SEEDED,
    {"max_tokens": 20, "n": 3} | SEEDED,
    {"max_tokens": 30, "draft_length": 2, "priority": -1},
    {"max_tokens": 20, "drafter": "none", "priority": 1},
    {"max_tokens": 30, "drafter": LAST, "presence_penalty": 0.7},
    {"max_tokens": 30, "lora": "one"},
    {"max_tokens": 30, "lora": "two", "prediction": (36, 309, 73, 248)} | SEEDED,
    {"max_tokens": 20, "prediction": (36, 309, 73, 248, 309)},
    {"max_tokens": 12, "grammar": Grammar("regex", "[a-z ]{4,40}")},
    {
        "max_tokens": 25,
        "grammar": Grammar.json({"type": "array", "items": {"enum": ["am", 1, None]}}),
        "logprobs": 1,
        "n": 2,
        "stop": ("1,",),
        "include_stop_str_in_output": True,
    }
    | SEEDED,
    {
        "max_tokens": 20,
        "logit_bias": {36: 9.0, 309: -100.0, 73: 4.5},
        "min_p": 0.01,
        "top_p": 0.9,
        "logprobs": 3,
        "stop": ("e",),
        "min_tokens": 3,
    }
    | SEEDED,
    {"max_tokens": 20, "logits_processors": (lambda made, logits: logits.roll(len(made) % 3),)},
)
# Several that requests choose from are joined with "|".
DRAFTS = ("none", "ngram", "suffix", "recycling", "lookahead", "early_exit", "layer_skip:nodes=5")
DRAFTS += () if torch.cuda.is_available() else ("quantized:int8",)  # it is for processors
DRAFTS += ("{draft}", "tree:{draft},nodes=6,width=3", "hybrid:suffix+ngram+model:{draft}", "auto")
DRAFTS += ("datastore:{texts}", "suffix|recycling|tree:{draft},branching=2x1")
HEADS = ("eagle3:{eagle3},nodes=6,width=3", "dspark:{dspark}")
# The kernels' and transformers' own models can run every head and every quantised form.
REAL_HEADS = ("eagle3:{eagle3}", "eagle2:{eagle1},nodes=5,width=2", "eagle:{eagle1},branching=2x2")
REAL_HEADS += ("dspark:{dspark},nodes=9", "dflash:{dflash}", "medusa:{medusa},nodes=6")
REAL_HEADS += ("medusa:{medusa},tree=chain", "quantized:int4", "quantized:int4,nodes=6,width=3")
REAL_HEADS += ("hybrid:ngram+medusa:{medusa}+eagle3:{eagle3}+quantized:int8",)
TARGETS = ("scripted", "recurrent", "native", "reference")
_FOLDER = TemporaryDirectory()


@cache
def folders(kind: str) -> dict[str, str]:
    """Of a target, its drafts and its adapters."""
    root, real = Path(_FOLDER.name) / kind, kind in ("native", "reference")
    if kind == "recurrent":
        return folders("scripted")
    if kind == "reference":
        return folders("native")
    root.mkdir()
    pair = write_pair(root) if real else write_scripted(root)
    made = dict(zip(("target", "draft"), pair, strict=True))
    target = made["target"]
    made |= {
        "texts": write_texts(root, target, [LONG, LONG[:30]]),
        "eagle3": write_eagle(root, target, 3),
        "dspark": write_block(root, target, "dspark"),
    }
    if real:
        made |= {
            "eagle1": write_eagle(root, target, 1),
            "dflash": write_block(root, target, "dflash"),
            "medusa": write_medusa(root / "medusa", target),
            "one": write_adapter(root / "one", target, seed=1),
            "two": write_adapter(root / "two", target, seed=2, modules=("q_proj", "down_proj")),
        }
    return made


@cache
def plain(kind: str) -> LLM:
    """The target, decoding plainly."""
    made = folders(kind)
    if kind in ("scripted", "recurrent"):
        llm = scripted(made["target"], kind == "recurrent")
        llm.adapters._by_name |= {name: Adapter(name, "", {}) for name in ("one", "two")}
        return llm
    lora = {name: made[name] for name in ("one", "two")}
    options: dict[str, Any] = {"backend": kind, "dtype": "float32", "lora": lora}
    return LLM(made["target"], "none", max_batch_size=1, max_model_len=160, **options)


def params_of(asked: int, last: str) -> SamplingParams:
    """``last``: the name of an engine's last drafter."""
    params = {"ignore_eos": True} | ASKED[asked]
    return SamplingParams(**params | ({"drafter": last} if params.get("drafter") == LAST else {}))


@cache
def alone(kind: str, prompt: int, asked: int) -> list[Completion]:
    return plain(kind).generate(PROMPTS[prompt], params_of(asked, "none"))
