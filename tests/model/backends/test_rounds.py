"""Attention whose partial results have no room for all blocks of keys takes them in rounds: the
bits of one round. A build with little room stands for long contexts with many rows."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_models import VOCAB, Paged, Piece, native_model

from paceline.kernels import compile as building
from paceline.kernels.library import INSTRUCTIONS, choose, instructions
from paceline.model.backends.base import relative_error
from paceline.model.target import CausalModel

# Room for 16 blocks of one row's results, for 3 of four rows', for one of more.
BUILD = ("-O1", "-DPACELINE_PARTIAL=4096")
# Keys and values as they are and in 8 bits; windows within a block and across blocks.
CASES = (
    ("llama", torch.bfloat16, "auto"),
    ("gemma3", torch.float32, "auto"),
    ("gemma2", torch.bfloat16, "int8"),
)
ENDS = (5, 250, 262, 510, 514, 760, 764, 765, 900)  # of chunks of a prompt: four blocks of keys
PARENTS = (-1, 0, 0, -1, 2, 3, 3, 6, 1)
Found = dict[tuple[str, str], torch.Tensor]


def logits(model: CausalModel) -> torch.Tensor:
    """Of a prompt in chunks, and of a tree behind it."""
    rng = random.Random(3)
    tokens = [rng.randrange(3, VOCAB) for _ in range(ENDS[-1] + 1)]
    pieces = [Piece(tokens[:end], begin) for begin, end in zip((0, *ENDS), ENDS)]  # noqa: B905
    pieces.append(Piece(tokens, ENDS[-1], PARENTS, tuple(tokens[: len(PARENTS)])))
    paged = Paged(model, random.Random(0), 16, 1, 960)
    return torch.cat([paged.run({0: piece}).logits for piece in pieces])


def found_here() -> tuple[Found, dict[str, torch.Tensor]]:
    """By shape and table of this processor; and what the reference gives, by shape."""
    found, wanted, best = Found(), {}, instructions()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    for shape, dtype, cache in CASES:
        model = native_model(shape, dtype, cache)
        for table in filter(choose, INSTRUCTIONS):
            found[shape, table] = logits(model)
        wanted[shape] = logits(native_model(shape, dtype, cache, "reference"))
    choose(best)
    torch.set_num_threads(before)
    return found, wanted


@pytest.mark.slow  # the kernels are built anew
def test_rounds_have_the_bits_of_one(tmp_path: Path) -> None:
    file = tmp_path / "found"
    environment = {**os.environ, "PACELINE_NATIVE_CACHE": str(tmp_path)}
    command = [sys.executable, __file__, str(file)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ran.returncode and "NativeUnavailableError" in ran.stderr:
        pytest.skip(ran.stderr.splitlines()[-1])
    assert not ran.returncode, ran.stderr
    in_rounds: Found = torch.load(file)
    at_once, wanted = found_here()
    assert in_rounds.keys() == at_once.keys()
    for (shape, table), got in in_rounds.items():
        assert torch.equal(got, at_once[shape, table]), (shape, table)
        limit = 1e-4 if got.dtype == torch.float32 else 0.1
        assert relative_error(got, wanted[shape]) < limit, (shape, table)


if __name__ == "__main__":  # in a process of its own: a library is loaded once
    building._OPTIONS += BUILD  # type: ignore[assignment]
    torch.save(found_here()[0], sys.argv[1])
