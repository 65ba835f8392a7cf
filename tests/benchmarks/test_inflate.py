"""An inflated checkpoint computes the same function, at another size."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from inflate import InflateError, Sizes, inflate, resolve
from paceline.errors import WriteError
from support.tiny_models import SMALL

EXACT = Sizes(hidden=128, layers=5, ffn=112)  # 4 x 32: norms are rescaled by a power of two


@torch.inference_mode()
def kinship(model: Any, prompt: list[int], reference: list[int], other: list[int]) -> str:
    """ "identical", "near tie" or "different" for two greedy texts of one prompt.

    A near tie: at the first difference `model` (of transformers) gives the two tokens logits no
    more than two rounding steps of its dtype apart, so that the order of a sum decides.
    """
    if reference == other:
        return "identical"
    at = next((i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b), None)
    if at is None:
        return "different"  # one is longer
    ids = torch.tensor([prompt + reference[:at]], device=model.device)
    logits = model(ids).logits[0, -1]
    step = torch.finfo(logits.dtype).eps * 2 ** math.floor(math.log2(float(logits.abs().max())))
    gap = abs(float(logits[reference[at]]) - float(logits[other[at]]))
    return "near tie" if gap <= 2 * step else "different"


ROUNDED = Sizes(hidden=144, layers=4, ffn=100)


def small_model(folder: Path, tied: bool, dtype: torch.dtype) -> LlamaForCausalLM:
    """A random Llama with grouped queries, whose weights are large enough to say something."""
    torch.manual_seed(3)
    config = LlamaConfig(
        **SMALL,
        vocab_size=97,
        head_dim=16,  # not hidden / heads: the head dimension must be taken from the file
        max_position_embeddings=256,
        rms_norm_eps=1e-3,  # large, so that a forgotten rescaling shows
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
        model.model.embed_tokens.weight.mul_(0.2)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def load(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sizes", [EXACT, ROUNDED])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_equal_logits_in_float32(
    tmp_path: Path, tied: bool, sizes: Sizes, stored: torch.dtype
) -> None:
    small_model(tmp_path / "small", tied, stored)
    folder = inflate(tmp_path / "small", sizes, tmp_path / "big")
    small, big = load(tmp_path / "small", torch.float32), load(folder, torch.float32)
    assert big.config.hidden_size == sizes.hidden
    assert len(big.model.layers) == sizes.layers
    ratio = big.config.num_attention_heads // big.config.num_key_value_heads
    assert ratio == 2 and big.config.num_attention_heads > 4
    ids = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, got = small(ids).logits, big(ids).logits
    assert expected.std() > 0.1
    assert (expected - got).abs().max() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_equal_greedy_text_in_bfloat16(tmp_path: Path, tied: bool) -> None:
    small = small_model(tmp_path / "small", tied, torch.bfloat16)
    big = load(inflate(tmp_path / "small", EXACT, tmp_path / "big"), torch.bfloat16)
    prompt = torch.tensor([[5, 17, 80, 3]])
    length = dict(max_new_tokens=64, min_new_tokens=64, do_sample=False)
    text, copy = small.generate(prompt, **length), big.generate(prompt, **length)
    with torch.inference_mode():
        expected = small(text).logits[0, prompt.shape[1] - 1 : -1].float()
        got = big(text).logits[0, prompt.shape[1] - 1 : -1].float()
    best = expected.topk(2).values
    # Sums taken in another order differ by about 2% of the logits' spread, as bfloat16 itself
    # does from float32; only where the margin is smaller than a few of these may the text differ.
    assert (expected - got).std() < 0.03 * expected.std()
    clear = best[:, 0] - best[:, 1] > 0.1 * expected.std()
    assert clear.float().mean() > 0.6
    assert len(set(text[0].tolist())) > 12  # not one word over and over
    assert torch.equal(expected.argmax(-1)[clear], got.argmax(-1)[clear])
    first_tie = int((~clear).nonzero()[0]) if not clear.all() else 64
    assert torch.equal(text[0, : 4 + first_tie], copy[0, : 4 + first_tie])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("paceline/tiny", Sizes(1024, 13, 832), marks=pytest.mark.slow),
        ("paceline/tiny-draft", Sizes(768, 3, 576)),
    ],
)
def test_the_inflated_embedded_pair_gives_the_same_text(
    tmp_path: Path, name: str, sizes: Sizes
) -> None:
    try:
        source = resolve(name)
    except InflateError:
        pytest.skip(f"the weights of {name} are not here yet")
    folder = inflate(source, sizes, tmp_path / "big")
    small, big = load(source, torch.bfloat16), load(folder, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("Once upon a time there was a", "def add(a, b):\n"):
        prompt = tokenizer(text, return_tensors="pt").input_ids
        length = dict(max_new_tokens=12, do_sample=False)
        a, b = (m.generate(prompt, **length)[0, prompt.shape[1] :].tolist() for m in (small, big))
        assert len(a) > 8
        assert kinship(small, prompt[0].tolist(), a, b) in ("identical", "near tie")
    ids = torch.tensor([prompt[0].tolist() + a])
    with torch.inference_mode():
        exact, padded = (load(f, torch.float32)(ids).logits for f in (source, folder))
    assert (exact - padded).abs().max() < 1e-4


def test_new_weights_cannot_be_skipped(tmp_path: Path) -> None:
    small_model(tmp_path / "small", True, torch.bfloat16)
    big = load(inflate(tmp_path / "small", EXACT, tmp_path / "big"), torch.bfloat16)
    new_layer, old_layer = big.model.layers[4], big.model.layers[0]
    for part in (new_layer.self_attn.q_proj, new_layer.mlp.up_proj, old_layer.self_attn.k_proj):
        assert (part.weight == 0).float().mean() < 0.01
    assert not new_layer.self_attn.o_proj.weight.any()
    assert not new_layer.mlp.down_proj.weight.any()
    assert not old_layer.mlp.down_proj.weight[32:].any()
    with torch.inference_mode():
        states = big(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    assert all(not state[..., 32:].any() for state in states)


def test_reused_until_source_or_size_changes(tmp_path: Path) -> None:
    small_model(tmp_path / "small", True, torch.bfloat16)
    out = tmp_path / "big"
    inflate(tmp_path / "small", EXACT, out)
    written = (out / "model.safetensors").stat().st_mtime_ns
    inflate(tmp_path / "small", EXACT, out)
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    inflate(tmp_path / "small", ROUNDED, out)
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 144
    assert "inflated_from" in json.loads((out / "config.json").read_text())
    (tmp_path / "small" / "tokenizer_config.json").write_text("{}")
    inflate(tmp_path / "small", ROUNDED, out)
    assert (out / "tokenizer_config.json").read_text() == "{}"


def test_nothing_is_left_of_an_interrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model(tmp_path / "small", True, torch.bfloat16)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("inflate.save_torch_state_dict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inflate(tmp_path / "small", EXACT, tmp_path / "into" / "big")
    assert list((tmp_path / "into").iterdir()) == []


def test_default_folder_is_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    small_model(tmp_path / "small", True, torch.bfloat16)
    folder = inflate(tmp_path / "small", EXACT)
    assert folder.parent == tmp_path / "cache" / "inflated"
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_clear_errors(tmp_path: Path) -> None:
    small_model(tmp_path / "small", True, torch.bfloat16)
    with pytest.raises(InflateError, match="can only grow"):
        inflate(tmp_path / "small", Sizes(hidden=16, layers=5, ffn=112), tmp_path / "big")
    with pytest.raises(InflateError, match="name the folder"):
        inflate(tmp_path / "nothing", EXACT)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep")
    with pytest.raises(WriteError):
        inflate(tmp_path / "small", EXACT, tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "keep"
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(InflateError, match="gpt2"):
        inflate(tmp_path / "small", EXACT, tmp_path / "big")
