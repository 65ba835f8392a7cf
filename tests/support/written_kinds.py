"""Every kind of file that Paceline writes, and how it comes about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from paceline.draft.heads.block_head import BlockConfig, BlockHead, save_block
from paceline.draft.heads.eagle_head import EagleConfig, EagleHead, save_eagle
from paceline.draft.heads.medusa_head import MedusaConfig, MedusaHeads, save_medusa
from paceline.lab.report.document import Report, Text
from paceline.lab.report.render import write
from paceline.settings import tuned
from paceline.settings.tuned import ModelIdentity, TunedSettings
from paceline.train.acceptance import load_held_out_texts
from paceline.train.configs import DraftConfig
from paceline.train.data import Windows, store_cached
from paceline.train.reading import FeatureCache, TargetOutputs
from paceline.train.trainer import write_card

Write = Callable[[Path, int], Any]  # writes another content for every number


@dataclass(frozen=True)
class Kind:
    """One kind of file: how it is written, and a size that it does not fit into."""

    write: Write
    limit: int = 64


def report(folder: Path, number: int, name: str) -> None:
    made = Report(f"Speed {number}")
    made.add("Part", Text("x" * 100))
    write(made, folder / name)


def eagle(folder: Path, number: int) -> None:
    torch.manual_seed(number)
    sizes = {"hidden_size": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn_size": 8}
    config = EagleConfig(
        version=1,
        vocab_size=20,
        target_hidden_size=8,
        target_layers=2,
        feature_layers=(2,),
        draft_vocab_size=20,
        max_positions=64 + number,
        **sizes,
    )
    save_eagle(EagleHead(config, None), folder)


def block(folder: Path, number: int) -> None:
    torch.manual_seed(number)
    sizes = {"hidden_size": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn_size": 8}
    target = {"vocab_size": 20, "target_layers": 2, "feature_layers": (2,), "mask_token": 0}
    config = BlockConfig(**sizes, **target, layers=1, block_size=4, max_positions=64 + number)
    save_block(BlockHead(config), folder)


def medusa(folder: Path, number: int) -> None:
    torch.manual_seed(number)
    save_medusa(MedusaHeads(MedusaConfig(hidden_size=8, vocab_size=20, heads=1 + number)), folder)


def features(folder: Path, number: int) -> None:
    def run_target(ids: torch.Tensor, loss_mask: torch.Tensor, _: object) -> TargetOutputs:
        final = torch.full((1, 3, 4), float(number))
        return TargetOutputs(ids, loss_mask, final, final, None)

    ids = torch.full((1, 3), number)
    windows = Windows(ids, ids > 0, (3,))
    FeatureCache(folder / "f", run_target, torch.device("cpu"), 4).get(windows)


def held_out(folder: Path, number: int) -> None:
    class Target:
        device = torch.device("cpu")

    config = DraftConfig(data=("x",), held_out=number + 1, held_out_tokens=9)
    file = folder / "held_out.json"
    load_held_out_texts(cast(Any, Target()), cast(Any, None), [], config, file)


def tuned_settings(folder: Path, number: int) -> None:
    made = TunedSettings(
        tuned.VERSION,
        ModelIdentity("m", "x"),
        tuned.DraftChoice("ngram", "auto"),
        tuned.EngineChoice(number),
    )
    made.write(folder / "p.toml")


def token_stream(folder: Path, number: int) -> None:
    tensors = {"ids": torch.full((99,), number, dtype=torch.uint16)}
    store_cached(folder / "tokens" / "t.safetensors", "the stream", tensors)


def card(folder: Path, number: int) -> None:
    sizes = {"batch_tokens": 8, "held_out": 1, "held_out_tokens": 8}
    config = SimpleNamespace(exclude_licenses=(), **sizes)
    run: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template=None),
        config=config,
        folder=folder,
        sources=[],
        history=[],
    )
    run.step, run.describe = number, lambda: "x" * 99
    write_card(run, "train it")


KINDS = {
    "tuned settings": Kind(tuned_settings),
    "html report": Kind(lambda folder, number: report(folder, number, "r.html")),
    "markdown report": Kind(lambda folder, number: report(folder, number, "r.md")),
    "eagle head": Kind(eagle),
    "block drafter": Kind(block),
    "medusa heads": Kind(medusa),
    "cached features": Kind(features),
    "held-out texts": Kind(held_out, limit=10),
    "card": Kind(card),
    "token stream": Kind(token_stream),
}
