"""Every reader of a file on files damaged at random: it reads them or refuses them in one line, in
little memory and time.

FUZZ_SECONDS=600 FUZZ_SEED=2 python -m pytest tests/files/test_readers.py
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, PacelineError, SamplingParams
from paceline.build import EngineOptions
from paceline.draft.datastore import Store, write_datastore
from paceline.draft.heads.block_head import load_block
from paceline.draft.heads.eagle_head import load_eagle
from paceline.draft.heads.medusa_head import load_medusa
from paceline.draft.spec import TargetShape
from paceline.draft.suffix import SuffixDrafter
from paceline.drafters import parse_draft
from paceline.engine.recovery import Failure
from paceline.lab.bench.prompts import load_prompts
from paceline.lab.replay import replay
from paceline.model.gguf import read_gguf
from paceline.model.lora import read_adapter
from paceline.model.target import CausalModel
from paceline.model.tokenizer import load_tokenizer
from paceline.request.receipt import _hash, read_receipts
from paceline.settings.tuned import TunedSettings
from paceline.train.data import encode_stream
from support.made_adapters import write_adapter
from support.made_gguf import write_gguf
from support.medusa_models import write_medusa
from support.random_heads import write_block, write_eagle
from support.tiny_models import write_tiny_model
from support.written_kinds import tuned_settings

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0.5"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
LONGEST, MEMORY = 60, 1 << 30  # seconds and bytes that a file of a few kB may take
VOCAB = 50

Made = tuple[list[Path], Callable[[], Any]]  # files to damage, and what reads them


def gguf_header(root: Path) -> Made:
    pytest.importorskip("gguf")
    write_gguf(root / "model.gguf", "llama")
    return [root / "model.gguf"], lambda: read_gguf(root / "model.gguf")


def gguf_model(root: Path) -> Made:
    pytest.importorskip("gguf")
    write_gguf(root / "model.gguf", "llama", quantisation="Q8_0")
    return [root / "model.gguf"], lambda: CausalModel.load(str(root / "model.gguf"), "float32")


def checkpoint(root: Path) -> Made:
    folder = write_tiny_model(root / "model", layers=1)
    files = [folder / name for name in ("model.safetensors", "config.json")]
    return files, lambda: CausalModel.load(str(folder), "float32")


def tokenizer(root: Path) -> Made:
    folder = write_tiny_model(root / "model", layers=1)
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    return files, lambda: load_tokenizer(str(folder))


def heads(root: Path, write: Callable[[str], str], load: Callable[[str, Any], Any]) -> Made:
    target = write_tiny_model(root / "model", layers=8)
    folder = Path(write(str(target)))
    return sorted(folder.iterdir()), lambda: load(str(folder), TargetShape(32, 320, 8))


def eagle(root: Path) -> Made:
    return heads(root, lambda target: write_eagle(root, target, 3), load_eagle)


def medusa(root: Path) -> Made:
    return heads(root, lambda target: write_medusa(root / "m", target, steps=1), load_medusa)


def block(root: Path) -> Made:
    load = partial(load_block, kind="dspark")
    return heads(root, lambda target: write_block(root, target, "dspark"), load)


def adapter(root: Path) -> Made:
    target = write_tiny_model(root / "model", layers=1)
    folder = Path(write_adapter(root / "adapter", str(target)))
    model = CausalModel.load(str(target), "float32", backend="reference")
    return sorted(folder.iterdir()), lambda: read_adapter("a", str(folder), model)


def suffix_memory(root: Path) -> Made:
    drafter = SuffixDrafter("cpu", VOCAB)
    for start in range(9):
        drafter.remember([*range(start, 40)])
    drafter.save(root / "memory")
    return [root / "memory"], lambda: SuffixDrafter("cpu", VOCAB).load(root / "memory")


def datastore(root: Path) -> Made:
    words = {f"w{number}": number for number in range(VOCAB)}
    kind = type("Words", (), {"get_vocab": lambda _: words, "__len__": lambda _: VOCAB})
    file = root / "texts.datastore"
    write_datastore(file, [np.array([1, 2, 3, 4, 5, 6, 7, 8])] * 2, kind())  # type: ignore[arg-type]

    def read() -> None:
        store = Store(file, VOCAB)
        if positions := store.find([*range(9)], 5)[0]:
            store.continuations(positions, 3)

    return [file], read


def tuned(root: Path) -> Made:
    tuned_settings(root, 2)

    def read() -> None:
        made = TunedSettings.read(root / "p.toml")
        EngineOptions(**made.settings(True))
        parse_draft(made.draft.spec)
        made.costs.target_costs(2)

    return [root / "p.toml"], read


def receipt(root: Path) -> Made:
    file, llm = root / "receipt.json", LLM("paceline/tiny", "none", max_batch_size=1)
    params = SamplingParams(max_tokens=4, receipt=True, seed=1, temperature=0.5)
    file.write_text(json.dumps([llm.generate(["Once"], params)[0].receipt]), encoding="utf-8")

    def read() -> None:
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            (content,) = json.loads(file.read_bytes())  # one that somebody wrote, with a valid seal
            content.pop("seal")
            content |= {f"{name}_sha256": _hash(content[name]) for name in ("prompt", "tokens")}
            file.write_text(json.dumps([{**content, "seal": _hash(content)}]), encoding="utf-8")
        for record in read_receipts(file):
            replay(llm, record)

    return [file], read


_RECORDS = (
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]},
    {"turns": ["Hi", "And then?"], "category": "writing", "question_id": 1},
    {"text": "User: Hi\n\nAssistant: Yes.", "license": "MIT", "source": "a"},
    {"ids": [1, 2, 3, 4, 5], "prompt": 2, "job": 0, "turn": 1, "task": "a"},
)


def training_data(root: Path) -> Made:
    texts, packed = root / "data.jsonl", root / "data.jsonl.gz"
    texts.write_text("\n".join(map(json.dumps, _RECORDS)), encoding="utf-8")
    packed.write_bytes(gzip.compress(texts.read_bytes()))
    words = load_tokenizer("paceline/tiny")
    return [texts, packed], lambda: [encode_stream(file, words) for file in (texts, packed)]


def prompts(root: Path) -> Made:
    lines, plain = root / "prompts.jsonl", root / "prompts.txt"
    lines.write_text("\n".join(map(json.dumps, (_RECORDS[0], *_RECORDS[2:4]))), encoding="utf-8")
    plain.write_text("Once\n---\nThere was", encoding="utf-8")
    return [lines, plain], lambda: [load_prompts(file) for file in (lines, plain)]


READERS = (gguf_header, gguf_model, checkpoint, tokenizer, eagle, medusa, block)
READERS += (adapter, suffix_memory, datastore, tuned, receipt, training_data, prompts)


NUMBERS = [0, 1, 3, 127, 65537, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**64 - 1]
VALUES = [str(number).encode() for number in (*NUMBERS, -1, -5, 0.5, 10**30)]
VALUES += [b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b'"x"', b"[[1]]", b'{"a": 1}']
VALUES += [b"[" * 3000 + b"]" * 3000]
VALUE = re.compile(rb'"[^"\\\n]*"|-?\d[\d.eE+-]*|true|false|null')


def reworded(content: bytes, chooser: random.Random) -> bytes:
    """One value of a JSON, TOML or safetensors header is another."""
    named = re.match(rb".{7}\0(?=\{)", content, re.DOTALL)  # safetensors: the header's length
    start = 8 if named else 0
    end = start + int.from_bytes(content[:8], "little") if named else len(content)
    header = content[start:end]
    values = list(VALUE.finditer(header))
    if not values:
        return content
    value = chooser.choice(values[: chooser.choice((20, 100, len(values)))])
    other = chooser.choice((*VALUES, chooser.choice(values)[0], chooser.choice(values)[0]))
    header = header[: value.start()] + other + header[value.end() :]
    size = len(header).to_bytes(8, "little") if named else b""
    return size + header + content[end:]


def damaged(content: bytes, chooser: random.Random) -> bytes:
    """Cut, with bits flipped, with bytes written over, put in or taken out, or with another value
    or length; most at the start, where a file says what is in it."""
    size = chooser.choice((64, 512, 4096, len(content)))
    at = chooser.randrange(max(1, min(size, len(content))))
    noise = chooser.randbytes(chooser.choice((1, 2, 8, 40)))
    match chooser.randrange(8):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + noise + content[at + len(noise) :]
        case 2:
            return content[:at] + noise + content[at:]
        case 3:
            return content[:at] + content[at + len(noise) :]
        case 4 | 5:
            return reworded(content, chooser)
        case 6:
            number = chooser.choice(NUMBERS).to_bytes(8, "little")[: chooser.choice((4, 8))]
            return content[:at] + number + content[at + len(number) :]
        case _:
            changed = bytearray(content)
            for _ in range(chooser.choice((1, 1, 3))):
                changed[at] ^= 1 << chooser.randrange(8)
                at = chooser.randrange(max(1, min(size, len(content))))
            return bytes(changed)


@contextmanager
def limited() -> Iterator[None]:
    """No hang and no giant allocation passes for a reading."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {LONGEST} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, late)
    if sys.platform == "linux":
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, hard))
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))  # first: the rest may need memory
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_damage_is_read_or_refused_in_one_line(reader: Any, tmp_path: Path) -> None:
    files, read = reader(tmp_path)
    whole = {file: file.read_bytes() for file in files}
    read()
    chooser, end, tried = random.Random(SEED), time.monotonic() + SECONDS, 0
    done: Counter[str] = Counter()
    faults: dict[str, str] = {}  # the first by kind
    while time.monotonic() < end or tried < 5:
        file, tried = chooser.choice(files), tried + 1
        content = damaged(whole[file], chooser)
        file.write_bytes(content)
        try:
            with limited():
                read()
            done["read"] += 1
        except PacelineError as error:
            assert "\n" not in str(error), error
            done[type(error).__name__] += 1
        except Exception as error:
            kind, kept = str(Failure.of(error)), tmp_path / f"damaged-{len(faults)}"
            if len(faults) < 9 and faults.setdefault(kind, kept.name) == kept.name:
                kept.write_bytes(content)
                where = traceback.format_exc().splitlines()[-12:]
                print(f"damage {tried} of {file.name}, kept as {kept}: {kind}", *where, sep="\n")
        finally:
            file.write_bytes(whole[file])
    print(f"{reader.__name__}: {tried} damaged files: {dict(done)}")
    assert not faults
