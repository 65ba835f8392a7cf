"""Every reader of a file on files damaged at random: it reads them or refuses them in one line.

FUZZ_SECONDS=600 python -m pytest tests/files/test_readers.py
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import PacelineError
from paceline.draft.datastore import Store, write_datastore
from paceline.draft.heads.eagle_head import load_eagle
from paceline.draft.spec import TargetShape
from paceline.model.gguf import read_gguf
from paceline.model.loading import load_module
from paceline.model.tokenizer import load_tokenizer
from paceline.settings.tuned import TunedProfile
from support.made_gguf import write_gguf
from support.random_heads import write_eagle
from support.tiny_models import write_tiny_model

SECONDS = float(os.environ.get("FUZZ_SECONDS", "1.5"))
VOCAB = 50
PROFILE = """version = 1
[draft]
spec = "ngram"
[engine]
max_batch_size = 2
"""

Made = tuple[list[Path], Callable[[], Any]]  # files to damage, and what reads them


def gguf_header(root: Path) -> Made:
    write_gguf(root / "model.gguf", "llama")
    return [root / "model.gguf"], lambda: read_gguf(root / "model.gguf")


def gguf_model(root: Path) -> Made:
    write_gguf(root / "model.gguf", "llama", quantisation="Q8_0")
    return [root / "model.gguf"], lambda: load_module(str(root / "model.gguf"), "float32", "cpu")


def checkpoint(root: Path) -> Made:
    folder = write_tiny_model(root / "model", layers=1)
    files = [folder / name for name in ("model.safetensors", "config.json")]
    return files, lambda: load_module(str(folder), "float32", "cpu")


def tokenizer(root: Path) -> Made:
    folder = write_tiny_model(root / "model", layers=1)
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    return files, lambda: load_tokenizer(str(folder))


def head(root: Path) -> Made:
    target = write_tiny_model(root / "model", layers=8)
    folder = Path(write_eagle(root, str(target), 3))
    shape = TargetShape(32, 320, 8)
    files = [folder / name for name in ("model.safetensors", "config.json")]
    return files, lambda: load_eagle(str(folder), shape)


def datastore(root: Path) -> Made:
    words = {f"w{number}": number for number in range(VOCAB)}
    kind = type("Words", (), {"get_vocab": lambda _: words, "__len__": lambda _: VOCAB})
    file = root / "texts.datastore"
    write_datastore(file, [np.array([1, 2, 3, 4, 5, 6, 7, 8])] * 2, kind())  # type: ignore[arg-type]
    return [file], lambda: Store(file, VOCAB)


def tuned(root: Path) -> Made:
    (root / "paceline.toml").write_text(PROFILE)
    return [root / "paceline.toml"], lambda: TunedProfile.read(root / "paceline.toml")


READERS = (gguf_header, gguf_model, checkpoint, tokenizer, head, datastore, tuned)


def damaged(content: bytes, chooser: random.Random) -> bytes:
    """Cut, with bits flipped, or with bytes written over, put in or taken out; most at the start,
    where a file says what is in it."""
    size = chooser.choice((64, 512, 4096, len(content)))
    at = chooser.randrange(max(1, min(size, len(content))))
    noise = chooser.randbytes(chooser.choice((1, 2, 8, 40)))
    match chooser.randrange(5):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + noise + content[at + len(noise) :]
        case 2:
            return content[:at] + noise + content[at:]
        case 3:
            return content[:at] + content[at + len(noise) :]
        case _:
            changed = bytearray(content)
            for _ in range(chooser.choice((1, 1, 3))):
                changed[at] ^= 1 << chooser.randrange(8)
                at = chooser.randrange(max(1, min(size, len(content))))
            return bytes(changed)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_damage_is_read_or_refused_in_one_line(reader: Any, tmp_path: Path) -> None:
    files, read = reader(tmp_path)
    whole = {file: file.read_bytes() for file in files}
    chooser, end, tried = random.Random(1), time.monotonic() + SECONDS, 0
    while time.monotonic() < end or tried < 5:
        file, tried = chooser.choice(files), tried + 1
        content = damaged(whole[file], chooser)
        file.write_bytes(content)
        try:
            read()
        except PacelineError as error:
            assert "\n" not in str(error), error
        except Exception as error:
            kept = tmp_path / "damaged"
            kept.write_bytes(content)
            pytest.fail(f"damage {tried} of {file.name} (kept as {kept}): {error!r}")
        finally:
            file.write_bytes(whole[file])
