"""Damaged files, and models that are on the hub only."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from paceline.lab.doctor import check_layers, examine
from paceline.lab.doctor.models import read_files
from paceline.model.tensorfile import read_table
from support.doctor_folders import Copy, codes, only


@pytest.mark.parametrize("content", [b"", b"\x05", (9).to_bytes(8, "little") + b"not json!"])
def test_files_without_a_table(copy: Copy, content: bytes) -> None:
    folder = copy("tiny-draft")
    folder.weights.write_bytes(content)
    files = read_files(str(folder))
    assert not files.tensors and "is damaged" in files.damaged[0]


def on_the_hub(
    monkeypatch: pytest.MonkeyPatch, folder: Path, local: bool, headers: dict[str, Any] | None
) -> list[Any]:
    """A hub whose only model is in ``folder``; returns the requested file patterns."""
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
            dtype=entry.dtype, shape=list(entry.shape), data_offsets=(0, entry.nbytes)
        )
        for name, entry in read_table(folder / "model.safetensors").items()
    }


def test_a_hub_model_that_is_not_downloaded(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("tiny-draft")
    headers = headers_of(folder.path)
    folder.weights.unlink()
    asked = on_the_hub(monkeypatch, folder.path, False, headers)
    findings = examine("someone/draft")
    assert "*.safetensors" not in asked[0] and "*.json" in asked[0]
    assert codes(findings, "target") == {"weights-remote"}
    assert "all 20 tensors" in only(findings, "weights-complete").text
    headers.pop("model.norm.weight")
    assert "model.norm.weight" in only(examine("someone/draft"), "tensors-refused").text
    on_the_hub(monkeypatch, folder.path, False, None)
    assert codes(examine("someone/draft"), "target") == {"weights-remote"}


@pytest.mark.parametrize("target", ["someone/tiny", "paceline/tiny"])
def test_nothing_is_downloaded_to_measure_layers(
    target: str, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = copy("tiny" if target == "someone/tiny" else "tiny-eagle3")
    headers = headers_of(remote.path)
    remote.weights.unlink()
    on_the_hub(monkeypatch, remote.path, False, headers)
    head = "paceline/tiny-eagle3" if target == "someone/tiny" else "someone/head"
    assert check_layers(target, f"eagle3:{head}") == []


def test_a_hub_model_that_is_downloaded(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("tiny-draft")
    asked = on_the_hub(monkeypatch, folder.path, True, None)
    assert codes(examine("someone/draft"), "target") == set()
    assert asked == [None]
