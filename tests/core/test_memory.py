"""What a process holds: pages of mapped files that are counted elsewhere are left out."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from paceline.core import memory
from paceline.core.memory import free_memory, held_memory

_SIZE = 64 << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")
@pytest.mark.parametrize("counted", [False, True])
def test_mapped_files_are_held_unless_left_out(tmp_path: Path, counted: bool) -> None:
    """The doctor's peak had what its own look at a checkpoint had mapped, twice."""
    file = tmp_path / "my model.safetensors"
    file.write_bytes(bytes(_SIZE))
    before = held_memory()
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert not any(pages[:: mmap.PAGESIZE])  # touches all
        after = held_memory([] if counted else [str(file.resolve())])
    assert before is not None and after is not None
    assert (after - before > 0.9 * _SIZE) is counted


def test_where_free_memory_is_not_told_it_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has neither /proc nor SC_AVPHYS_PAGES: a ValueError ended every start there."""
    names = {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 2}
    monkeypatch.setattr(memory, "words_of", lambda file: [])
    monkeypatch.setattr(memory.os, "sysconf_names", names)
    monkeypatch.setattr(memory.os, "sysconf", lambda name: 10 * names[name])
    assert free_memory(torch.device("cpu")) == 200


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")
def test_own_memory_is_held() -> None:
    before = held_memory()
    with mmap.mmap(-1, _SIZE) as pages:  # fresh ones; the heap may have freed ones left
        pages.write(b"1" * _SIZE)
        after = held_memory()
    assert before is not None and after is not None
    assert after - before > 0.9 * _SIZE
