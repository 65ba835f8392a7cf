"""What other engines are told: their names, their layers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.draft.foreign import foreign_of
from paceline.draft.heads.block_head import BlockHead, load_block, save_block
from paceline.draft.heads.eagle_head import load_eagle
from paceline.draft.heads.medusa_head import MedusaConfig, MedusaHeads, load_medusa, save_medusa
from paceline.draft.spec import TargetShape
from paceline.errors import ConfigError, WriteError
from paceline.lab.export import DIALECTS, export
from paceline.lab.export.speculation import LAYERS, Export, outputs_of, shape_of
from paceline.model.names import resolve
from support.every_drafter import SPECS
from support.tiny_models import TinyPair

TARGET, HEAD = "paceline/tiny", "eagle3:paceline/tiny-eagle3"
BLOCKS = ["dflash:paceline/tiny-dflash", "dspark:paceline/tiny-dspark"]
INPUTS = [2, 6, 11]  # of the embedded head
TINY = TargetShape(256, 4096, 12)


def exported(to: str, draft: str = HEAD, out: Path | None = None, **more: Any) -> Export:
    return export(to, TARGET, draft, **({"draft_length": 4} | more), out=out)


def approximated(made: Export) -> str:
    return "; ".join(item.what for item in made.approximations)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "head" / "config.json").read_text())
    return config


def test_sizes_are_read_without_the_weights() -> None:
    assert shape_of(TARGET) == (TINY, ("LlamaForCausalLM",))


# -- what the user did not name ------------------------------------------------------------------


def test_a_full_disk_does_not_change_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Export, save: object) -> str:
        raise WriteError("no space")

    monkeypatch.setattr(Export, "_write_head", full)
    with pytest.raises(WriteError, match="no space"):
        exported("vllm", "auto", out=tmp_path / "x")


def test_an_unsupported_default_is_replaced_by_the_next_best(tmp_path: Path) -> None:
    made = exported("vllm", "auto")
    assert made.config["method"] == "eagle3"
    first = made.approximations[0]
    assert first.what == "--draft auto" and "--draft eagle3:" in first.instead
    assert "lost" in first.cost
    with pytest.raises(ConfigError, match="no equivalent of --draft quantized"):
        exported("vllm", "quantized:int4")  # the user named it


# -- heads, and how their feature layers are numbered ---------------------------------------------


def test_vllm_runs_a_head_that_drafts_in_one_pass(tmp_path: Path) -> None:
    made = exported("vllm", SPECS["eagle3, one pass"], tmp_path)
    assert made.config["method"] == "eagle3" and made.config["parallel_drafting"] is True
    assert "a draft in one pass" not in approximated(made)
    assert config_of(tmp_path)["speculators_model_type"] == "peagle"
    assert load_eagle(str(tmp_path / "head"), TINY).config.mask_token == 0
    assert "parallel_drafting" not in exported("vllm").config
    with pytest.raises(ConfigError, match="only vLLM runs"):
        exported("sglang", SPECS["eagle3, one pass"])


@pytest.mark.parametrize("draft", [HEAD, f"{HEAD},feature_layers=3x7x10"])
def test_vllm_numbers_layers_by_inputs(tmp_path: Path, draft: str) -> None:
    made = exported("vllm", draft, tmp_path)
    wanted = [3, 7, 10] if "layers" in draft else INPUTS
    config = config_of(tmp_path)
    assert config[LAYERS] == wanted
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == resolve(TARGET)
    assert made.config["model"] == made.head == str(tmp_path / "head")
    assert load_eagle(str(tmp_path / "head"), TINY).config.feature_layers == tuple(wanted)


def test_sglang_numbers_layers_by_outputs_under_eagle_config(tmp_path: Path) -> None:
    exported("sglang", out=tmp_path)
    config = config_of(tmp_path)
    assert LAYERS not in config
    nested = {LAYERS: [number - 1 for number in INPUTS], "use_aux_hidden_state": True}
    assert config["eagle_config"] == nested
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]


def test_tensorrt_llm_numbers_layers_by_outputs(tmp_path: Path) -> None:
    made = exported("tensorrt-llm", out=tmp_path)
    spec = made.config["speculative_config"]
    assert spec["eagle3_layers_to_capture"] == [number - 1 for number in INPUTS]
    assert json.loads((tmp_path / "tensorrt_llm.yaml").read_text()) == made.config


def test_llama_cpp_numbers_layers_by_inputs(tmp_path: Path) -> None:
    made = exported("llama.cpp", out=tmp_path)
    assert config_of(tmp_path)[LAYERS] == INPUTS
    assert any("--target-model-dir" in step and "head.gguf" in step for step in made.steps)
    limits = ["--spec-draft-n-max", "4", "--spec-draft-n-min", "0", "--spec-draft-p-min", "0"]
    assert made.command[-7:] == [str(tmp_path / "head.gguf"), *limits]


def test_the_embedding_cannot_be_numbered_by_outputs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer 0"):
        outputs_of([0, 3, 5])
    for to in ("sglang", "tensorrt-llm"):
        with pytest.raises(ConfigError, match="layer 0"):
            exported(to, f"{HEAD},feature_layers=0x6x11", out=tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("to", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
def test_the_weights_of_a_head_are_the_same(tmp_path: Path, to: str) -> None:
    exported(to, out=tmp_path)
    layers = (2, 6, 11)
    ours = load_eagle("paceline/tiny-eagle3", TINY).state_dict()
    theirs = load_eagle(str(tmp_path / "head"), TINY, feature_layers=layers).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_medusa_heads_are_written_to_the_file_that_vllm_reads(tmp_path: Path) -> None:
    heads = MedusaHeads(MedusaConfig(256, 4096, heads=3, layers=2))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_medusa(heads, tmp_path / "own")
    made = exported("vllm", f"medusa:{tmp_path / 'own'}", tmp_path / "out", draft_length="auto")
    files = {file.name for file in (tmp_path / "out" / "head").iterdir()}
    assert files == {"config.json", "model.safetensors"}
    assert made.config["num_speculative_tokens"] == 3  # although four were requested
    assert made.approximations[0].instead == "3 tokens in every step"
    # The names of the parameters of vLLM's Medusa class, which skips all others.
    blocks = [f"blocks.{k}.layers.{n}." for k in range(3) for n in range(2)]
    names = {f"{block}{kind}" for block in blocks for kind in ("weight", "bias")}
    written = load_file(tmp_path / "out" / "head" / "model.safetensors")
    assert written.keys() == names | {f"lm_heads.{k}.weight" for k in range(3)}
    again = load_medusa(str(tmp_path / "out" / "head"), TINY).state_dict()
    assert all(torch.equal(again[name], value) for name, value in heads.state_dict().items())


@pytest.mark.parametrize(
    ("to", "draft", "changes", "named"),
    [
        ("vllm", "dflash", {"from_anchor": True}, "an anchor row that drafts"),
        (
            "vllm",
            "dspark",
            {"from_anchor": True, "confidence": True},
            "no bias for the previous token",
        ),
        ("vllm", "dspark", {"markov_rank": 4, "markov_type": "gated"}, "a gated bias"),
        ("sglang", "dflash", {"draft_vocab_size": 512, "has_lm_head": True}, "a draft vocabulary"),
    ],
)
def test_block_drafters_that_an_engine_cannot_run(
    to: str, draft: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = replace(load_block("paceline/tiny-dflash", TINY, "dflash").config, **changes)
    head = BlockHead(config, torch.arange(config.columns) if config.reduced else None)
    save_block(head, tmp_path)
    with pytest.raises(ConfigError, match=f"has {named}") as caught:
        exported(to, f"{draft}:{tmp_path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_causal_blocks_are_recorded(to: str, tmp_path: Path) -> None:
    """Causal blocks (JetSpec), in the only option that both engines read."""
    config = replace(load_block("paceline/tiny-dflash", TINY, "dflash").config, causal=True)
    save_block(BlockHead(config), tmp_path / "head")
    exported(to, f"dflash:{tmp_path / 'head'}", tmp_path / "out")
    assert config_of(tmp_path / "out")["is_causal"] is True


# -- commands and configurations -------------------------------------------------------------------


def test_vllm_command_of_a_draft_model() -> None:
    made = exported("vllm", "paceline/tiny-draft", rule="block", max_batch_size=3)
    assert made.config == {
        "method": "draft_model",
        "model": resolve("paceline/tiny-draft"),
        "num_speculative_tokens": 4,
        "rejection_sample_method": "block",
        "draft_sample_method": "probabilistic",
    }
    words = list(made.command)
    assert words[:3] == ["vllm", "serve", resolve(TARGET)]
    assert words[words.index("--max-num-seqs") + 1] == "3"
    assert json.loads(words[words.index("--speculative-config") + 1]) == made.config
    assert not made.approximations


def test_vllm_runs_the_targets_own_mtp_layer() -> None:
    assert export("vllm", TARGET, "mtp").config == {"method": "mtp", "num_speculative_tokens": 2}
    assert export("vllm", TARGET, "mtp:other/model", draft_length=1).config == {
        "method": "mtp",
        "model": "other/model",
        "num_speculative_tokens": 1,
    }


def test_vllm_options_of_lookup_drafters() -> None:
    config = exported("vllm", "ngram:min=2,max=3,candidates=1").config
    assert config == {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 3,
        "num_speculative_tokens": 4,
    }
    suffix = exported("vllm", "suffix:max_depth=30,global=off").config
    assert suffix["suffix_decoding_max_tree_depth"] == 30
    assert suffix["suffix_decoding_max_cached_requests"] == 0


def test_block_drafters_draft_at_most_a_block() -> None:
    assert exported("vllm", BLOCKS[1], draft_length=12, rule="block").config == {
        "method": "dspark",
        "model": resolve("paceline/tiny-dspark"),
        "num_speculative_tokens": 7,
        "rejection_sample_method": "block",
        "draft_sample_method": "probabilistic",
    }
    flags = exported("sglang", BLOCKS[1], draft_length=12).config
    assert flags["speculative_dspark_block_size"] == "7"
    assert flags["speculative_num_draft_tokens"] == "8"
    trees = exported("vllm", f"{BLOCKS[0]},nodes=12")
    assert approximated(trees) == "trees of 12 nodes"


def test_sglang_trees() -> None:
    flags = exported("sglang", f"{HEAD},nodes=16,width=3").config
    assert flags["speculative_eagle_topk"] == "3"
    assert flags["speculative_num_steps"] == "4"
    assert flags["speculative_num_draft_tokens"] == "17"
    assert "speculative_use_rejection_sampling" not in flags
    chain = exported("sglang", f"{HEAD},nodes=0", rule="block")
    assert chain.config["speculative_num_draft_tokens"] == "5"
    assert "--speculative-use-block-verification" in chain.command
    assert not any("threshold" in word for word in chain.command)


def test_a_tree_drafts_its_default_shape() -> None:
    flags = exported("sglang", "tree:paceline/tiny-draft").config
    assert flags["speculative_eagle_topk"] == "2"
    assert flags["speculative_num_draft_tokens"] == "11"  # the root, 2, 4 and 4
    made = exported("vllm", "tree:paceline/tiny-draft")
    assert approximated(made) == "trees of 10 nodes"


def test_what_is_approximated_is_named_with_its_cost() -> None:
    made = exported("vllm", f"{HEAD},nodes=16", draft_length="auto", rule="coupled")
    assert approximated(made) == "adaptive draft length; trees of 16 nodes; rule 'coupled'"
    assert all(item.cost and item.instead for item in made.approximations)
    assert "trees" in approximated(exported("vllm"))  # the default of an EAGLE-3 head
    assert "trees" not in approximated(exported("sglang"))


@pytest.mark.parametrize(
    ("to", "draft", "named"),
    [
        ("vllm", "recycling", "recycling"),
        ("vllm", "hybrid:ngram+eagle3:paceline/tiny-eagle3", "hybrid"),
        ("vllm", "medusa:paceline/tiny-medusa", "output layer"),
        ("sglang", "suffix", "suffix"),
        ("tensorrt-llm", "eagle:paceline/tiny-eagle", "eagle:"),
        ("llama.cpp", "medusa:paceline/tiny-medusa", "medusa"),
        ("openvino", HEAD, "eagle3"),
    ],
)
def test_what_has_no_equivalent_is_refused_by_name(to: str, draft: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        exported(to, draft)
    assert "\n" not in str(caught.value) and "; " in str(caught.value)


@pytest.mark.parametrize("to", [*DIALECTS])
def test_a_draft_of_another_vocabulary(to: str, tiny_pair: TinyPair) -> None:
    if to == "llama.cpp":  # it translates the tokens
        assert exported(to, tiny_pair.draft).config["--spec-type"] == "draft-simple"
        return
    if to == "vllm":  # it drafts those that both have
        made = exported(to, tiny_pair.draft, rule="block")
        assert made.config["use_heterogeneous_vocab"] is True
        assert not {"draft_sample_method", "rejection_sample_method"} & made.config.keys()
        assert [item.instead for item in made.approximations][-1] == "rule 'token'"
        return
    with pytest.raises(ConfigError, match="it differs from the target in"):
        exported(to, tiny_pair.draft)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="vllm, sglang"):
        exported("vlm")


def test_plain_decoding_cannot_be_exported() -> None:
    for draft, more, named in (
        ("none", {}, "no draft"),
        ("ngram", {"draft_length": 0}, "plain decoding"),
    ):
        with pytest.raises(ConfigError, match=named):
            exported("vllm", draft, **more)


@pytest.mark.parametrize("to", DIALECTS)
def test_run_sh_has_the_command(tmp_path: Path, to: str) -> None:
    made = exported(to, "paceline/tiny-draft", tmp_path)
    script = (tmp_path / "run.sh").read_text()
    assert script.splitlines()[-1] == f"exec {made.command_line}"
    assert json.loads((tmp_path / "export.json").read_text()) == made.record()
    assert all((tmp_path / name).read_text() == text for name, text in made.files.items())


def test_the_openvino_program_is_python(tmp_path: Path) -> None:
    made = exported("openvino", "ngram:max=3", tmp_path)
    (program,) = made.files.values()
    compile(program, "openvino", "exec")
    assert "config.num_assistant_tokens = 4\nconfig.max_ngram_size = 3\n" in program
    assert "prompt_lookup=True" in program


@pytest.mark.parametrize("draft", [f"{HEAD},nodes=0", "paceline/tiny-draft", *BLOCKS])
def test_an_export_can_be_imported(tmp_path: Path, draft: str) -> None:
    """An exported file is imported with the same feature layers."""
    exported("vllm", draft, tmp_path)
    taken = foreign_of(f"@{tmp_path}/export.json")
    assert taken is not None
    assert taken.length == 4
    if "eagle3" in draft:
        assert taken.spec == f"eagle3:{tmp_path / 'head'},nodes=0"
    elif draft in BLOCKS:
        kind, _, folder = draft.partition(":")
        assert taken.spec == f"{kind}:{tmp_path / 'head'}"
        heads = [load_block(path, TINY, kind) for path in (folder, str(tmp_path / "head"))]
        assert heads[0].config == heads[1].config
    else:
        assert taken.spec.startswith(f"model:{resolve('paceline/tiny-draft')}")
