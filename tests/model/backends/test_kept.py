"""Quantised forms in the cache folder: found again, checked, bounded, never in the way."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from paceline.core.stages import stage
from paceline.errors import ConfigError
from paceline.kernels.compile import NativeUnavailableError
from paceline.kernels.library import library
from paceline.model.backends.native import copies
from paceline.model.backends.native.packing import PackedLinear, PackedMatrix
from paceline.model.copies import quantised_copy
from paceline.model.quantised.rounding import round_to_nearest
from paceline.model.quantised.weights import QuantisedLinear
from paceline.model.target import CausalModel
from support.heard_stages import heard
from support.tiny_models import write_tiny_model

try:
    library()
except NativeUnavailableError as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The kernels stay where they are built.
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantised"


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Matrices that were rounded, by their bits."""
    matrices: list[int] = []

    def noted(weight: torch.Tensor, bits: int, *how: Any) -> Any:
        matrices.append(bits)
        return round_to_nearest(weight, bits, *how)

    monkeypatch.setattr(copies, "round_to_nearest", noted)
    return matrices


@pytest.fixture
def said() -> Iterator[list[str]]:
    with heard() as listener, stage("a test"):
        yield listener.lines


def packed_of(folder: Path, precision: str = "int4") -> dict[str, torch.Tensor]:
    """The packed matrices of a fresh load's form in fewer bits."""
    model = CausalModel.load(str(folder), "bfloat16", "cpu")
    modules = quantised_copy(model, precision).hf.named_modules()
    return {name: m.packed.data for name, m in modules if isinstance(m, PackedLinear)}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_the_next_load_rounds_nothing(folder: Path, rounded: list[int]) -> None:
    first = packed_of(folder)
    assert rounded.count(4) == 14 and rounded.count(8) == 1  # the head
    rounded.clear()
    assert equal(packed_of(folder), first) and not rounded
    eight = packed_of(folder, "int8")
    assert rounded.count(8) == 15 and not equal(eight, first)


def test_gate_up_and_head_of_a_copy_have_activations_of_8_bits(rounded: list[int]) -> None:
    """Made, and read again."""
    for again in (False, True):
        modules = quantised_copy(CausalModel.load("paceline/tiny"), "int8").hf.named_modules()
        packed = {name: m.packed.form for name, m in modules if isinstance(m, PackedLinear)}
        int16 = {
            name.rpartition(".")[2]
            for name, form in packed.items()
            if form and form.int16_activations
        }
        assert "lm_head" in packed
        assert int16 == {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}
        assert bool(rounded) != again
        rounded.clear()


def test_another_content_at_the_same_place_is_another_form(
    folder: Path, rounded: list[int], tmp_path: Path
) -> None:
    """Also where size and modification time are those of before."""
    first, file = packed_of(folder), folder / "model.safetensors"
    other = write_tiny_model(tmp_path / "other")
    weights = load_file(file)
    weights["model.layers.0.mlp.up_proj.weight"][-1, -1] *= -1
    content = save(weights, {"format": "pt"})
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=times)
    rounded.clear()
    assert not equal(packed_of(folder), first) and rounded
    rounded.clear()
    assert equal(packed_of(other), first) and not rounded, "the same content elsewhere"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-100],
        lambda content: content.replace(b"bits", b"bats", 1),
        lambda content: content.replace(b"""scale\\": 1""", b"""scale\\": 9""", 1),
        lambda content: content.replace(b'"forms"', b'"farms"', 1),
    ],
)
def test_what_is_damaged_is_made_anew(
    folder: Path,
    cache: Path,
    rounded: list[int],
    said: list[str],
    damage: Callable[[bytes], bytes],
) -> None:
    first = packed_of(folder)
    (file,) = cache.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    rounded.clear()
    assert equal(packed_of(folder), first) and rounded
    assert [str(file) in line and "damaged" in line for line in said] == [True]
    assert file.read_bytes() == whole
    rounded.clear()
    assert equal(packed_of(folder), first) and not rounded


def test_nothing_is_kept_where_nothing_is_to_be(
    folder: Path, cache: Path, rounded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(copies.SETTING, copies.OFF)
    packed_of(folder)
    packed_of(folder)
    assert len(rounded) == 30 and not cache.exists()
    monkeypatch.setenv(copies.SETTING, "lots")
    with pytest.raises(ConfigError, match="'lots' is not a size"):
        packed_of(folder)


def test_a_full_disk_is_one_line(
    folder: Path, cache: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = packed_of(folder)
    shutil.rmtree(cache)
    monkeypatch.setattr(copies, "atomic_write", full)
    assert equal(packed_of(folder), first) and not list(cache.glob("*"))
    assert len(said) == 1 and "No space left" in said[0]


def test_a_folder_that_cannot_be_made_is_one_line(
    folder: Path, cache: Path, said: list[str]
) -> None:
    """The form is made in memory, at each start, and nobody knew why that took so long."""
    cache.parent.mkdir()
    cache.write_text("a file")
    assert len(packed_of(folder)) == 15 and cache.read_text() == "a file"
    assert len(said) == 1 and f"{cache}' (PACELINE_CACHE=FOLDER names" in said[0]


def test_forms_that_were_not_used_for_longest_go_first(
    folder: Path, cache: Path, rounded: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packed_of(folder)
    (four,) = cache.glob("*.safetensors")
    packed_of(folder, "int8")
    (eight,) = set(cache.glob("*.safetensors")) - {four}
    earlier = cache / "of_an_earlier_version.forms"
    earlier.touch()
    for file, seconds in ((four, 1000), (earlier, 1500), (eight, 2000)):
        os.utime(file, (seconds, seconds))
    packed_of(folder)  # used again
    assert four.stat().st_mtime > 2000
    other = write_tiny_model(tmp_path / "other", seed=1)
    monkeypatch.setenv(copies.SETTING, str(four.stat().st_size * 2 + 100))
    packed_of(other)
    assert four.exists() and not eight.exists()
    assert len(list(cache.iterdir())) == 2


def test_the_folder_never_takes_more_than_the_limit(
    folder: Path, cache: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that does not fit is not kept, and costs none of the others."""
    packed_of(folder)
    (four,) = cache.glob("*.safetensors")
    monkeypatch.setenv(copies.SETTING, "1K")
    packed_of(folder, "int8")
    assert list(cache.iterdir()) == [four]
    assert len(said) == 1 and f"not kept: it is larger than {copies.SETTING}" in said[0]


def test_a_copy_in_the_folder_of_another_user_is_read(
    folder: Path, rounded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    packed_of(folder)
    rounded.clear()
    monkeypatch.setattr(os, "utime", refused)
    packed_of(folder)
    assert not rounded


def test_two_at_once_never_see_half_a_form(cache: Path) -> None:
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    linear = QuantisedLinear(round_to_nearest(weight, 4, 32, "free"), None)
    made = PackedMatrix.pack([linear], torch.bfloat16)
    cache.mkdir(parents=True)

    matrix = SimpleNamespace(
        empty=lambda form: PackedMatrix.empty([linear], torch.bfloat16, False, form)
    )
    file = cache / "k.safetensors"
    writers = [
        threading.Thread(target=lambda: [copies.write(file, [made]) for _ in range(20)])
        for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        stored = copies.read(file, [matrix])  # type: ignore[list-item]
        if stored is not None:
            seen += 1
            assert torch.equal(stored[0].data, made.data)
    assert seen and [file.name for file in cache.iterdir()] == ["k.safetensors"]


def test_numbers_and_layout_are_those_of_this_version() -> None:
    """Where this changes, forms that lie in users' folders are others: raise the number in
    ``copies._VERSION``, and note the new digests here."""
    weight = (torch.arange(64 * 128) * 7919 % 1009 / 1009 - 0.4).reshape(64, 128)
    digests = []
    for bits, group, zero in ((4, 32, "free"), (8, 64, "none")):
        made = round_to_nearest(weight, bits, group, zero)  # type: ignore[arg-type]
        packed = PackedMatrix.pack([QuantisedLinear(made, None)], torch.bfloat16)
        digests.append(hashlib.sha256(packed.data.numpy().data).hexdigest()[:16])
    assert copies._VERSION == 8
    assert digests == ["6c95fe762b97b829", "0c566f75e74d4f24"]
