"""Dtypes that make verification dear, and memory that does not suffice."""

from __future__ import annotations

import pytest
import torch

from paceline.build import EngineOptions
from paceline.lab.doctor import Severity, examine, machine
from paceline.lab.doctor.machine import (
    Needs,
    Setting,
    check_memory,
    free_memory,
    size,
)
from support.doctor_folders import codes, only

TARGET = "paceline/tiny"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "has_bf16", "kernels", "code"),
    [
        ("bfloat16", True, False, None),
        ("auto", True, False, None),
        ("float32", True, True, "verify-float32"),
        ("auto", False, False, "verify-float32"),
        ("auto", False, True, None),
        ("bfloat16", False, False, "bfloat16-emulated"),
        ("bfloat16", False, True, None),
        ("float16", True, True, "float16-on-cpu"),
    ],
)
def test_dtypes(
    monkeypatch: pytest.MonkeyPatch, dtype: str, has_bf16: bool, kernels: bool, code: str | None
) -> None:
    for module in ("paceline.lab.doctor.machine", "paceline.model.loading"):
        monkeypatch.setattr(f"{module}.cpu_has_bf16", lambda: has_bf16)
        monkeypatch.setattr(f"{module}.are_kernels_here", lambda: kernels)
    findings = examine(TARGET, dtype=dtype, device="cpu")
    assert codes(findings, "machine") == ({code} if code else set())
    if code:
        assert only(findings, code).severity is Severity.WARNING


def memory(monkeypatch: pytest.MonkeyPatch, free: int, given: int | None = None) -> tuple[str, str]:
    """100 MiB of weights, 1 KiB of cache per token, 8 sequences of 1,024 tokens."""
    monkeypatch.setattr(machine, "free_memory", lambda device: free)
    setting = Setting(EngineOptions(kv_cache_memory=given), CPU, torch.bfloat16)
    finding = check_memory(setting, Needs(100 << 20, 1 << 10), 1024)
    return finding.code, finding.severity.value


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    assert memory(monkeypatch, 99 * mib) == ("memory-short", "error")
    assert memory(monkeypatch, 100 * mib + 1000) == ("cache-short", "error")
    assert memory(monkeypatch, 103 * mib) == ("cache-short", "warning")
    assert memory(monkeypatch, 120 * mib) == ("cache-partial", "note")
    assert memory(monkeypatch, 200 * mib) == ("memory-fits", "ok")
    assert memory(monkeypatch, 200 * mib, 2 * mib) == ("cache-partial", "note")
    assert memory(monkeypatch, 200 * mib, 150 * mib) == ("memory-short", "error")


def test_options_reach_the_check() -> None:
    finding = only(examine(TARGET, kv_cache_memory=8 << 20), "cache-partial").text
    assert "8 sequences of 1,024" in finding
    assert "memory-fits" in {
        item.code for item in examine(TARGET, kv_cache_memory=8 << 20, max_batch_size=1)
    }


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_the_cache_of_a_token_is_that_of_the_engine(kind: str) -> None:
    from paceline.model.paged.cache import bytes_per_token
    from paceline.model.paged.int8 import cache_dtype
    from paceline.model.target import CausalModel

    model = CausalModel.load(TARGET, dtype="bfloat16", device="cpu", backend="reference")
    expected = bytes_per_token(model.cache_shapes, cache_dtype(kind, model.dtype))
    finding = only(examine(TARGET, dtype="bfloat16", kv_cache_dtype=kind), "memory-fits").text
    assert f"{size(expected)} of cache per token" in finding


def test_free_memory_is_less_than_all() -> None:
    assert 1 << 20 < free_memory(CPU) < 1 << 50


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (20 << 20, "20.0 MiB"),
        (2 << 50, "2048.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
