"""Several processes train one head together: the result is that of one."""

from __future__ import annotations

import json
import os
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
from paceline.train.group import ProcessGroup
from paceline.train.parallel import _FirstRank, check_processes, together
from support.tiny_models import SENTENCES, TinyPair

SIZES = ["--seq-len=32", "--long-every=2", "--max-positions=48", "--batch-tokens=200"]
SHORT = [*SIZES, "--micro-tokens=64", "--warmup=1", "--dtype=float32", "--steps=4"]


@settings(deadline=None)
@given(st.lists(st.integers(1, 900), max_size=30), st.integers(1, 5))
def test_a_batch_is_dealt_out_whole_and_evenly(tokens: list[int], size: int) -> None:
    team = ProcessGroup()
    team.size = size
    shares = team.share(range(len(tokens)), tokens.__getitem__)
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


def test_gradients_are_summed_and_a_process_without_a_share_has_none() -> None:
    weights = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    weights[0].grad = torch.ones(2, 3)
    table = torch.zeros(2, 11)
    table[1] = torch.arange(11.0)
    sent: list[bytes] = []
    with ended_pipe() as (pipe, process):
        ours = SimpleNamespace(
            fileno=pipe.fileno, recv_bytes=lambda: b"ready", send_bytes=sent.append
        )
        first = _FirstRank(table, [(ours, process)])  # type: ignore[list-item]
        assert first.add_up(weights, 2.5) == 12.5
    assert torch.equal(weights[0].grad, 1 + torch.arange(6.0).view(2, 3))
    assert torch.equal(weights[1].grad, torch.arange(6.0, 10.0))
    assert len(sent) == 2, "one message when the sum is there, one when all have read it"


class ended_pipe:
    """A pipe whose other side is closed, and a process that ended."""

    def __enter__(self) -> tuple[Any, Any]:
        read, write = os.pipe()
        os.close(write)
        self._file = os.fdopen(read)
        self._sentinel = os.dup(read)
        process = SimpleNamespace(
            sentinel=self._sentinel, name="process 2 of 2", exitcode=-9, join=lambda: None
        )
        return self._file, process

    def __exit__(self, *what: object) -> None:
        self._file.close()
        os.close(self._sentinel)


def test_a_process_that_ends_is_one_line() -> None:
    weight = nn.Parameter(torch.zeros(1))
    with ended_pipe() as (pipe, process):

        def gone() -> bytes:
            raise EOFError

        ours = SimpleNamespace(fileno=pipe.fileno, recv_bytes=gone)
        first = _FirstRank(torch.zeros(2, 2), [(ours, process)])  # type: ignore[list-item]
        with pytest.raises(PacelineError, match=r"process 2 of 2 .*exit code -9.*--processes"):
            first.add_up([weight], 0.0)


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ConfigError, match="use 1 or more"):
        check_processes(0, torch.device("cpu"))
    with pytest.raises(ConfigError, match="the device is cuda"):
        check_processes(2, torch.device("cuda"))
    joint: Any = SimpleNamespace(device=torch.device("cpu"), alone="Medusa-2 trains the target")
    with pytest.raises(ConfigError, match="--processes 2: Medusa-2"), together(joint, 2):
        pass
