"""Quantised checkpoints: written, read again, and read as other engines write them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import (
    ConfigError,
    ModelLoadError,
    PacelineError,
    UnsupportedModelError,
)
from paceline.lab.quantize import _texts, quantize
from paceline.model.loading import load_module, load_tokenizer
from paceline.model.precision import quantise_loaded
from paceline.model.quantised.convert import Scheme, scheme_named
from paceline.model.quantised.formats import pack, unpack
from paceline.model.quantised.rounding import nearest
from paceline.model.quantised.weights import QuantisedLinear
from paceline.model.target import CausalModel
from support.diagonal import diagonal

LAYER = "model.layers.0.self_attn.q_proj"
TEXT = [
    {"text": f"Once upon a time there were {n} little pigs, and {n * 7} wolves."} for n in range(40)
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in TEXT), encoding="utf-8")
    return file


def layers(hf: Any) -> dict[str, QuantisedLinear]:
    return {n: m for n, m in hf.named_modules() if isinstance(m, QuantisedLinear)}


def wide(kept: dict[str, QuantisedLinear]) -> set[str]:
    """Layers beside which activations have 16 bits; those of ``down`` do not divide into 64."""
    return {name.rpartition(".")[2] for name, m in kept.items() if m.quantised.int16_activations}


def test_packing_four_bits_is_undone_by_unpacking() -> None:
    codes = torch.randint(-8, 8, (5, 24), dtype=torch.int8)
    assert torch.equal(unpack(pack(codes)), codes)
    assert pack(codes).shape == (5, 3)


@pytest.mark.parametrize(
    ("precision", "calibrated"), diagonal(["int8", "int4", "w4a16"], [False, True])
)
def test_what_was_written_is_read_again(
    plain_folder: Path, tmp_path: Path, text: Path, precision: str, calibrated: bool
) -> None:
    out = tmp_path / "out"
    scheme, file = scheme_named(precision), text if calibrated else None
    record, _ = quantize(str(plain_folder), out, scheme, file, tokens=600)
    assert record["rounding"] == ("GPTQ" if calibrated else "nearest")
    assert record["layers"] == 14
    assert abs(record["perplexity_rise"]) < (0.01 if precision == "int8" else 0.15)
    model = CausalModel.load(str(out), dtype="float32", device="cpu", backend="reference")
    kept = layers(model.hf)
    assert len(kept) == 14
    assert {m.quantised.bits for m in kept.values()} == {8 if precision == "int8" else 4}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert wide(kept) == (attention if precision == "int8" else set())
    plain = load_module(str(plain_folder), "float32", "cpu").get_submodule(LAYER).weight
    if not calibrated:
        wanted = nearest(
            plain.detach(), *((8, 64) if precision == "int8" else (4, 32, scheme.zero))
        )
        assert torch.equal(kept[LAYER].quantised.codes, wanted.codes)
        assert torch.equal(kept[LAYER].quantised.scales, wanted.scales)
        assert torch.equal(kept[LAYER].weight, wanted.dense())
    card = (out / "README.md").read_text(encoding="utf-8")
    assert all(f"{record[when]['perplexity']:.3f}" in card for when in ("before", "after"))
    assert f"--to {precision}`" in card
    assert ("vLLM and transformers load" in card) == (precision != "int4")


def test_int4_is_one_model_written_or_made_when_loaded(
    plain_folder: Path, written: dict[str, Path]
) -> None:
    """The very codes, scales and offsets of ``--quantize int4``, and their arithmetic."""
    read = layers(load_module(str(written["int4"]), "float32", "cpu"))
    made = layers(quantise_loaded("x", load_module(str(plain_folder), "float32", "cpu"), "int4"))
    assert len(read) == len(made) - 1  # the head is left as it is
    for name, module in read.items():
        one, other = module.quantised, made[name].quantised
        assert (one.bits, one.unsigned) == (other.bits, other.unsigned) == (4, True)
        assert one.offsets is not None and other.offsets is not None
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales), name
        assert torch.equal(one.offsets, other.offsets), name


def test_the_text_part_of_a_model_with_images(written: dict[str, Path], tmp_path: Path) -> None:
    text = json.loads((written["int4"] / "config.json").read_text(encoding="utf-8"))
    whole = {key: text.pop(key) for key in ("quantization_config", "tie_word_embeddings")}
    whole |= {"model_type": "llava", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    tensors = load_file(written["int4"] / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    wanted = layers(load_module(str(written["int4"]), "float32", "cpu"))
    read = layers(load_module(str(tmp_path), "float32", "cpu"))
    assert [*read] == [*wanted]
    for name, layer in read.items():
        assert torch.equal(layer.weight, wanted[name].weight), name


def test_the_library_of_the_layout_reads_the_same_numbers(written: dict[str, Path]) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    for precision, out in written.items():
        ours = layers(load_module(str(out), "float32", "cpu"))
        theirs = AutoModelForCausalLM.from_pretrained(
            out, quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.float32
        )
        for name, module in ours.items():
            weight = theirs.get_submodule(name).weight.detach()
            rounded = module.weight.bfloat16().float()  # 5.23 works in bf16, 5.17 in float32
            if precision == "int4":  # multiplied in the half precision of the scales
                step = module.quantised.scales.repeat_interleave(32, 1)
                assert float(((weight - module.weight) / step).abs().max()) < 0.02, name
            else:
                assert any(torch.equal(weight, own) for own in (module.weight, rounded)), name


def test_the_engine_writes_the_text_of_the_quantised_model(
    plain_folder: Path, tmp_path: Path
) -> None:
    """Plain and speculative decoding agree, and with the logits of the module itself."""
    from paceline import LLM, SamplingParams

    out = tmp_path / "four"
    quantize(str(plain_folder), out, Scheme("int4", head="int8"))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = LLM(str(out), draft="none", dtype="float32", device="cpu", backend="reference")
    ids = [5, 9, 7, 5, 9, 7, 5, 9]
    (wanted,) = plain.generate([ids], params)
    drafted = plain.with_draft("ngram")
    (completion,) = drafted.generate([ids], params)
    assert completion.token_ids == wanted.token_ids
    hf = load_module(str(out), "float32", "cpu", attention="sdpa")
    tokens = list(ids)
    with torch.inference_mode():
        for _ in range(24):
            logits = hf(input_ids=torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
    assert tokens[len(ids) :] == list(wanted.token_ids)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_model_is_quantised_when_it_is_loaded(plain_folder: Path, precision: str) -> None:
    model = CausalModel.load(
        str(plain_folder), device="cpu", quantize=precision, backend="reference"
    )
    kept = layers(model.hf)
    assert len(kept) == 15
    assert kept["lm_head"].quantised.bits == 8
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert wide(kept) == (attention if precision == "int8" else set())
    assert kept[LAYER].quantised.bits == (8 if precision == "int8" else 4)


# -- what other engines write ------------------------------------------------------------------


def as_gptq(weight: torch.Tensor, order: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """A weight as AutoGPTQ stores it, by its own conventions: words along the inputs."""
    rounded = nearest(weight, 4, 32)
    columns = weight.shape[1]
    zeros = torch.full((columns // 32, weight.shape[0]), 7 - 8, dtype=torch.int8)
    return {
        "qweight": pack(rounded.codes).t().contiguous(),
        "scales": rounded.scales.t().contiguous(),
        "qzeros": pack(zeros),
        "g_idx": torch.arange(columns, dtype=torch.int32) // 32 if order is None else order,
    }


def as_awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight as AutoAWQ stores it: outputs interleaved in each word."""
    rounded = nearest(weight, 4, 32)

    def words(codes: torch.Tensor) -> torch.Tensor:
        mixed = codes.t().reshape(codes.shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack(mixed.flatten(1))

    zeros = torch.randint(-2, 3, rounded.scales.shape, dtype=torch.int8)
    moved = (rounded.codes + zeros.repeat_interleave(32, 1)).clamp(-8, 7).to(torch.int8)
    return {
        "qweight": words(moved),
        "scales": rounded.scales.t().contiguous(),
        "qzeros": words(zeros),
    }


def rewritten(
    folder: Path,
    out: Path,
    config: dict[str, Any],
    store: Callable[[torch.Tensor], dict[str, torch.Tensor]],
) -> Path:
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        weight = tensors.pop(key)
        stem = key.removesuffix("weight")
        tensors |= {stem + name: tensor for name, tensor in store(weight).items()}
    out.mkdir()
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    options = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    options["quantization_config"] = config
    (out / "config.json").write_text(json.dumps(options), encoding="utf-8")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def test_gptq_checkpoints_keep_their_codes(plain_folder: Path, tmp_path: Path) -> None:
    folder = rewritten(plain_folder, tmp_path / "gptq", GPTQ, as_gptq)
    model = CausalModel.load(str(folder), dtype="float32", device="cpu", backend="reference")
    plain = load_file(plain_folder / "model.safetensors")[f"{LAYER}.weight"]
    kept = layers(model.hf)
    assert len(kept) == 14
    assert torch.equal(kept[LAYER].weight, nearest(plain, 4, 32).dense())
    assert kept[LAYER].quantised.offsets is None


@pytest.mark.parametrize("kind", ["gptq", "awq", "int8", "int4", "w4a16"])
def test_every_layout_runs_on_the_kernels(
    plain_folder: Path, tmp_path: Path, written: dict[str, Path], kind: str
) -> None:
    """Numbers in memory lie otherwise in each."""
    made = {"gptq": (GPTQ, as_gptq), "awq": (AWQ, as_awq)}
    if kind in made:
        written = {kind: rewritten(plain_folder, tmp_path / kind, *made[kind])}
    target = CausalModel.load(str(written[kind]), dtype="float32", device="cpu")
    assert target.backend.name == "native", target.backend_refusal


def test_awq_checkpoints_keep_their_codes_and_zero_points(
    plain_folder: Path, tmp_path: Path
) -> None:
    folder = rewritten(plain_folder, tmp_path / "awq", AWQ, as_awq)
    model = CausalModel.load(str(folder), dtype="float32", device="cpu", backend="reference")
    plain = load_file(plain_folder / "model.safetensors")[f"{LAYER}.weight"]
    kept = layers(model.hf)[LAYER]
    assert kept.quantised.offsets is not None
    # Moving codes and zero points together changes nothing but where codes ran out of range.
    wanted = nearest(plain, 4, 32).dense()
    assert float((kept.weight - wanted).norm() / wanted.norm()) < 0.12


def damaged(change: str) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    def store(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = as_gptq(weight)
        if change == "order":
            tensors["g_idx"] = tensors["g_idx"].flip(0).contiguous()
        elif change == "zero scale":
            tensors["scales"][0, 0] = 0
        elif change == "no number":
            tensors["scales"][1, 2] = torch.nan
        elif change == "groups":
            tensors["scales"] = torch.ones(3, weight.shape[0])
        elif change == "missing":
            del tensors["scales"]
        return tensors

    return store


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("order", "desc_act"),
        ("zero scale", r"the scale of model\.layers\.\d.*\.weight at row 0, group 0 is 0"),
        ("no number", r"the scale of model\.layers\.\d.*\.weight at row 2, group 1 is nan"),
        ("groups", r"scales of model\.layers\.0.* divides no weight"),
        ("missing", r"has model\.layers.*qweight but no model\.layers.*scales"),
    ],
)
def test_damaged_checkpoints_are_refused_by_the_tensor(
    plain_folder: Path, tmp_path: Path, change: str, message: str
) -> None:
    folder = rewritten(plain_folder, tmp_path / "bad", GPTQ, damaged(change))
    with pytest.raises(PacelineError, match=message):
        CausalModel.load(str(folder), dtype="float32", device="cpu")


def test_a_truncated_file_is_refused_in_one_line(plain_folder: Path, tmp_path: Path) -> None:
    folder = rewritten(plain_folder, tmp_path / "cut", GPTQ, as_gptq)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * 0.9)])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged") as caught:
        CausalModel.load(str(folder), dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)


def test_layers_of_several_precisions_side_by_side(plain_folder: Path, tmp_path: Path) -> None:
    """As mixed recipes write them: the values in 8 bits, the rest of a layer in 4."""
    out = tmp_path / "mixed"
    quantize(str(plain_folder), out, Scheme("int4", zero="none"))
    file = out / "model.safetensors"
    tensors, plain = load_file(file), load_file(plain_folder / "model.safetensors")
    wanted = {}
    for key in [key for key in tensors if key.endswith("v_proj.weight_packed")]:
        name = key.removesuffix(".weight_packed")
        rounded = nearest(plain[f"{name}.weight"], 8, 32)
        shifts = 8 * torch.arange(4)
        words = ((rounded.codes.long() + 128).reshape(len(rounded.codes), -1, 4) << shifts).sum(-1)
        tensors[key] = words.to(torch.uint32).view(torch.int32)
        tensors[f"{name}.weight_scale"] = rounded.scales
        wanted[name] = rounded.dense()
    save_file(tensors, file, metadata={"format": "pt"})
    model = CausalModel.load(str(out), dtype="float32", device="cpu", backend="reference")
    for name, weight in wanted.items():
        assert layers(model.hf)[name].quantised.bits == 8
        assert torch.equal(layers(model.hf)[name].weight, weight)
    tensors[f"{name}.weight_packed"] = tensors[f"{name}.weight_packed"][:, :3].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(PacelineError, match=r"v_proj\.weight_packed has 3 words for 64 numbers"):
        CausalModel.load(str(out), dtype="float32", device="cpu")


LIBRARIES: dict[str, dict[str, Any]] = {
    "hqq": {"quant_config": {"weight_quant_params": {"nbits": 4}}},
    "bitsandbytes": {"load_in_8bit": True, "_load_in_8bit": True},
    "torchao": {
        "quant_type": {
            "default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}},
        }
    },
}


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_a_missing_library_is_one_line(plain_folder: Path, tmp_path: Path, library: str) -> None:
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed")
    config = {"quant_method": library, **LIBRARIES[library]}
    folder = rewritten(plain_folder, tmp_path / library, config, lambda w: {"weight": w})
    with pytest.raises(ModelLoadError, match=rf"{library}.*pip install {library}") as caught:
        CausalModel.load(str(folder), dtype="float32", device="cpu")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_a_librarys_own_modules_run_on_the_reference(
    plain_folder: Path, tmp_path: Path, library: str
) -> None:
    pytest.importorskip(library)
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

    from paceline import LLM, SamplingParams

    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        config: Any = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    out = tmp_path / library
    module = AutoModelForCausalLM.from_pretrained(
        plain_folder, dtype=torch.bfloat16, quantization_config=config
    )
    module.save_pretrained(out)
    load_tokenizer(str(plain_folder)).save_pretrained(out)
    llm = LLM(str(out), draft="none", device="cpu")
    assert llm.target.backend.name == "reference"
    (completion,) = llm.generate([[5, 9, 7] * 4], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(completion.token_ids) == 8


def test_tensors_of_a_library_are_left_to_it(plain_folder: Path) -> None:
    """As torchao's, which allow less than plain ones: they are not laid out, packed or detached."""

    class Foreign(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.detach and torch.is_inference_mode_enabled():
                raise RuntimeError("Cannot set version_counter for inference tensor")
            if func is torch.Tensor.detach:
                return super().__torch_function__(func, types, args, kwargs or {})
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    module = load_module(str(plain_folder), "float32", "cpu")
    layer = module.get_submodule(LAYER)
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Foreign), False)
    model = CausalModel(module, "some model").use_requested_backend()
    assert model.backend.name == "reference"
    assert type(model.hf.get_submodule(LAYER).weight) is Foreign


def test_a_librarys_modules_that_fail_are_one_line(plain_folder: Path) -> None:
    """As bitsandbytes' do on a processor with shapes that its blocks do not divide."""
    module = load_module(str(plain_folder), "float32", "cpu")
    module.config.quantization_config = {"quant_method": "bitsandbytes"}

    def fail(*_: Any) -> None:
        raise RuntimeError("shape '[64, 1]' is invalid\nfor input of size 96")

    module.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(UnsupportedModelError, match=r"RuntimeError: shape .*invalid\)"):
        CausalModel(module, "some model")


def test_few_texts_leave_some_for_calibration(plain_folder: Path, tmp_path: Path) -> None:
    """All were kept for the perplexity where --tokens is small: GPTQ then read nothing."""
    file = tmp_path / "few.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in TEXT[:4]), encoding="utf-8")
    _, read = _texts(load_tokenizer(str(plain_folder)), file, 512, None, 0)
    assert read


def test_quantising_twice_is_refused(written: dict[str, Path], tmp_path: Path) -> None:
    out = written["int8"]
    with pytest.raises(ConfigError, match="quantised already"):
        quantize(str(out), tmp_path / "again", Scheme("int4"))
    with pytest.raises(ConfigError, match="quantised already"):
        CausalModel.load(str(out), device="cpu", quantize="int4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "int3"}, "use int8 or int4"),
        ({"precision": "int4", "group": 48}, "not a multiple of 32"),
        ({"precision": "int4", "head": "fp8"}, "use int8 or int4"),
    ],
)
def test_schemes_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scheme(**arguments)
