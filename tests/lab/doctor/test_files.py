"""Headers of safetensors files, and models that are on the hub only."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from paceline.errors import ModelLoadError
from paceline.lab.doctor import examine
from paceline.lab.doctor.files import read_files, read_header
from support.doctor_folders import Copy, codes, only


def test_values_are_read_where_they_lie(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(12, dtype=torch.float32).view(3, 4),
        "b": torch.tensor([True, False, True]),
        "c": torch.arange(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    table = read_header(tmp_path / "x.safetensors")
    assert set(table) == set(tensors)
    for name, tensor in tensors.items():
        values = table[name].read()
        assert values is not None
        assert torch.equal(values.view(tensor.shape), tensor)
        assert table[name].stand_in().is_meta
    part = table["a"].read(5, 3)
    assert part is not None and part.tolist() == [5.0, 6.0, 7.0]


@pytest.mark.parametrize("content", [b"", b"\x05", (9).to_bytes(8, "little") + b"not json!"])
def test_files_without_a_table(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match="table of tensors"):
        read_header(tmp_path / "x.safetensors")


def on_the_hub(
    monkeypatch: pytest.MonkeyPatch, folder: Path, local: bool, headers: dict[str, Any] | None
) -> list[Any]:
    """A hub whose one model lies in ``folder``; returns the patterns that were asked for."""
    asked: list[Any] = []

    def snapshot(name: str, local_files_only: bool = False, allow_patterns: Any = None) -> str:
        if local_files_only and not local:
            raise LocalEntryNotFoundError("not here")
        asked.append(allow_patterns)
        return str(folder)

    def metadata(name: str) -> Any:
        if headers is None:
            raise LocalEntryNotFoundError("offline")
        return SimpleNamespace(
            files_metadata={"model.safetensors": SimpleNamespace(tensors=headers)}
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)
    return asked


def headers_of(folder: Path) -> dict[str, Any]:
    return {
        name: SimpleNamespace(
            dtype=entry.dtype, shape=list(entry.shape), data_offsets=(0, entry.length)
        )
        for name, entry in read_files(str(folder)).tensors.items()
    }


def test_a_hub_model_that_is_not_downloaded(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("tiny-draft")
    headers = headers_of(folder.path)
    folder.weights.unlink()
    asked = on_the_hub(monkeypatch, folder.path, False, headers)
    findings = examine("someone/draft")
    assert "*.safetensors" not in asked[0] and "*.json" in asked[0]
    assert codes(findings, "target") == {"weights-remote"}
    assert "all 20 tensors" in only(findings, "weights-complete").found
    headers.pop("model.norm.weight")
    assert "model.norm.weight" in only(examine("someone/draft"), "tensors-missing").found
    on_the_hub(monkeypatch, folder.path, False, None)
    assert codes(examine("someone/draft"), "target") == {"weights-remote"}


def test_a_hub_model_that_is_downloaded(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("tiny-draft")
    asked = on_the_hub(monkeypatch, folder.path, True, None)
    assert codes(examine("someone/draft"), "target") == set()
    assert asked == [None]
