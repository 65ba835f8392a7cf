"""Limits of containers and services: memory, processors, and threads that follow them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core import memory

GIB = 1 << 30


class Groups:
    def __init__(self, root: Path) -> None:
        self.root, self.mine = root / "cgroup", root / "self"

    def write(self, folder: str, **files: str) -> None:
        place = self.root / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    made = Groups(tmp_path)
    monkeypatch.setattr(memory, "CGROUPS", made.root)
    monkeypatch.setattr(memory, "_SELF", made.mine)
    return made


def test_page_cache_counts_as_free(groups: Groups) -> None:
    """8 GiB limit, 4 GiB of weights, nearly 4 GiB of page cache: the file that they came from."""
    groups.mine.write_text("0::/\n")
    used, cached = 8 * GIB - (20 << 20), 4 * GIB - (20 << 20)
    groups.write("", memory__max=str(8 * GIB), memory__current=str(used))
    groups.write("", memory__stat=f"anon {4 * GIB}\nactive_file 7\ninactive_file {cached}")
    assert memory.memory_left() == 4 * GIB
    assert memory.free_memory(torch.device("cpu")) <= 4 * GIB


def test_the_nearest_limit_of_a_nested_group(groups: Groups) -> None:
    groups.mine.write_text("0::/system.slice/paceline.service\n")
    groups.write("system.slice", memory__max=str(2 * GIB), memory__current=str(GIB))
    groups.write("system.slice/paceline.service", memory__max="max", memory__current="5")
    assert memory.memory_left() == GIB


def test_version_1(groups: Groups) -> None:
    groups.mine.write_text("5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n")
    files = {"memory__limit_in_bytes": str(3 * GIB), "memory__usage_in_bytes": str(2 * GIB)}
    # In a container the mount is the group itself.
    groups.write("memory", **files, memory__stat=f"total_inactive_file {GIB}")
    groups.write("cpu", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    assert memory.memory_left() == 2 * GIB
    assert memory.processors() == 1
    groups.write("memory", memory__limit_in_bytes="9223372036854771712")
    groups.write("cpu", cpu__cfs_quota_us="-1")
    assert memory.memory_left() is None


@pytest.mark.parametrize(("quota", "count"), [("100000 100000", 1), ("150000 100000", 2)])
def test_processors_follow_the_quota(
    groups: Groups, quota: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    groups.mine.write_text("0::/\n")
    groups.write("", cpu__max=quota)
    assert memory.processors() == count
    groups.write("", cpu__max="max 100000")
    assert memory.processors() == 64


def test_no_groups_at_all(groups: Groups) -> None:
    assert memory.memory_left() is None and memory.processors() >= 1


@pytest.mark.parametrize(("chosen", "threads"), [(None, 2), ("5", 5)])
def test_threads_follow_the_quota(
    chosen: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--cpus=2 on 64 cores; unless OMP_NUM_THREADS says otherwise."""
    before, now = torch.get_num_threads(), [5]
    monkeypatch.setattr(memory, "processors", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    memory.limit_threads.cache_clear()
    memory.limit_threads()
    memory.limit_threads.cache_clear()
    assert now == [threads] and before
