"""The scripts with ``--pairs smollm2``: with a tiny target, and with the real one where it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import drafters
import real
from support.random_heads import write_eagle
from support.real_prompts import write_prompts

Start = Callable[..., tuple[Any, str, Any]]

FEW = "mt_bench,qa"


@pytest.fixture(scope="module")
def folders(pair_room: tuple[Path, dict[str, str]]) -> dict[str, str]:
    root, pair = pair_room
    return pair | {
        "eagle3": write_eagle(root, pair["target"], 3),
        "prompts-dir": str(write_prompts(root / "prompts")),
    }


def line(folders: dict[str, str], *names: str) -> list[str]:
    return [part for name in names for part in (f"--{name}", folders[name])]


def test_drafters(folders: dict[str, str], start: Start) -> None:
    arguments = ["--pairs", "smollm2", *line(folders, *folders), "--medusa", "none", "--quick"]
    arguments += ["--drafters", "ngram,eagle3", "--suites", FEW, "--max-tokens", "8"]
    arguments += ["--form", "float32", "--prompts", "2", "--again", "0", "--wait", "0"]
    code, _, found = start(drafters, *arguments)
    assert code == 0
    cells = found["smollm2, float32"]
    assert set(cells) == {"b1/greedy", "b1/sampled"}
    assert all({*own["first"]} == {"plain", "ngram", "eagle3"} for own in cells.values())
    args = drafters.parse(["--pairs", "smollm2"])
    assert args.sets == [*real.SETS] and "quantized" in args.drafters


def test_the_real_model_in_quick_form(start: Start, tmp_path: Path) -> None:
    try:
        target = real.target_folder(None)
    except SystemExit as error:
        pytest.skip(str(error))
    prompts = write_prompts(tmp_path / "prompts")
    arguments = ["--pairs", "smollm2", "--target", str(target), "--prompts-dir", str(prompts)]
    arguments += ["--suites", "qa", "--quick", "--max-tokens", "12", "--only", "ngram"]
    arguments += ["--modes", "greedy", "--prompts", "1", "--again", "0", "--wait", "0"]
    code, _, found = start(drafters, *arguments)
    assert code == 0 and found["smollm2, bf16"]["b1/greedy"]["first"]["ngram"] > 0


def test_a_perturbed_copy_is_made_once_within_half_a_step(
    pair_room: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    source = Path(pair_room[1]["target"])
    out = real.perturbed(source)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert before.keys() == after.keys() and (out / "tokenizer.json").is_file()
    moved = 0
    for name, tensor in before.items():
        if tensor.dim() != 2 or tensor.shape[1] % 32:
            assert torch.equal(tensor, after[name])
            continue
        parts = tensor.float().unflatten(1, (-1, 32))
        step = (parts.amax(-1) - parts.amin(-1)) / 15
        apart = (after[name].float().unflatten(1, (-1, 32)) - parts).abs().amax(-1)
        assert bool((apart <= 0.501 * step).all()) and bool((apart > 0.2 * step).all())
        moved += 1
    assert moved >= 8
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    assert real.perturbed(source) == out == real.target_folder(str(source), perturb=True)
    assert (out / "model.safetensors").stat().st_mtime_ns == stamp
