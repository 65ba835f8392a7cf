"""Faults in files and weights, found from headers and samples."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.lab.doctor import Severity, examine
from support.doctor_folders import Copy, Folder, codes, only
from support.tiny_models import SMALL


def shard(folder: Folder) -> list[str]:
    """Write the weights as two files with an index."""
    tensors = load_file(folder.weights)
    folder.weights.unlink()
    names, where = sorted(tensors), {}
    for number in (0, 1):
        file = f"model-{number}.safetensors"
        part = {name: tensors[name] for name in names[number::2]}
        save_file(part, folder.path / file)
        where.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": where}
    (folder.path / "model.safetensors.index.json").write_text(json.dumps(index))
    return sorted(set(where.values()))


def test_shards(copy: Copy) -> None:
    folder = copy("tiny-draft")
    files = shard(folder)
    assert codes(examine(str(folder)), "target") == set()
    (folder.path / files[1]).unlink()
    finding = only(examine(str(folder)), "shards-absent")
    assert finding.severity is Severity.ERROR
    assert files[1] in finding.text


def test_an_invalid_index(copy: Copy) -> None:
    folder = copy("tiny-draft")
    shard(folder)
    (folder.path / "model.safetensors.index.json").write_text("[]")
    assert "weights-damaged" in codes(examine(str(folder)))
    long = {"weight_map": {"a": "9" * 5000}}
    (folder.path / "model.safetensors.index.json").write_text(json.dumps(long))
    assert "shards-absent" in codes(examine(str(folder)))


def test_no_weights(copy: Copy) -> None:
    folder = copy("tiny-draft")
    folder.weights.unlink()
    assert only(examine(str(folder)), "weights-absent").severity is Severity.ERROR
    torch.save({}, folder.path / "pytorch_model.bin")
    assert codes(examine(str(folder)), "target") == {"weights-pickled"}


def test_a_header_that_is_not_sound(copy: Copy) -> None:
    folder = copy("tiny-draft")
    content = folder.weights.read_bytes()
    assert content.count(b'"format":"pt"') == 1
    folder.weights.write_bytes(content.replace(b'"format":"pt"', b'"format":  1 '))
    assert "weights-damaged" in codes(examine(str(folder)))


@pytest.mark.parametrize("size", [4, 100, -1000])
def test_a_truncated_file(copy: Copy, size: int) -> None:
    folder = copy("tiny-draft")
    content = folder.weights.read_bytes()
    folder.weights.write_bytes(content[:size])
    finding = only(examine(str(folder)), "weights-damaged")
    assert finding.severity is Severity.ERROR
    assert "model.safetensors" in finding.text


def test_a_missing_tensor(copy: Copy) -> None:
    folder = copy("tiny-draft").tensors(lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    finding = only(examine("paceline/tiny", str(folder)), "tensors-refused")
    assert (finding.severity, finding.about) == (Severity.ERROR, "draft")
    assert "model.layers.1.mlp.up_proj.weight" in finding.text


def test_an_untied_head_that_is_missing(copy: Copy) -> None:
    folder = copy("tiny-draft").config(tie_word_embeddings=False)
    assert "lacks the weight lm_head.weight" in only(examine(str(folder)), "tensors-refused").text


def test_other_shapes(copy: Copy) -> None:
    folder = copy("tiny-draft").config(intermediate_size=500)
    finding = only(examine(str(folder)), "tensors-refused")
    assert finding.severity is Severity.ERROR
    assert "has other shapes for the weight" in finding.text


def test_names_without_the_prefix_of_the_body(copy: Copy) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    assert codes(examine(str(copy("tiny-draft").tensors(strip))), "target") == set()


def test_merged_experts_match_their_separate_tensors(tmp_path: Any) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SMALL, vocab_size=64, num_local_experts=2)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    finding = examine(str(tmp_path))
    assert "tensors-refused" not in codes(finding)
    assert only(finding, "weights-complete").about == "target"


# -- values ------------------------------------------------------------------------------------


def test_weights_that_are_not_finite(copy: Copy) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][:] = torch.nan

    finding = only(examine(str(copy("tiny-draft").tensors(poison))), "weights-not-finite")
    assert finding.severity is Severity.ERROR
    assert "model.embed_tokens.weight" in finding.text
