"""Several processes train one head together: the result is that of one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from paceline import ConfigError, PacelineError
from paceline.cli.main import app
from paceline.train.documents import dealt
from paceline.train.optim import add_up
from paceline.train.parallel import together
from support.tiny_models import SENTENCES, TinyPair

SIZES = ["--seq-len=32", "--long-every=2", "--max-positions=48", "--batch-tokens=200"]
SHORT = [*SIZES, "--micro-tokens=64", "--warmup=1", "--dtype=float32", "--steps=4"]


@settings(deadline=None)
@given(st.lists(st.integers(1, 900), max_size=30), st.integers(1, 5))
def test_a_batch_is_dealt_out_whole_and_evenly(tokens: list[int], size: int) -> None:
    shares = dealt(range(len(tokens)), tokens.__getitem__, size)
    assert sorted(item for share in shares for item in share) == list(range(len(tokens)))
    loads = [sum(tokens[item] for item in share) for share in shares]
    assert len(loads) == size and max(loads) - min(loads) <= max(tokens, default=0)


def test_two_processes_learn_what_one_does(tiny_pair: TinyPair, tmp_path: Path) -> None:
    corpus = tmp_path / "toy.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES * 3))
    heads = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        command = ["train", "eagle3", "--target", tiny_pair.target, "--data", str(corpus)]
        more = ["--ttt-steps=2", f"--processes={processes}", "--threads=1", "--json"]
        result = CliRunner().invoke(app, [*command, "--out", str(out), *SHORT, *more])
        assert result.exit_code == 0, result.output
        heads.append(load_file(Path(json.loads(result.stdout)["head"]) / "model.safetensors"))
    assert "2 processes of 1 thread each" in result.stderr
    one, two = heads
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        # AdamW moved lm_head by up to 0.012. Muon orthogonalises in bf16: other last bits count.
        torch.testing.assert_close(two[name], tensor, atol=5e-4, rtol=0, msg=name)


class Summing:
    """Stands for a trainer: two steps of nothing but a sum, in which the second process ends."""

    alone, rank, ranks, step, compiled = "", 0, 1, 0, False
    config = SimpleNamespace(steps=2)
    device = torch.device("cpu")

    def __init__(self, config: Any, out: Path, *_: Any) -> None:
        self.out, self.weights = out, [nn.Parameter(torch.zeros(2, 3)) for _ in range(2)]

    def train_step(self) -> float:
        if self.step and self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        for number, weight in enumerate(self.weights[self.rank :]):
            weight.grad = torch.full((2, 3), 1.0 + self.rank + number)
        self.step += 1
        return add_up(self.weights, 1.5 + self.rank)


def test_gradients_are_summed_and_a_process_that_ends_is_one_line(tmp_path: Path) -> None:
    """The second process has no gradient of the first weight: it lacks a share of the batch."""
    first: Any = Summing(Summing.config, tmp_path)
    ended = pytest.raises(PacelineError, match=r"process 2 of 2 .*exit code -9.*--processes")
    with ended, together(first, 2, threads=1):
        assert first.train_step() == 4.0
        one, two = (weight.grad for weight in first.weights)
        assert torch.equal(one, torch.full((2, 3), 1.0))
        assert torch.equal(two, torch.full((2, 3), 4.0))
        first.train_step()
    assert first.ranks == 1


def test_what_cannot_be_shared_is_refused() -> None:
    device: Any = SimpleNamespace(device=torch.device("cuda"), alone="")
    with pytest.raises(ConfigError, match="the device is cuda"), together(device, 2):
        pass
    joint: Any = SimpleNamespace(device=torch.device("cpu"), alone="Medusa-2 trains the target")
    with pytest.raises(ConfigError, match="--processes 2: Medusa-2"), together(joint, 2):
        pass
