"""Heads of another target, of another kind, and with layers counted in another way."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.draft.heads.eagle_head import load_eagle, save_eagle
from paceline.draft.spec import TargetShape
from paceline.drafters import parse_draft
from paceline.errors import ConfigError
from paceline.lab.doctor import Severity, check_layers, examine, layers
from support.doctor_folders import Copy, codes, only

TARGET = "paceline/tiny"
REDUCED = {"head-vocabulary-reduced"}  # 3,072 of 4,096 tokens, as it should be
AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "options", "found", "cure"),
    [
        ({}, "", "head-layers-right", ""),
        ({AUX: [3, 7, 12]}, "", "head-layers-wrong", "feature_layers=2x6x11"),
        pytest.param(
            *({AUX: [3, 7, 12]}, ",feature_layers=2x6x11", "head-layers-right", ""),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({AUX: None, "eagle_config": {AUX: [1, 5, 10]}}, "", "head-layers-wrong", "=2x6x11"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_are_told_by_measuring(
    copy: Copy, config: dict[str, Any], options: str, found: str, cure: str
) -> None:
    folder = copy("tiny-eagle3").config(**config)
    (finding,) = check_layers(TARGET, f"hybrid:ngram+eagle3:{folder}{options}")
    assert (finding.code, finding.about) == (found, "draft") and "[2, 6, 11]" in finding.text
    assert cure in finding.cure


@pytest.mark.slow
def test_layers_that_cannot_be_told_apart() -> None:
    """The toy's block drafter has learnt little; heads of the last layer have no choice."""
    (finding,) = check_layers(TARGET, "dflash:paceline/tiny-dflash")
    assert finding.code == "head-layers-alike"
    assert not check_layers(TARGET, "eagle:paceline/tiny-eagle")
    assert not check_layers(TARGET, "ngram")


@pytest.mark.parametrize(("gain", "code"), [(0.0004, "alike"), (0.01, "wrong")])
def test_a_tiny_gain_is_no_wrong_layer(
    gain: float, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that has learnt nothing yet may have a certain one, by chance of its weights."""
    monkeypatch.setattr(layers, "_forward", lambda *_: None)
    monkeypatch.setattr(layers, "_chances", lambda head, *_: [0.1 + gain * head.features[0]] * 9)
    head, target = SimpleNamespace(features=(2, 6)), SimpleNamespace(num_layers=12)
    spec = parse_draft("eagle3:paceline/tiny-eagle3")
    assert layers._verdict(target, spec, head, [[1]]).code == f"head-layers-{code}"


def test_heads_without_other_layers_are_not_measured() -> None:
    """Neither layers before the embedding nor those after the last one exist."""
    assert not check_layers(TARGET, "eagle3:paceline/tiny-eagle3,feature_layers=0x6x12")


def test_feature_layers_that_are_not_given(copy: Copy) -> None:
    folder = copy("tiny-eagle3").config(**{AUX: None})
    finding = only(examine(TARGET, f"eagle3:{folder}"), "head-layers-assumed")
    assert (finding.severity, "[2, 6, 9]" in finding.text) == (Severity.NOTE, True)


def test_layers_that_do_not_exist(copy: Copy) -> None:
    folder = copy("tiny-eagle3").config(**{AUX: [2, 6, 13]})
    finding = only(examine(TARGET, f"eagle3:{folder}"), "head-refused")
    assert finding.severity is Severity.ERROR
    assert "13" in finding.text


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"target_hidden_size": 512}, "hidden size 512"),
        ({"vocab_size": 5000}, "vocabulary size 5000"),
        ({"paceline_target_layers": 24}, "number of layers 24"),
        ({"draft_vocab_size": 3000}, "d2t"),
        ({"intermediate_size": 700}, "mlp.down_proj.weight"),
        ({"num_hidden_layers": 2}, "lacks the weight layers.1."),
    ],
)
def test_a_head_for_another_target(copy: Copy, options: dict[str, int], word: str) -> None:
    folder = copy("tiny-eagle3").config(**options)
    finding = only(examine(TARGET, f"eagle3:{folder}"), "head-refused")
    assert finding.severity is Severity.ERROR
    assert word in finding.text
    assert finding.cure.endswith(".")


def test_tables_of_the_draft_vocabulary(copy: Copy) -> None:
    def shift(tensors: dict[str, torch.Tensor]) -> None:
        tensors["t2d"][:] = tensors["t2d"].roll(1)

    folder = copy("tiny-eagle3").tensors(shift)
    assert "t2d and d2t" in only(examine(TARGET, f"eagle3:{folder}"), "head-refused").text


def test_a_weight_that_is_missing(copy: Copy) -> None:
    folder = copy("tiny-eagle3").tensors(lambda t: t.pop("midlayer.mlp.up_proj.weight"))
    assert "mlp.up_proj" in only(examine(TARGET, f"eagle3:{folder}"), "head-refused").text


def test_the_speculators_layout(tmp_path: Path) -> None:
    head = load_eagle("paceline/tiny-eagle3", TargetShape(256, 4096, 12))
    save_eagle(head, tmp_path, "speculators", "someone/tiny")
    assert codes(examine(TARGET, f"eagle3:{tmp_path}")) == REDUCED


@pytest.mark.parametrize(
    ("spec", "cure"),
    [
        ("paceline/tiny-eagle3", "eagle3:paceline/tiny-eagle3"),
        ("paceline/tiny-eagle", "eagle:paceline/tiny-eagle"),
        ("paceline/tiny-medusa", "medusa:paceline/tiny-medusa"),
        ("eagle:paceline/tiny-eagle3", "eagle3:paceline/tiny-eagle3"),
        ("eagle3:paceline/tiny-medusa", "medusa:paceline/tiny-medusa"),
        ("medusa:paceline/tiny-eagle", "--draft eagle:paceline/tiny-eagle"),
        ("eagle3:paceline/tiny-draft", "--draft paceline/tiny-draft"),
    ],
)
def test_a_draft_of_another_kind(spec: str, cure: str) -> None:
    finding = only(examine(TARGET, spec), "draft-of-another-kind")
    assert finding.severity is Severity.ERROR
    assert cure in finding.cure


def test_medusa(copy: Copy) -> None:
    folder = copy("tiny-medusa")
    for options, word in (
        ({"medusa_num_heads": 5}, "5 heads"),
        ({"medusa_num_heads": 4, "vocab_size": 4000, "truncated_vocab_size": 4000}, "4000"),
    ):
        refused = only(examine(TARGET, f"medusa:{folder.config(**options)}"), "head-refused")
        assert word in refused.text
    assert "head-refused" in codes(examine("paceline/tiny-draft", "medusa:paceline/tiny-medusa"))


def test_medusa_with_a_reduced_vocabulary(copy: Copy) -> None:
    def reduce(tensors: dict[str, torch.Tensor]) -> None:
        tensors["token_map"] = torch.arange(0, 4096, 2)

    folder = copy("tiny-medusa").config(truncated_vocab_size=2048).tensors(reduce)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finding = codes(examine(TARGET, f"medusa:{folder}"))
    assert finding == REDUCED


def test_a_pickled_head_is_not_inspected(copy: Copy) -> None:
    folder = copy("tiny-eagle3")
    folder.weights.rename(folder.path / "pytorch_model.bin")
    assert codes(examine(TARGET, f"eagle3:{folder}")) == {"weights-pickled"}
    (folder.path / "pytorch_model.bin").unlink()
    assert codes(examine(TARGET, f"eagle3:{folder}")) == {"weights-absent"}


@pytest.mark.parametrize("spec", ["eagle3", "medusa", "eagle3:x,tree=2", "medusa:x,layers=1"])
def test_invalid_specs_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError):
        examine(TARGET, spec)
