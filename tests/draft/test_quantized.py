"""The target's copy in fewer bits as draft: what is rounded, shared and refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from embedded_target import train_tokenizer
from paceline import LLM, SamplingParams
from paceline.draft.base import runs_torch
from paceline.draft.selfspec import SelfDrafter
from paceline.draft.spec import LoadContext
from paceline.drafters import prepare_one
from paceline.errors import ConfigError
from paceline.model.backends.base import relative_error, trial_logits
from paceline.model.copies import quantised_copy
from paceline.model.precision import matrix_sizes, quantise_loaded, usual_bits
from paceline.model.quantised.weights import QuantisedLinear
from paceline.model.target import CausalModel
from support.engine_models import adapted, random_llama, reference_logits
from support.tiny_models import SENTENCES, write_tiny_model

TOKENS = [5, 9, 61, 2, 30, 31]
LAYOUTS = ("reference", "native")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("target") / "model"))


def loaded(folder: str, layout: str, quantize: str | None = None) -> CausalModel:
    return CausalModel.load(folder, "float32", "cpu", backend=layout, quantize=quantize)


def dense(model: CausalModel) -> dict[str, torch.Tensor]:
    """The matrices of a model in float32, from any layout."""
    named = model.hf.named_modules()
    return {n: m.weight.float() for n, m in named if n.endswith(("proj", "lm_head"))}


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_copy_is_the_model_quantised_when_loaded(
    folder: str, layout: str, precision: str
) -> None:
    model = loaded(folder, layout)
    before = {name: weight.clone() for name, weight in dense(model).items()}
    copied = quantised_copy(model, precision)
    wanted = dense(loaded(folder, "reference", precision))
    found = dense(copied)
    assert found.keys() == wanted.keys() == before.keys() and len(found) == 15
    for name, weight in found.items():
        assert torch.equal(weight, wanted[name]), name
        assert not torch.equal(weight, before[name]), name
        assert torch.equal(dense(model)[name], before[name]), "the model itself stays"
    assert usual_bits(copied.hf) == {"int8": 8, "int4": 4}[precision] and usual_bits(model.hf) == 32
    assert quantised_copy(model, precision) is copied, "rounded once"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_without_operators_of_torch_skip_its_inference_mode(folder: str, layout: str) -> None:
    """It costs a step 30 microseconds; lookups and the kernels do not need it."""
    llm = LLM(
        folder, draft="hybrid:suffix+quantized:int4", dtype="float32", device="cpu", backend=layout
    )
    assert runs_torch(llm.engine.drafter) == (layout == "reference")
    assert not runs_torch(llm.with_draft("hybrid:suffix+ngram").engine.drafter)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_embedding_and_norms_are_the_models_own(folder: str, layout: str) -> None:
    model = loaded(folder, layout)
    copied = quantised_copy(model, "int8")
    own, theirs = dict(model.hf.named_parameters()), dict(copied.hf.named_parameters())
    shared = [name for name in theirs if "norm" in name or "embed" in name]
    assert len(shared) == 6
    assert all(theirs[name].data_ptr() == own[name].data_ptr() for name in shared)
    assert copied.cache_shapes == model.cache_shapes


def test_hooks_on_the_copy_are_not_the_models() -> None:
    model = adapted()
    copied = quantised_copy(model, "int8")
    copied.hf.model.norm.register_forward_hook(lambda *call: call[2] * 0)
    assert reference_logits(model, TOKENS).any()


def test_matrices_that_do_not_divide_stay_and_are_shared() -> None:
    model = adapted()  # its feed-forward is 48 wide: no groups of 32
    copied = quantised_copy(model, "int8")
    layer, own = copied.hf.model.layers[0], model.hf.model.layers[0]
    assert type(layer.mlp.gate_proj) is not nn.Linear
    assert layer.mlp.down_proj.weight.float().equal(own.mlp.down_proj.weight.float())


def test_it_drafts_what_the_quantised_model_says(folder: str) -> None:
    """The drafts are nearly always accepted, and the text is the target's."""
    llm = LLM(folder, draft="none", dtype="float32", backend="native")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = ["The quick brown fox", "def add(a, b):"]
    plain = [c.token_ids for c in llm.generate(prompts, params)]
    drafted = llm.with_draft("quantized:int8", draft_length=3)
    found = drafted.generate(prompts, params)
    assert [c.token_ids for c in found] == plain
    assert sum(c.stats.accepted_tokens for c in found) > 40
    drafter = drafted.engine.drafter
    assert isinstance(drafter, SelfDrafter) and drafter.cache is drafted.engine.cache


def refused(model: CausalModel, spec: str) -> str:
    tokenizer = train_tokenizer(SENTENCES, 320)
    with pytest.raises(ConfigError) as caught:
        prepare_one(spec, LoadContext(model, tokenizer, "float32"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_target_of_as_few_bits_needs_no_such_draft(folder: str, layout: str) -> None:
    eight, four = (loaded(folder, layout, precision) for precision in ("int8", "int4"))
    assert "held in 8 bits already" in refused(eight, "quantized:int8")
    assert "held in 4 bits already" in refused(four, "quantized")
    assert "held in 4 bits already" in refused(four, "quantized:int8")
    copied = quantised_copy(eight, "int4")
    assert usual_bits(copied.hf) == 4


def test_a_model_without_groups_is_refused() -> None:
    hf = random_llama()
    model = CausalModel(hf, "narrow")
    for layer in hf.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Foreign(child))
    hf.lm_head = Foreign(hf.lm_head)
    assert "no matrix of narrow divides into groups" in refused(model, "quantized")


class Foreign(nn.Module):
    """A linear layer of an unknown class."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.inner = (linear,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner[0](x)
        return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_matrices_are_held_as(folder: str, layout: str, tmp_path: Path) -> None:
    plain = list(matrix_sizes(loaded(folder, layout).hf))
    assert {held.bits for held in plain} == {32} and len(plain) == 15
    elements = sum(held.elements for held in plain)
    assert sum(held.bytes for held in plain) == pytest.approx(4 * elements, rel=0.2)
    model = copy.deepcopy(random_llama())
    quantise_loaded("it", model, "int4")
    found = [held for held in matrix_sizes(model) if held.bits != 32]
    assert {held.bits for held in found} == {4, 8}
    layers = [m for m in model.modules() if isinstance(m, QuantisedLinear)]
    assert sum(h.elements for h in found) == sum(m.quantised.codes.numel() for m in layers)


@torch.inference_mode()
def test_a_copy_on_the_reference_is_still_the_copy(folder: str) -> None:
    """Its modules, not those of the model that it was made of."""
    model = loaded(folder, "native")
    if model.backend.runs_torch:
        pytest.skip(model.backend_reason)
    copied, whole = quantised_copy(model, "int4"), trial_logits(model)
    wanted = trial_logits(copied)
    assert copied.use_backend("reference")
    for got, right, other in zip(trial_logits(copied), wanted, whole, strict=True):
        # Activations that are rounded otherwise turn codes: 0.2; the model itself has 1.0.
        assert relative_error(got, right) < 0.5 * relative_error(other, right)
