"""Folders to plant faults in: copies of the embedded models, small and trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.lab.doctor import Finding, machine
from paceline.model.names import resolve


@dataclass(frozen=True)
class Folder:
    """A copy of a model's folder, to be broken."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def config(self, **options: Any) -> Folder:
        """Change options of config.json; None removes one."""
        return self.json("config.json", **options)

    def json(self, name: str, **options: Any) -> Folder:
        file = self.path / name
        said = json.loads(file.read_text()) | options
        file.write_text(json.dumps({k: v for k, v in said.items() if v is not None}))
        return self

    @property
    def weights(self) -> Path:
        return next(self.path.glob("*.safetensors"))

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> Folder:
        """Change the tensors in place."""
        tensors = load_file(self.weights)
        change(tensors)
        save_file(tensors, self.weights, metadata={"format": "pt"})
        return self

    def tokenizer(self, change: Callable[[Any], object]) -> Folder:
        file = self.path / "tokenizer.json"
        said = json.loads(file.read_text())
        change(said)
        file.write_text(json.dumps(said))
        return self


Copy = Callable[..., Folder]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """``copy("tiny-draft")``, ``copy("tiny-draft", "other")``: a built-in under a name."""

    def make(name: str, called: str | None = None) -> Folder:
        path = tmp_path / (called or name)
        shutil.copytree(resolve(f"paceline/{name}"), path)
        return Folder(path)

    return make


@pytest.fixture(autouse=True)
def bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests run on a processor with bf16 instructions, unless they say otherwise."""
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr("paceline.model.loading.cpu_has_bf16", lambda: True)


def codes(findings: list[Finding], *about: str) -> set[str]:
    """Codes of what is not in order, of all or of some subjects."""
    return {
        f.code for f in findings if f.severity.value != "ok" and (not about or f.about in about)
    }


def only(findings: list[Finding], code: str) -> Finding:
    (found,) = [item for item in findings if item.code == code]
    return found
