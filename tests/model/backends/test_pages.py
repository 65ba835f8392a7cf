"""Memory of packed weights: slabs of huge pages that matrices share."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import torch

from paceline.kernels import pages
from paceline.kernels.pages import zeros


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_last", None)


@pytest.mark.parametrize("size", [0, 1, 64, 1000, 3 << 20, 40 << 20])
def test_zeros_as_torch_has_them(size: int) -> None:
    made = zeros(size)
    assert made.dtype == torch.uint8 and made.shape == (size,)
    assert not made.any()
    assert size == 0 or made.data_ptr() % 64 == 0


def test_matrices_of_a_slab_do_not_overlap() -> None:
    parts = [zeros(size) for size in (100, 7, 64, 1 << 20)]
    for number, part in enumerate(parts, 1):
        part.fill_(number)
    assert (
        [int(part.min()) for part in parts] == [int(part.max()) for part in parts] == [1, 2, 3, 4]
    )
    if pages._ADVICE is not None:
        assert parts[1].data_ptr() - parts[0].data_ptr() == 128
        assert parts[0].data_ptr() % pages._HUGE == 0


def test_threads_get_memory_of_their_own() -> None:
    made: list[torch.Tensor] = []

    def take() -> None:
        made.extend(zeros(4096) for _ in range(200))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = sorted(part.data_ptr() for part in made)
    assert all(b - a >= 4096 for a, b in itertools.pairwise(places))


@pytest.mark.skipif(pages._ADVICE is None, reason="no huge pages on this system")
def test_a_slab_goes_with_the_last_matrix_in_it() -> None:
    first, second = zeros(100), zeros(100)
    assert pages._last is not None
    slab: weakref.ref[object] = pages._last.memory
    del first
    gc.collect()
    assert slab() is not None
    assert not second.any()
    del second
    gc.collect()
    assert slab() is None
    assert not zeros(100).any()  # of a new one


@pytest.mark.skipif(pages._ADVICE is None, reason="no huge pages on this system")
def test_what_is_larger_than_the_rest_of_a_slab_gets_a_new_one() -> None:
    small = zeros(100)
    large = zeros(pages._SLAB - 100)
    assert not large.any()
    assert abs(large.data_ptr() - small.data_ptr()) > 100


@pytest.mark.skipif(pages._ADVICE is None, reason="no huge pages on this system")
def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_ADVICE", -1)  # which no kernel knows
    assert zeros(100).shape == (100,)
