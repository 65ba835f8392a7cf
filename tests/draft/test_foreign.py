"""``--draft @FILE``: configurations of vLLM become draft specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.control.controller import FixedLength
from paceline.draft.foreign import foreign_draft, foreign_of
from paceline.drafters import parse_draft
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("found", "spec", "length", "rule"),
    [
        ({"method": "eagle3", "model": "head"}, "eagle3:head,nodes=0", 4, None),
        ({"method": "eagle", "model": "head"}, "eagle:head,nodes=0", 4, None),
        ({"method": "dflash", "model": "head"}, "dflash:head", 4, None),
        ({"model": "org/dspark_8b_block7"}, "dspark:org/dspark_8b_block7", 4, None),
        ({"model": "small"}, "model:small", 4, None),
        (
            {"method": "draft_model", "model": "small", "rejection_sample_method": "block"},
            "model:small",
            4,
            "block",
        ),
        ({"method": "medusa", "model": "heads"}, "medusa:heads,tree=chain", 4, None),
        ({"method": "ngram"}, "ngram:min=5,max=5,length=4,candidates=1", 4, None),
        (
            {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2},
            "ngram:min=2,max=3,length=4,candidates=1",
            4,
            None,
        ),
        (
            {"method": "ngram", "prompt_lookup_max": 100_000, "prompt_lookup_min": 2},
            "ngram:min=2,max=256,length=4,candidates=1",
            4,
            None,
        ),
        ({"method": "suffix"}, "suffix:max_depth=24,factor=1.0,min_prob=0.1", 4, None),
        ({"method": "mtp"}, "mtp", 4, None),
        ({"method": "deepseek_mtp", "model": "x"}, "mtp:x", 4, None),
    ],
)
def test_vllm(found: dict[str, Any], spec: str, length: int, rule: str | None) -> None:
    taken = foreign_draft({"speculative_config": found | {"num_speculative_tokens": 4}})
    assert (taken.spec, taken.length, taken.rule) == (spec, length, rule)
    parse_draft(taken.spec)


def test_lengths_that_vllm_does_not_demand() -> None:
    assert foreign_draft({"method": "suffix"}).length == 24
    assert foreign_draft({"method": "mtp"}).length == 1
    with pytest.raises(ConfigError, match="lacks num_speculative_tokens"):
        foreign_draft({"method": "ngram"})


def test_a_model_of_one_pass_drafts_token_by_token_unless_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"pard_token": 3}')
    given = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4}
    assert foreign_draft(given).spec == f"model:{tmp_path},parallel=off"
    assert foreign_draft(given | {"parallel_drafting": True}).spec == f"model:{tmp_path}"


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"method": "mlp_speculator", "model": "x", "num_speculative_tokens": 2}, "mlp_spec"),
        ({"method": "eagle3", "model": "x"}, "num_speculative_tokens"),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "names no model"),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "rejection_sample_method": "synthetic",
            },
            "not lossless",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": "x"},
            "'x' for prompt_lookup_max",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": "9" * 5000},
            r"'9{70,}\.\.\. for num_speculative_tokens",
        ),
        ({"speculative_algorithm": "EAGLE3"}, "neither"),
        (
            {"method": "custom_class", "model": "other.Proposer", "num_speculative_tokens": 2},
            "custom_class",
        ),
        ({"draft": "x"}, "neither"),
    ],
)
def test_what_has_no_equivalent_is_refused(found: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        foreign_draft(found)
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        foreign_of(f"@{tmp_path}/absent.json")
    for text, named in (("{", "not JSON"), ("[]", "no JSON object")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=named):
            foreign_of(f"@{tmp_path}/bad.json")


def test_the_option_gives_draft_length_and_rule(tmp_path: Path) -> None:
    from paceline.cli.options import ModelOptions

    file = tmp_path / "vllm.json"
    spec = {"method": "ngram", "num_speculative_tokens": 6, "rejection_sample_method": "standard"}
    file.write_text(json.dumps(spec))
    taken = ModelOptions(draft=f"@{file}")
    assert taken.resolved_draft == "ngram:min=5,max=5,length=6,candidates=1"
    assert (taken.draft_length, taken.rule) == (6, "token")
    own = ModelOptions(draft=f"@{file}", draft_length=2, rule="block")
    assert (own.draft_length, own.rule) == (2, "block")
    assert str(parse_draft(f"@{file}")) == "ngram:min=5,max=5,length=6,candidates=1"


@pytest.mark.parametrize("several", [False, True])
def test_an_llm_takes_the_length_of_a_file_and_of_json(tmp_path: Path, several: bool) -> None:
    """`paceline serve --draft @FILE` dropped num_speculative_tokens; JSON was refused."""
    text = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    (tmp_path / "vllm.json").write_text(text)
    for draft in (text, f"@{tmp_path}/vllm.json"):
        with LLM("paceline/tiny", draft=[draft] if several else draft) as llm:
            assert llm.drafts[0].startswith("ngram:")
            controller = llm.engine.controller
            assert isinstance(controller, FixedLength) and controller.length == 3
