"""Views of some layers: the logits of a model without the others, and not a weight more."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import tiny_architectures as architectures
import torch
from random_models import COMMON, SPECS, VOCAB, tiny_pair
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.core.batch import Batch, Span
from paceline.errors import ConfigError, UnsupportedModelError
from paceline.model.copies import layer_view
from paceline.model.paged.cache import PagedCache
from paceline.model.probe import register
from paceline.model.target import CausalModel
from support.recurrent_models import RECURRENT

TOKENS = [(7 * i + 3) % VOCAB for i in range(13)]


def logits_of(view: CausalModel, tokens: list[int] = TOKENS) -> torch.Tensor:
    """A prompt, then two tokens, through the paged cache: logits of all rows."""
    cache = view.new_cache(4, 4)
    first = len(tokens) - 2
    parts = []
    for start, stop in ((0, first), (first, len(tokens))):
        rows = range(start, stop)
        span = Span(0, 0, start, stop - start)
        batch = Batch(tokens[start:stop], rows, rows, (span,), ([0, 1, 2, 3],))
        with torch.inference_mode():
            parts.append(view(batch, cache).logits)
    return torch.cat(parts)


def with_layers_passing(reference: Any, model: CausalModel, skipped: set[int]) -> torch.Tensor:
    """transformers' own logits when the skipped layers' outputs are replaced by their inputs."""
    names = {id(module): name for name, module in model.hf.named_modules()}

    def undo(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    hooks = [
        reference.get_submodule(names[id(model.reference.layer(n))]).register_forward_hook(
            undo, with_kwargs=True
        )
        for n in skipped
    ]
    try:
        with torch.inference_mode():
            return reference(torch.tensor([TOKENS]), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()


def assert_close(got: torch.Tensor, wanted: torch.Tensor, most: float = 1e-4) -> None:
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() < most * max(1.0, float(wanted.abs().max()))


def storages(module: torch.nn.Module) -> set[int]:
    return {p.data_ptr() for p in (*module.parameters(), *module.buffers())}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_every_architecture_without_some_layers(name: str) -> None:
    model, reference = tiny_pair(name)
    layers = range(model.num_layers)
    most = 2e-3 if name in RECURRENT else 1e-4  # chunks and steps of states
    whole = logits_of(layer_view(model, layers))
    assert_close(whole, with_layers_passing(reference, model, set()), most)
    for kept in (0, 1):
        view = layer_view(model, [kept])
        wanted = with_layers_passing(reference, model, {*layers} - {kept})
        assert_close(logits_of(view), wanted, most)
        assert (wanted - whole).abs().max() > 1e-2  # it does make a difference
        assert storages(view.backend.hf) <= storages(model.hf)
    assert_close(logits_of(layer_view(model, layers)), whole)  # the model is as it was


def test_layers_whose_keys_others_read_stay() -> None:
    """Gemma 3n and 4: layers 2 and 3 attend to the keys of 0 and 1."""
    config = architectures.tiny_config("gemma3n_text:E2B")
    register()
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="paceline")
    model = CausalModel(hf, "shared")
    assert logits_of(layer_view(model, [0, 1, 3])).isfinite().all()
    with pytest.raises(UnsupportedModelError, match=r"keys of layers \[1\], so these cannot"):
        layer_view(model, [0, 2, 3])
    assert logits_of(layer_view(model, [0])).isfinite().all()


def six_layers(kind: str = "llama") -> Any:
    """A random model of six layers."""
    register()
    config, module = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(1)
    return module(
        config(**{**COMMON, "num_hidden_layers": 6, "attn_implementation": "paceline"})
    ).eval()


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2, 3, 5), (5,), (1, 4)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_equals_the_model_with_the_other_layers_deleted(
    kind: str, backend: str, layers: tuple[int, ...]
) -> None:
    hf = six_layers(kind)
    shorter = copy.deepcopy(hf)
    shorter.model.layers = torch.nn.ModuleList(shorter.model.layers[n] for n in layers)
    shorter.config.num_hidden_layers = len(layers)
    shorter.set_attn_implementation("eager")
    model = CausalModel(hf, kind)
    if not model.use_backend(backend):
        pytest.skip(str(model.backend_refusal))
    with torch.inference_mode():
        wanted = shorter(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert_close(logits_of(layer_view(model, layers)), wanted)


def test_only_the_chosen_layers_touch_the_cache() -> None:
    """Layer n of the view writes where layer n of the model would, and what it would, up to n."""
    for backend in ("native", "reference"):
        model = CausalModel(six_layers(), "six")
        model.use_backend(backend)
        caches = []
        for layers in (range(6), (0, 1, 3)):
            cache = PagedCache(model.cache_shapes, 4, 4, model.dtype, "cpu")
            rows = range(8)
            batch = Batch(TOKENS[:8], rows, rows, (Span(0, 0, 0, 8),), ([0, 1],))
            with torch.inference_mode():
                layer_view(model, layers)(batch, cache)
            caches.append(cache)
        whole, part = caches
        for layer in range(6):
            for a, b in zip(whole.kv(layer), part.kv(layer), strict=True):
                if layer in (0, 1):
                    assert torch.allclose(a, b, atol=1e-5)
                else:
                    assert not torch.allclose(a, b, atol=1e-3)
                assert b.any() == (layer in (0, 1, 3))


@pytest.mark.parametrize("layers", [(), (6,), (-1, 2)])
def test_layers_that_do_not_exist_are_refused(layers: tuple[int, ...]) -> None:
    model = CausalModel(six_layers(), "six")
    with pytest.raises(ConfigError, match="six has layers 0 to 5"):
        layer_view(model, layers)


def test_a_forward_bound_to_the_original_is_refused() -> None:
    """As libraries leave it that wrap ``forward``: the copy would run every layer."""
    hf = six_layers()
    hf.model.forward = MethodType(type(hf.model).forward, hf.model)
    model = CausalModel(hf, "patched")
    with pytest.raises(UnsupportedModelError, match="use another drafter"):
        layer_view(model, [0, 1])


def test_layers_with_a_second_stream_are_refused() -> None:
    class TwoStreams(torch.nn.Module):
        def __init__(self, layer: Any, ends: bool) -> None:
            super().__init__()
            self.inner, self.ends = layer, ends

        def forward(self, hidden: Any, **options: Any) -> Any:
            first, second = hidden if self.ends else (hidden, hidden)
            first = self.inner(first, **options)
            return first + second if self.ends else (first, second)

    hf = six_layers()
    for n in (2, 3):
        hf.model.layers[n] = TwoStreams(hf.model.layers[n], n == 3)
    model = CausalModel(hf, "two streams")
    with pytest.raises(UnsupportedModelError, match="cannot draft with layers"):
        layer_view(model, [0, 1, 3])
