"""The roofline of products: what it prints, and that its passes multiply what they say."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import native
from paceline.kernels.compile import are_kernels_here
from paceline.kernels.library import BFLOAT16, check, library
from paceline.model.backends.native.packing import PackedMatrix

pytestmark = pytest.mark.skipif(not are_kernels_here(), reason="no kernels on this machine")


def test_every_form_and_number_of_rows_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "STREAMED", native.STREAMED // 16)  # what it says needs no memory
    monkeypatch.setattr(native, "read_bandwidth", lambda *_: 1e10)
    native.roofline((1, 2), 1, as_json=True)
    record = json.loads(capsys.readouterr().out)
    assert [(r["form"], r["rows"]) for r in record["rows"]] == [
        (form, rows) for form in native.FORMS for rows in (1, 2)
    ]
    for row in record["rows"]:
        assert min(row["read"], row["multiply"], row["both"]) > 0
        assert row["gap"] == pytest.approx(row["both"] / max(row["read"], row["multiply"]))
    native.roofline((1,), 1, as_json=False)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(native.FORMS)


def test_each_pass_is_over_the_weights_behind_the_last() -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(64, 64, bias=False).bfloat16() for _ in range(2)]
    packed = [PackedMatrix.pack([linear], torch.bfloat16) for linear in linears]
    size = packed[0].data.nbytes
    behind = torch.cat([p.data.flatten().view(torch.uint8)[:size] for p in packed])
    weight, x = packed[0].struct(), torch.randn(3, 64).bfloat16()
    weight.data = behind.data_ptr()
    for passes in (1, 2):
        y = torch.empty(3, 64, dtype=torch.bfloat16)
        call = (0.0, passes, size, y.data_ptr(), 1)
        check(library().pl_product(BFLOAT16, weight, x.data_ptr(), 3, *call))
        assert torch.equal(y, packed[passes - 1].multiply(x))
