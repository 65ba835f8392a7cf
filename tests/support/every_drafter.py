"""A draft spec for every kind of drafter, and for what else its trees may be."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from paceline.draft.datastore import write_datastore
from paceline.draft.heads.checkpoint import FILES, read_checkpoint, write_checkpoint
from paceline.drafters import DRAFTERS
from paceline.model.loading import read_config
from paceline.model.names import resolve
from paceline.model.tokenizer import load_tokenizer
from support.mtp_models import write_mtp

TARGET = "paceline/tiny"
_FOLDER = TemporaryDirectory()  # lives as long as this process
_STORIES = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.",
    "One day, the little boy went to the park with his mom. He saw a big dog.",
    "The quick brown fox jumped over the lazy dog and went to the park to play.",
)


def write_texts(folder: Path, model: str, texts: list[list[int]]) -> str:
    """A datastore of token ids."""
    file = folder / "texts.datastore"
    write_datastore(file, [np.array(text) for text in texts], load_tokenizer(model))
    return str(file)


def _datastore() -> str:
    """What the embedded target's stories are like, twice."""
    tokenizer = load_tokenizer(TARGET)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in _STORIES]
    return write_texts(Path(_FOLDER.name), TARGET, ids * 2)


def _in_one_pass() -> str:
    """The embedded draft model as one that drafts in one pass, which it has not learnt."""
    folder = Path(_FOLDER.name) / "one-pass"
    folder.mkdir()
    for file in Path(resolve(f"{TARGET}-draft")).iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text()) | {"pard_token": 0}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _head_in_one_pass() -> str:
    """The embedded EAGLE-3 head as one of P-EAGLE, which it has not learnt."""
    read = read_checkpoint(f"{TARGET}-eagle3", FILES, "head")
    tensors = read.tensors | {"mask_hidden": torch.ones(1, read.tensors["fc.weight"].shape[1])}
    folder = Path(_FOLDER.name) / "head-one-pass"
    write_checkpoint(folder, FILES[0], tensors, read.config | {"ptd_token_id": 0})
    return str(folder)


WEIGHTS = {"target": TARGET} | {
    record.weights: f"{TARGET}-{record.weights}" for record in DRAFTERS.values()
}
WEIGHTS["datastore"] = _datastore()
WEIGHTS["mtp"] = write_mtp(Path(_FOLDER.name) / "mtp", read_config(TARGET, resolve(TARGET)))
SPECS = {kind: record.examples[0].format(**WEIGHTS) for kind, record in DRAFTERS.items()} | {
    "model, one pass": f"model:{_in_one_pass()}",
    "eagle3, one pass": f"eagle3:{_head_in_one_pass()},nodes=8,width=3",
    "tree, dynamic": "tree:paceline/tiny-draft,nodes=6",
    "layer_skip, dynamic": "layer_skip:nodes=6",
}
