"""EAGLE checkpoints: round trips in every layout, published configs, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.draft.heads.checkpoint import write_checkpoint
from paceline.draft.heads.eagle_head import EagleConfig, EagleHead, load_eagle, save_eagle
from paceline.draft.spec import TargetShape
from paceline.errors import ConfigError, ModelLoadError
from paceline.llm import LLM
from support.engine_models import write_pair
from support.random_heads import eagle_config, write_eagle

TARGET = TargetShape(hidden_size=24, vocab_size=40, num_layers=6)
EAGLE3 = eagle_config(
    hidden_size=24, feature_layers=(1, 2, 5), rope_theta=500000.0, rms_norm_eps=1e-5
)
EAGLE1 = replace(EAGLE3, version=1, feature_layers=(6,), draft_vocab_size=40, fc_bias=True)
IDS = (1, 2, 5, 30, 39)
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HEADS = {
    "EAGLE-3": EAGLE3,
    "EAGLE-3, all tokens": replace(EAGLE3, draft_vocab_size=40),
    "EAGLE-3, the target's head": replace(EAGLE3, draft_vocab_size=40, has_lm_head=False),
    "EAGLE-3, narrow": replace(EAGLE3, hidden_size=16, has_embedding=True),
    "EAGLE-3, normed residual": replace(EAGLE3, norm_before_residual=True, attention_bias=True),
    "EAGLE-3, scaled rotary": replace(EAGLE3, rope_scaling=ROPE),
    "EAGLE-3, five layers": replace(EAGLE3, feature_layers=(0, 1, 2, 4, 6)),
    "P-EAGLE": replace(EAGLE3, mask_token=4),
    "P-EAGLE, three layers": replace(EAGLE3, mask_token=4, layers=3),
    "EAGLE-1": EAGLE1,
    "EAGLE-1, own embedding": replace(EAGLE1, has_embedding=True, fc_bias=False),
}


def head_of(config: EagleConfig) -> EagleHead:
    torch.manual_seed(1)
    return EagleHead(config, IDS if config.draft_vocab_size == 5 else None)


def assert_equal_heads(ours: EagleHead, theirs: EagleHead) -> None:
    assert ours.config == theirs.config
    own, other = ours.state_dict(), theirs.state_dict()
    assert own.keys() == other.keys()
    for key, value in own.items():
        assert value.dtype == other[key].dtype and torch.equal(value, other[key]), key


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(config: EagleConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    head = head_of(config).to(dtype)
    save_eagle(head, tmp_path)
    assert_equal_heads(load_eagle(str(tmp_path), TARGET), head)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    "config", [c for c in HEADS.values() if c.version == 3 and len(c.feature_layers) == 3]
)
def test_round_trip_as_speculators(config: EagleConfig, tmp_path: Path) -> None:
    head = head_of(config)
    save_eagle(head, tmp_path, "speculators", "org/target")
    assert_equal_heads(load_eagle(str(tmp_path), TARGET, version=3), head)


def test_files_are_those_of_the_authors(tmp_path: Path) -> None:
    save_eagle(head_of(EAGLE3), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["fc.weight"].shape == (24, 3 * 24)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * 24)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (tensors["d2t"] + torch.arange(5)).tolist() == list(IDS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 5]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (5, 40)


def test_speculators_files_are_what_vllm_asks_for(tmp_path: Path) -> None:
    save_eagle(head_of(EAGLE3), tmp_path, "speculators", "org/target", ("Qwen3ForCausalLM",))
    tensors = load_file(tmp_path / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in tensors
    assert not any("midlayer" in key for key in tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    use = config["speculators_config"]
    assert use["proposal_methods"][0]["speculative_tokens"] > 0
    assert use["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["Qwen3ForCausalLM"],
    }
    layer = config["transformer_layer_config"]
    assert layer["num_hidden_layers"] == 1 and layer["vocab_size"] == 40
    assert "draft_vocab_size" not in layer and config["draft_vocab_size"] == 5


# A config.json as published with heads that vLLM loads, at a smaller size.
PUBLISHED_SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "base_model_ep_plan": None,
    "draft_vocab_size": 5,
    "dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": None,
    "embed_requires_grad": False,
    "has_no_defaults_at_init": False,
    "norm_before_fc": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": 3,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"architectures": [], "name_or_path": "mistralai/Mistral-Large-3"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.5.0.dev5",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 24,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "use_cache": True,
        "vocab_size": 40,
    },
}


def test_a_published_speculators_config(tmp_path: Path) -> None:
    target = replace(TARGET, num_layers=36)
    wanted = replace(
        EAGLE3, feature_layers=(2, 18, 33), target_layers=36, norm_before_residual=True
    )
    head = head_of(wanted)
    tensors = {k.replace("midlayer.", "layers.0."): v for k, v in head.state_dict().items()}
    tensors["verifier_norm.weight"] = torch.ones(24)
    write_checkpoint(tmp_path, "model.safetensors", tensors, PUBLISHED_SPECULATORS)
    assert_equal_heads(load_eagle(str(tmp_path), target), head)


def test_options_at_their_defaults_may_be_absent_from_speculators(tmp_path: Path) -> None:
    save_eagle(head_of(replace(EAGLE3, rms_norm_eps=1e-6)), tmp_path, "speculators")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["transformer_layer_config"]["rms_norm_eps"]
    del config["norm_before_residual"]
    path.write_text(json.dumps(config))
    loaded = load_eagle(str(tmp_path), TARGET).config
    assert loaded.rms_norm_eps == 1e-6 and loaded.norm_before_residual


def test_published_configs_of_the_authors(tmp_path: Path) -> None:
    """As released: no head_dim or layer ids, the class of a plain Llama, a pickled file."""
    head = head_of(replace(EAGLE3, heads=3, kv_heads=1, feature_layers=(2, 3, 3)))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 24,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "model_type": "llama",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "vocab_size": 40,
        "draft_vocab_size": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(head.state_dict(), tmp_path / "pytorch_model.bin")
    assert_equal_heads(load_eagle(str(tmp_path), TARGET), head)


def test_layer_ids_may_stand_under_eagle_config_and_be_overridden(tmp_path: Path) -> None:
    edit(
        EAGLE3,
        tmp_path,
        lambda c: c.update(
            eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 4]},
            eagle_aux_hidden_state_layer_ids=None,
        ),
    )
    assert load_eagle(str(tmp_path), TARGET).config.feature_layers == (0, 3, 4)
    loaded = load_eagle(str(tmp_path), TARGET, feature_layers=(1, 4, 5))
    assert loaded.config.feature_layers == (1, 4, 5)


def test_an_unnamed_draft_vocabulary_is_as_large_as_its_table(tmp_path: Path) -> None:
    edit(EAGLE3, tmp_path, lambda config: config.pop("draft_vocab_size"))
    assert_equal_heads(load_eagle(str(tmp_path), TARGET), head_of(EAGLE3))


def test_old_and_new_names_of_rotary_options(tmp_path: Path) -> None:
    old = {"type": "linear", "factor": 2.0}
    edit(EAGLE3, tmp_path, lambda c: c.update(rope_scaling=old))
    scaled = load_eagle(str(tmp_path), TARGET).config
    assert scaled.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    new = {"rope_type": "default", "rope_theta": 1234.0}
    edit(EAGLE3, tmp_path / "new", lambda c: c.update(rope_parameters=new, rope_theta=None))
    plain = load_eagle(str(tmp_path / "new"), TARGET).config
    assert plain.rope_scaling is None and plain.rope_theta == 1234.0


def test_draft_ids_in_another_order_mean_the_same_tokens(tmp_path: Path) -> None:
    head = head_of(EAGLE3)
    order = torch.tensor([3, 0, 4, 1, 2])

    def shuffle(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order].clone()
        tensors["d2t"] = torch.tensor(IDS)[order] - torch.arange(5)

    edit(EAGLE3, tmp_path, tensors=shuffle)
    assert_equal_heads(load_eagle(str(tmp_path), TARGET), head)


def test_a_head_without_its_own_drafts_with_the_targets(tmp_path: Path) -> None:
    save_eagle(head_of(HEADS["EAGLE-3, the target's head"]), tmp_path)
    weight = torch.randn(40, 24)
    head = load_eagle(str(tmp_path), TARGET, target_head=lambda hidden: hidden @ weight.T)
    hidden = torch.randn(3, 24)
    torch.testing.assert_close(head.logits(hidden), head.norm(hidden) @ weight.T)


def test_a_prefix_and_the_copied_head_of_eagle1_are_passed_over(tmp_path: Path) -> None:
    def prefixed(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[f"model.{key}"] = tensors.pop(key)
        tensors["lm_head.weight"] = torch.randn(40, 24)

    edit(EAGLE1, tmp_path, tensors=prefixed)
    assert_equal_heads(load_eagle(str(tmp_path), TARGET, version=1), head_of(EAGLE1))


def test_the_spec_may_name_the_layers(tmp_path: Path) -> None:
    target, _ = write_pair(tmp_path)
    spec = f"eagle3:{write_eagle(tmp_path, target, 3)},layers"
    llm = LLM(target, f"{spec}=0x1x2", dtype="float32", draft_length=2)
    assert llm.engine.drafter.features == (0, 1, 2)
    with pytest.raises(ConfigError, match="not like 2x16x29"):
        LLM(target, f"{spec}=0-2", dtype="float32", draft_length=2)
    with pytest.raises(ModelLoadError, match=r"feature layers \[9\] do not exist"):
        LLM(target, f"{spec}=0x1x9", dtype="float32", draft_length=2)


# -- refusals --------------------------------------------------------------------------------


def edit(
    config: EagleConfig,
    folder: Path,
    options: Callable[[dict[str, Any]], object] | None = None,
    tensors: Callable[[dict[str, torch.Tensor]], object] | None = None,
) -> None:
    """Write a head, then change its files."""
    save_eagle(head_of(config), folder)
    if options is not None:
        path = folder / "config.json"
        values = json.loads(path.read_text())
        options(values)
        path.write_text(json.dumps(values))
    if tensors is not None:
        loaded = load_file(folder / "model.safetensors")
        tensors(loaded)
        save_file(loaded, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (replace(TARGET, hidden_size=32), "target with hidden size 24, but this one has 32"),
        (replace(TARGET, vocab_size=41), "target with vocabulary size 40, but this one has 41"),
        (replace(TARGET, num_layers=7), "target with number of layers 6, but this one has 7"),
    ],
)
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_heads_for_another_target(
    target: TargetShape, message: str, layout: str, tmp_path: Path
) -> None:
    save_eagle(head_of(EAGLE3), tmp_path, layout)
    with pytest.raises(ModelLoadError, match=message):
        load_eagle(str(tmp_path), target)


MEDUSA = {"0.0.linear.weight": torch.zeros(24, 24), "0.1.weight": torch.zeros(40, 24)}
LANGUAGE_MODEL = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(24, 24)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (MEDUSA, "Medusa heads; use --draft medusa:"),
        (LANGUAGE_MODEL, "a language model; use --draft "),
        ({"other": torch.zeros(2)}, "weights of another kind"),
    ],
)
def test_checkpoints_of_another_algorithm(
    tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "model.safetensors", tensors, {"hidden_size": 24})
    with pytest.raises(ModelLoadError, match=f"holds no EAGLE head but {message}"):
        load_eagle(str(tmp_path), TARGET)


@pytest.mark.parametrize(("config", "asked"), [(EAGLE3, 1), (EAGLE1, 3)])
def test_the_other_version_is_named(config: EagleConfig, asked: int, tmp_path: Path) -> None:
    save_eagle(head_of(config), tmp_path)
    right = "eagle3" if config.version == 3 else "eagle"
    with pytest.raises(ModelLoadError, match=f"not EAGLE-{asked}; use --draft {right}:"):
        load_eagle(str(tmp_path), TARGET, version=asked)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", None, "has no hidden_size"),
        ("intermediate_size", "many", "has 'many' for intermediate_size"),
        ("num_hidden_layers", 2, "lacks the weight layers.1.input_layernorm.weight"),
        ("num_hidden_layers", 2**31, "has 2147483648 num_hidden_layers, but its weights are"),
        ("hidden_act", "gelu", "hidden_act 'gelu'; only 'silu'"),
        ("norm_before_fc", True, "norm_before_fc True; only False"),
        ("eagle_aux_hidden_state_layer_ids", [2, 3, 9], r"feature layers \[9\] do not exist"),
        ("eagle_aux_hidden_state_layer_ids", [2, 3], r"fc.weight of shape \[24, 72\] where"),
        ("eagle_aux_hidden_state_layer_ids", "2,3", "not a list of layer numbers"),
        ("draft_vocab_size", 6, "draft vocabulary of 6"),
        ("draft_vocab_size", 64, "exceeds the target's 40"),
        ("num_key_value_heads", 3, "4 heads cannot share 3"),
        ("head_dim", 16, r"k_proj.weight of shape \[16, 48\] where \[32, 48\] is due"),
        ("rope_scaling", {"rope_type": "strange"}, "has rope_scaling {'rope_type': 'strange'}"),
    ],
)
def test_configs_that_do_not_fit(key: str, value: Any, message: str, tmp_path: Path) -> None:
    edit(EAGLE3, tmp_path, lambda config: config.update({key: value}))
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_eagle(str(tmp_path), TARGET)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "drafts 5 of 40 tokens but has no lm_head"),
        (lambda t: t.pop("d2t"), "has no d2t"),
        (lambda t: t.pop("norm.weight"), "lacks the weight norm.weight"),
        (lambda t: t.update(strange=torch.zeros(1)), "has an unknown weight strange"),
        (lambda t: t.update({"fc.weight": torch.zeros(24, 71)}), r"fc.weight of shape \[24, 71\]"),
        (lambda t: t.update(d2t=torch.tensor(IDS)), "does not name 5 different tokens"),
        (lambda t: t.update(d2t=torch.zeros(5, dtype=torch.int64)), "t2d and d2t"),
        (lambda t: t.update(d2t=torch.tensor([0, -1, 3, 4, 5])), "must hold offsets"),
    ],
)
def test_weights_that_do_not_fit(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    edit(EAGLE3, tmp_path, tensors=change)
    with pytest.raises(ModelLoadError, match=message):
        load_eagle(str(tmp_path), TARGET)


def test_a_narrow_head_needs_its_own_embedding(tmp_path: Path) -> None:
    config = HEADS["EAGLE-3, narrow"]
    edit(config, tmp_path, tensors=lambda t: t.pop("embed_tokens.weight"))
    with pytest.raises(ModelLoadError, match="has no embed_tokens"):
        load_eagle(str(tmp_path), TARGET)


def test_speculators_of_another_kind(tmp_path: Path) -> None:
    save_eagle(head_of(EAGLE3), tmp_path, "speculators")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"speculators_model_type": "dflash"}))
    with pytest.raises(ModelLoadError, match="type 'dflash'; of that format only eagle3"):
        load_eagle(str(tmp_path), TARGET)
    path.write_text(json.dumps({k: v for k, v in config.items() if "layer_config" not in k}))
    with pytest.raises(ModelLoadError, match="no transformer_layer_config"):
        load_eagle(str(tmp_path), TARGET)
    path.write_text(json.dumps(config | {"transformer_layer_config": {"hidden_size": "many"}}))
    with pytest.raises(ModelLoadError, match="cannot be read") as caught:
        load_eagle(str(tmp_path), TARGET)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [EAGLE1, HEADS["EAGLE-3, five layers"]])
def test_what_speculators_cannot_hold_is_refused(config: EagleConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='write this one with layout "eagle"'):
        save_eagle(head_of(config), tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()


def test_p_eagle_as_others_write_it(tmp_path: Path) -> None:
    """vLLM's other name of the token, and the placeholder of speculators, which has three sizes."""
    head = head_of(HEADS["P-EAGLE"])
    save_eagle(head, tmp_path, "speculators", "org/target")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["speculators_model_type"], config["mask_token_id"]) == ("peagle", 4)
    save_eagle(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mask_hidden"] = tensors["mask_hidden"][None]
    config = json.loads((tmp_path / "config.json").read_text())
    config["pard_token"] = config.pop("ptd_token_id")
    write_checkpoint(tmp_path, "model.safetensors", tensors, config)
    assert_equal_heads(load_eagle(str(tmp_path), TARGET), head)
    write_checkpoint(tmp_path, "model.safetensors", tensors, config | {"pard_token": 40})
    with pytest.raises(ModelLoadError, match="has 40 as the token for parallel drafting"):
        load_eagle(str(tmp_path), TARGET)
    del tensors["mask_hidden"]
    write_checkpoint(tmp_path, "model.safetensors", tensors, config)
    with pytest.raises(ModelLoadError, match="lacks the weight mask_hidden"):
        load_eagle(str(tmp_path), TARGET)


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use eagle or speculators"):
        save_eagle(head_of(EAGLE3), tmp_path / "out", "gguf")


def test_an_interrupted_write_leaves_no_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_eagle(head_of(EAGLE3), tmp_path)
    assert list(tmp_path.iterdir()) == []
