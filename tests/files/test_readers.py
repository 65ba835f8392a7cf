"""Every reader of a file on files damaged at random: it reads them or refuses them in one line, in
little memory and time.

FUZZ_SECONDS=600 FUZZ_SEED=2 python -m pytest tests/files/test_readers.py
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline import PacelineError
from paceline.engine.recovery import Failure
from support.fuzzed_files import READERS

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0.5"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
LONGEST, MEMORY = 60, 1 << 30  # seconds and bytes that a file of a few kB may take
NUMBERS = [0, 1, 3, 127, 65537, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**64 - 1]
VALUES = [str(number).encode() for number in (*NUMBERS, -1, -5, 0.5, 10**30)]
VALUES += [b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b'"x"', b"[[1]]", b'{"a": 1}']
VALUES += [b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"9" * 5000]
VALUES += [b'"' + b"9" * 5000 + b'"', b"-Infinity", b'"\\ud800"', b'"\\u0000"', b'""', b"1.5e308"]
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
    if chooser.random() < 0.1:  # the same key again
        other += b", " + chooser.choice(values)[0] + b": " + chooser.choice(VALUES)
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
            return content[:at] if chooser.random() < 0.9 else b""
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


def put(file: Path, content: bytes | None, chooser: random.Random) -> None:
    """``content`` in place of a file; None: something that is no file."""
    remove(file)
    if content is not None:
        file.write_bytes(content)
    elif (kind := chooser.randrange(4)) == 0:
        file.mkdir()
    elif kind < 3:  # a link to itself or to nothing
        file.symlink_to(file.name if kind == 1 else "nowhere")


def remove(file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


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
    slowest = 0.0
    while time.monotonic() < end or tried < 5:
        file, tried = chooser.choice(files), tried + 1
        content = damaged(whole[file], chooser)
        put(file, content if chooser.random() < 0.98 else None, chooser)
        began = time.process_time()
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
            slowest = max(slowest, time.process_time() - began)
            for one in files:  # a reader may have written another
                put(one, whole[one], chooser)
    print(f"{reader.__name__}: {tried} damaged files: {dict(done)}; at most {slowest:.1f} s")
    assert not faults
