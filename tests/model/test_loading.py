"""Loading: good folders, bad folders, and architectures that cannot be decoded here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from random_models import COMMON, tiny_config, tiny_pair
from transformers import AutoModelForCausalLM

from paceline.core.batch import Batch, Span
from paceline.errors import (
    CacheMemoryError,
    ConfigError,
    ModelLoadError,
    UnsupportedModelError,
)
from paceline.model.loading import check_architecture, cpu_has_bf16, resolve_device, resolve_dtype
from paceline.model.names import resolve
from paceline.model.paged.cache import PagedCache
from paceline.model.probe import register
from paceline.model.target import CausalModel
from paceline.model.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved tiny Llama with tied embeddings, in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**COMMON, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def fails(kind: type[Exception], name: str | Path, *words: str) -> None:
    """Loading raises ``kind`` with one line that holds the words, and no chained traceback."""
    with pytest.raises(kind) as caught:
        CausalModel.load(str(name), dtype="float32", device="cpu")
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    for word in words:
        assert word in message, message


def test_good_folder(folder: Path) -> None:
    model = CausalModel.load(str(folder), dtype="float32", device="cpu")
    assert (model.vocab_size, model.hidden_size, model.num_layers) == (61, 32, 2)
    assert model.max_positions == 128
    assert model.eos_token_ids == {2, 7}
    assert model.cache_shapes == [(2, 8, 8)] * 2
    assert model.device == torch.device("cpu")
    batch = Batch(range(3, 8), range(5), range(5), (Span(0, 0, 0, 5),), ([0, 1],))
    cache = PagedCache(model.cache_shapes, 2, 4, model.dtype, "cpu")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        got = model(batch, cache).logits
        expected = reference(torch.arange(3, 8)[None]).logits[0]
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.float32])
def test_dtypes(folder: Path, dtype: str | torch.dtype) -> None:
    model = CausalModel.load(str(folder), dtype=dtype, device="cpu")
    assert model.dtype == resolve_dtype(dtype, torch.device("cpu"))
    assert model.hf.lm_head.weight.dtype == model.dtype


def test_auto_dtype_and_device() -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", cpu) == (torch.bfloat16 if cpu_has_bf16() else torch.float32)
    assert resolve_dtype("auto", torch.device("cuda")) is None
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="int3"):
        resolve_dtype("int3", cpu)
    for unknown in ("teapot", "xpu", "hpu", "meta"):  # torch knows three of them
        with pytest.raises(ConfigError, match=f"'{unknown}' is not known; use auto, cpu"):
            resolve_device(unknown)
    with pytest.raises(ConfigError, match="CUDA devices"):
        resolve_device("cuda:99")


def test_missing_folder(folder: Path) -> None:
    fails(ModelLoadError, "/nowhere/at/all", "does not exist", "check the path")
    fails(ModelLoadError, folder / "config.json", "is a file")


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fails(ModelLoadError, folder, "no weights")


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    fails(ModelLoadError, folder, "no config.json")


def test_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text("{", encoding="utf-8")
    fails(ModelLoadError, folder, "not valid JSON")


@pytest.mark.parametrize("ids", ["x", ["x"], 2.5, True])
def test_end_tokens_that_are_none(folder: Path, ids: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    fails(ModelLoadError, folder, "eos_token_id", "correct its generation_config.json")


def test_a_negative_context(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": -3}))
    fails(ModelLoadError, folder, "max_position_embeddings", "is -3; correct its config.json")


def test_a_cache_without_memory() -> None:
    with pytest.raises(CacheMemoryError, match="no memory on cpu for a cache of 131,072,000,000,"):
        PagedCache([(1, 8, 8)], 10**12, 2048, torch.float32, "cpu")


def test_unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "abacus"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    fails(ModelLoadError, folder, "abacus")


def test_damaged_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    fails(ModelLoadError, folder, "damaged", "again")
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    fails(ModelLoadError, folder, "damaged", "again")


def test_missing_weight_is_an_error(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    fails(ModelLoadError, folder, "lacks", "layers.1.mlp.up_proj.weight")


def test_weights_of_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["intermediate_size"] = 48
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    fails(ModelLoadError, folder, "other shapes", "mlp")


def test_hub_name_while_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    fails(ModelLoadError, "nobody/no-such-model", "no local folder", "hub")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_a_folder_without_a_tokenizer(tmp_path: Path, kind: str) -> None:
    """Of some kinds transformers makes one of nothing, which knows a few special tokens."""
    tiny_config(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(str(tmp_path))
    wanted = f"no tokenizer in {tmp_path}; put tokenizer.json beside the weights"
    assert str(caught.value) == wanted


def test_loading_is_silent(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    CausalModel.load(str(folder), dtype="float32", device="cpu")
    out, err = capfd.readouterr()
    assert out == "" and err == ""


def test_names() -> None:
    assert resolve("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"
    with pytest.raises(ModelLoadError, match="paceline/tiny"):
        resolve("paceline/huge")


UNSUPPORTED: list[tuple[str, str, dict[str, Any]]] = [
    ("FalconConfig", "attention interface", {}),
    ("BloomConfig", "attention interface", {}),
    ("MptConfig", "attention interface", {}),
    ("GPTJConfig", "attention interface", {}),
    ("MambaConfig", "linear_attention|recurrent", {}),
    ("Mamba2Config", "linear_attention|recurrent", {}),
    ("RwkvConfig", "recurrent", {}),
    ("Lfm2Config", "conv", {"layer_types": ["conv", "conv"], "num_hidden_layers": 2}),
    ("T5Config", "encoder-decoder", {}),
    ("ViTConfig", "not a causal language model", {}),
]


@pytest.mark.parametrize(("kind", "reason", "options"), UNSUPPORTED)
def test_unsupported(kind: str, reason: str, options: dict[str, Any]) -> None:
    config = getattr(transformers, kind)(**options)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_architecture(config)
    assert "\n" not in str(caught.value)


def test_a_text_part_that_was_saved_by_itself(tmp_path: Path) -> None:
    """transformers writes Emu3's with a configuration that its own automatic class refuses."""
    sizes = {key: COMMON[key] for key in COMMON if key not in ("head_dim", "initializer_range")}
    saved = transformers.Emu3ForCausalLM(transformers.Emu3TextConfig(**sizes))
    saved.save_pretrained(tmp_path)
    loaded = CausalModel.load(str(tmp_path), dtype="float32", device="cpu", backend="reference")
    assert type(loaded.hf) is transformers.Emu3ForCausalLM
    assert all(map(torch.equal, saved.parameters(), loaded.hf.parameters()))


def test_unsupported_from_a_folder(tmp_path: Path) -> None:
    config = transformers.GPTJConfig(vocab_size=61, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    fails(UnsupportedModelError, tmp_path, "gptj", "attention interface")


def _patched(monkeypatch: pytest.MonkeyPatch, target: str, change: Any) -> Any:
    register()
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation="paceline")
    module = model.get_submodule(target)
    original = module.forward
    monkeypatch.setattr(
        module, "forward", lambda *args, **kwargs: change(original, *args, **kwargs)
    )
    return model


def test_a_layer_that_mixes_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent state hidden in a feed-forward block: the probe of two equal sequences sees it."""

    def mixing(original: Any, x: torch.Tensor) -> torch.Tensor:
        return original(x.cumsum(1))

    with pytest.raises(UnsupportedModelError, match="outside its keys and values"):
        CausalModel(_patched(monkeypatch, "model.layers.1.mlp", mixing), "mixing")


def test_a_layer_without_the_interface_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def bypass(original: Any, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    with pytest.raises(UnsupportedModelError, match=r"layers \[1\] of 2 did not go through"):
        CausalModel(_patched(monkeypatch, "model.layers.1.self_attn", bypass), "bypass")


def test_a_forward_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(original: Any, *_: Any, **options: Any) -> Any:
        return options["token_type_ids"]

    with pytest.raises(UnsupportedModelError, match=r"fails in LlamaForCausalLM .*another arch"):
        CausalModel(_patched(monkeypatch, "model.layers.1.mlp", fails), "failing")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        OSError("the disk of the offloaded layers is gone"),
        CacheMemoryError("planted"),
    ],
)
def test_what_is_not_the_architectures_fault_is_not_laid_on_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        CausalModel(_patched(monkeypatch, "model.layers.1.mlp", fails), "failing")
    assert caught.value is error


def test_unknown_feature() -> None:
    model, _ = tiny_pair("llama")
    batch = Batch([5], [0], [0], (Span(0, 0, 0, 1),), ([0],), features=(9,))
    cache = PagedCache(model.cache_shapes, 1, 4, model.dtype, "cpu")
    with pytest.raises(ConfigError, match="no layer 9"), torch.inference_mode():
        model(batch, cache)
