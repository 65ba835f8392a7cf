"""The roofline of products: what it prints, and that its passes multiply what they say."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

import native
from paceline.kernels.compile import are_kernels_here
from paceline.kernels.library import BFLOAT16, check, library
from paceline.model.backends.native.packing import PackedMatrix

pytestmark = pytest.mark.skipif(not are_kernels_here(), reason="no kernels on this machine")


def test_every_form_and_number_of_rows_is_measured_and_its_largest_loss_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "read_bandwidth", lambda *_: 1e10)  # what it says needs no memory
    arguments = ["native.py", "paceline/tiny", "--roofline", "--rounds", "1", "--rows", "1", "2"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--json"])
    native.main()
    records = json.loads(capsys.readouterr().out)["rows"]
    forms = ("unquantised", "8 bits", "4 bits")
    assert [(r["form"], r["rows"]) for r in records] == [(f, n) for f in forms for n in (1, 2)]
    for r in records:
        assert min(r["read"], r["multiply"], r["products"], r["forward"]) > 0
        above = max(0.0, r["products"] - max(r["read"], r["multiply"]))
        assert r["losses"]["loads"] == pytest.approx(above)
        assert r["losses"][r["loss"]] == max(r["losses"].values())
    # The bytes are those of the weights: in 8 bits about half as many as in 16.
    assert records[0]["read"] > 1.8 * records[2]["read"] > 1.8 * records[4]["read"]
    monkeypatch.setattr(sys, "argv", arguments)
    native.main()
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(records)


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
