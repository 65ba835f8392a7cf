"""Which models the kernels take, what is said of the others, and how the library is built."""

from __future__ import annotations

import shutil
import stat
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import native_model
from random_models import tiny_pair

from paceline.core.batch import Batch, Span
from paceline.errors import ConfigError
from paceline.kernels import compile as compiling
from paceline.kernels.compile import NativeUnavailableError, library_file
from paceline.kernels.library import library
from paceline.model.backends.native import model as using
from paceline.model.backends.native.packing import PackedLinear
from paceline.model.copies import layer_view
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from support.heard_stages import heard

Said = list[str]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """So that nothing is said of it later."""
    library()


@pytest.fixture
def said() -> Iterator[Said]:
    with heard() as listener:
        yield listener.lines


def logits(model: Any) -> torch.Tensor:
    whole = getattr(model, "model", model)  # of a view
    cache = PagedCache(whole.cache_shapes, 1, 16, whole.dtype, "cpu")
    rows = range(9)
    with torch.inference_mode():
        out: torch.Tensor = model(
            Batch(range(3, 12), rows, rows, (Span(0, 0, 0, 9),), ((0,),)), cache
        )
    return out.logits


@pytest.mark.parametrize(
    "name, why",
    [
        ("qwen2_moe", "Qwen2MoeForCausalLM is no decoder of a known shape"),
        ("llama4", "layers that see chunks are not known"),
    ],
)
def test_others_run_on_the_reference_and_say_so(name: str, why: str, said: Said) -> None:
    model, _ = tiny_pair(name)
    assert not model.use_backend("native") and model.backend.name == "reference"
    assert said == [f"{name} runs on the reference backend: {why}"]


@pytest.mark.parametrize(
    "name, why", [("llama", None), ("qwen2_moe", "no decoder of a known shape")]
)
def test_auto_is_bf16_where_the_kernels_run(
    name: str, why: str | None, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor without bf16 instructions; torch would emulate them, so it has the weights
    as they are in the file."""
    monkeypatch.setattr("paceline.model.loading.cpu_has_bf16", lambda: False)
    saved = tiny_pair(name)[0].hf
    saved.save_pretrained(tmp_path)
    model = CausalModel.load(str(tmp_path), device="cpu")
    plain = CausalModel.load(str(tmp_path), device="cpu", backend="reference")
    assert plain.dtype == torch.float32
    if why is None:
        assert (model.backend.name, model.dtype, said) == ("native", torch.bfloat16, [])
        return
    assert (model.backend.name, model.dtype) == ("reference", torch.float32)
    assert why in model.backend_reason and len(said) == 1 and why in said[0]
    assert torch.equal(logits(model), logits(plain))


def test_a_dtype_that_the_kernels_do_not_know(said: Said) -> None:
    model, _ = tiny_pair("llama", torch.float16)
    assert not model.use_backend("native")
    assert said == ["llama runs on the reference backend: no weights in float16"]


@pytest.mark.parametrize(
    "name, change",
    [("mistral", "scaling"), ("mistral", "windows"), ("mistral", "norms"), ("mixtral", "norms")],
)
def test_what_disagrees_with_the_reference_is_not_used(
    name: str,
    change: str,
    said: Said,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is as it was: its own modules, with the very same weights."""
    given, _ = tiny_pair(name)
    given.hf.save_pretrained(tmp_path)
    before = {name: tensor.clone() for name, tensor in given.hf.state_dict().items()}
    wanted = logits(given)
    right = using.describe_decoder

    def wrong(*arguments: Any) -> Any:
        shape: Any = right(*arguments)
        other = {"scaling": 0.1, "windows": (1, 1), "norms": shape.norms[::-1]}[change]
        return replace(shape, **{change: other})

    monkeypatch.setattr(using, "describe_decoder", wrong)
    model = CausalModel.load(str(tmp_path), "float32", "cpu")
    assert model.backend.name == "reference" and "logits are" in model.backend_reason
    assert "the kernels' logits are" in said[0] and len(said) == 1
    assert torch.equal(logits(model), wanted)
    after = model.hf.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_plain_weights_are_given_up_one_by_one() -> None:
    model, _ = tiny_pair("llama")
    linears = [m for m in model.hf.modules() if type(m) is torch.nn.Linear]
    weights = [weakref.ref(m.weight) for m in linears]
    dense = [m.weight.detach().clone() for m in linears]
    del linears
    assert model.use_backend("native")
    assert all(weight() is None for weight in weights)
    packed = [m for m in model.hf.modules() if isinstance(m, PackedLinear)]
    assert all(torch.equal(m.weight, weight) for m, weight in zip(packed, dense, strict=True))


def test_its_modules_still_compute_the_same() -> None:
    """What asks the transformers module itself, as a head that shares the target's, is right."""
    for name in ("qwen2", "gemma2", "mixtral"):
        model, reference = tiny_pair(name)
        assert model.use_backend("native")
        native = logits(model)
        assert model.use_backend("reference")
        assert torch.allclose(logits(model), native, atol=1e-4)
        ids = torch.arange(3, 12)[None]
        with torch.inference_mode():
            wanted = reference(ids, use_cache=False).logits[0]
        assert torch.allclose(native, wanted, atol=1e-4 * float(wanted.abs().max()))


def test_a_part_of_the_layers() -> None:
    model, _ = tiny_pair("qwen3")
    wanted = [logits(layer_view(model, layers)) for layers in ([0], [1])]
    assert model.use_backend("native")
    for layers, want in zip(([0], [1]), wanted, strict=True):
        assert torch.allclose(logits(layer_view(model, layers)), want, atol=1e-4)


def test_two_models_in_one_process() -> None:
    first, second = (native_model(name, torch.float32) for name in ("llama", "gemma3"))
    wanted = logits(first), logits(second)
    for _ in range(3):
        assert torch.equal(logits(second), wanted[1]) and torch.equal(logits(first), wanted[0])


@pytest.mark.parametrize(("token", "position"), [(-1, 0), (10**6, 0), (3, -1), (3, 9)])
def test_what_is_out_of_range(token: int, position: int) -> None:
    model = native_model("llama", torch.float32)
    cache = PagedCache(model.cache_shapes, 1, 16, model.dtype, "cpu")
    batch = Batch([token], [position], [0], (Span(0, 0, 0, 1),), ((0,),))
    with pytest.raises(IndexError, match="a token id or a position is out of range"):
        model(batch, cache)


def test_a_pending_row_at_the_place_of_a_tree() -> None:
    """It has no path in the tree: its keys there cannot be looked up."""
    model = native_model("llama", torch.float32)
    cache = PagedCache(model.cache_shapes, 1, 16, model.dtype, "cpu")
    rows = range(3)
    span = Span(0, 0, 0, 1, (-1, -1))
    batch = Batch(rows, [1, 1, 1], rows, (span,), ((0,),))
    with pytest.raises(IndexError, match="a token id or a position is out of range"):
        model(batch, cache)


def test_an_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="backend 'cuda' is not known; use one of auto, native"):
        CausalModel.load("paceline/tiny", backend="cuda")


# -- building ------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is built yet, and nothing is loaded."""
    monkeypatch.setenv("PACELINE_NATIVE_CACHE", str(tmp_path / "built"))
    library.cache_clear()
    yield tmp_path
    library.cache_clear()


def compiler(folder: Path, body: str) -> str:
    file = folder / "compiler"
    file.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit 0\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def test_without_a_compiler(fresh: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    model, _ = tiny_pair("llama")
    assert not model.use_backend("native")
    what = "no g++ is there"
    assert said == [f"llama runs on the reference backend: {what}"]


def test_a_library_that_lies_there_needs_no_compiler(
    fresh: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'while [ "$1" != -o ]; do shift; done\n: > "$2"'
    monkeypatch.setenv("CXX", compiler(fresh, body))
    built = library_file()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(fresh))
    assert library_file() == built and compiling.is_built()
    monkeypatch.setattr(compiling, "_OPTIONS", ("-O0",))
    with pytest.raises(NativeUnavailableError, match=r"no g\+\+ is there"):
        library_file()


def test_clang_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its objects want its own OpenMP library, and torch has loaded another."""
    file = fresh / "clang++"
    file.write_text("#!/bin/sh\necho Debian clang version 14.0.6\n")
    file.chmod(0o755)
    monkeypatch.setenv("CXX", str(file))
    with pytest.raises(NativeUnavailableError, match=r"is clang, and the kernels need g\+\+"):
        library_file()


def test_switched_off(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """By who asks for it, so nothing need be said."""
    monkeypatch.setenv("PACELINE_NATIVE", "off")
    library.cache_clear()
    model, _ = tiny_pair("llama")
    assert (
        not model.use_backend("native")
        and "asks for no kernels" in model.backend_reason
        and not said
    )
    library.cache_clear()


def test_a_compiler_that_fails(fresh: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = compiler(fresh, "echo 'vec.h:1:1: error: what is this' >&2; exit 1")
    monkeypatch.setenv("CXX", broken)
    model, _ = tiny_pair("llama")
    assert not model.use_backend("native")
    assert said == [
        f"llama runs on the reference backend: {broken} fails: vec.h:1:1: error: what is this"
    ]
    assert not list((fresh / "built").glob("*/*.so"))


def test_what_failed_is_not_tried_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all who ask for the kernels, each time for minutes."""
    monkeypatch.setenv("CXX", compiler(fresh, f"echo run >> {fresh}/runs; exit 1"))
    runs = set()
    for _ in range(3):
        with pytest.raises(NativeUnavailableError, match="fails: no message"):
            library_file()
        runs.add(len((fresh / "runs").read_text().split("run")))
    assert len(runs) == 1


def test_built_once_for_a_source(fresh: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f'echo run >> {fresh}/runs\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"'
    monkeypatch.setenv("CXX", compiler(fresh, body))

    def runs() -> int:
        return len((fresh / "runs").read_text().split())

    first = library_file()
    count = runs()
    assert first.is_file() and len(said) == 1 and said[0].startswith("built the native kernels")
    assert library_file() == first and runs() == count and len(said) == 1
    sources = fresh / "csrc"
    shutil.copytree(compiling.SOURCES, sources)
    (sources / "vec.h").write_text("// another one")
    monkeypatch.setattr(compiling, "SOURCES", sources)
    assert library_file() != first and runs() == 2 * count


def test_a_file_that_is_no_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'while [ "$1" != -o ]; do shift; done\n: > "$2"'
    monkeypatch.setenv("CXX", compiler(fresh, body))
    with pytest.raises(NativeUnavailableError, match="the kernels cannot be loaded"):
        library()


def test_an_instruction_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "mmx")
    library.cache_clear()
    with pytest.raises(NativeUnavailableError, match="PACELINE_NATIVE=mmx cannot run here; use"):
        library()
    monkeypatch.delenv("PACELINE_NATIVE")
    library.cache_clear()
