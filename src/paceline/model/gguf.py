"""GGUF files, the format of llama.cpp. transformers reads and dequantises them.

The metadata is read first, so that a file that cannot be loaded is refused, in one line, before its
weights are read. Needs the extra ``paceline[gguf]``: the package ``gguf``.
"""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.stages import stage
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.files import user_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SUFFIX = ".gguf"
_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_END_ROLES = ("eos", "eot", "eom")  # end of text, of a turn, of a message
ROPE_FACTORS = {f"rope_{kind}.weight" for kind in ("freqs", "factors_long", "factors_short")}
PLAIN = {"F32", "F16", "BF16", "F64"}
_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")
# Values of tokenizer.ggml.pre: llama.cpp splits text at single digits and then as GPT-2 does, or
# only as GPT-2 does.
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_AS_GPT2 = {"gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"}


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a model's name refers to: the file itself, or the only one in a folder
    without a config.json; None if there is none. Raises ModelLoadError if there are several."""
    path = user_path(name)
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise ModelLoadError(
            f"folder {name} holds {len(files)} GGUF files; name one, as in {files[0]}"
        )
    return files[0] if files else None


def require_gguf(purpose: str) -> None:
    """Raises ModelLoadError if the package gguf is not installed."""
    try:
        importlib.import_module("gguf")
    except ImportError:
        raise ModelLoadError(
            f"the package gguf is needed {purpose}; run `pip install 'paceline[gguf]'`"
        ) from None


@dataclass(frozen=True)
class GgufFile:
    """A file's metadata. ``types``: tensors by quantisation type, the most frequent type first."""

    path: Path
    fields: Mapping[str, Any]
    types: Mapping[str, int]
    parameters: int
    stored_bytes: int
    vocab_size: int
    tensor_names: frozenset[str]
    rope_factors: Mapping[str, list[float]]  # tensors that scale RoPE frequencies, by name

    @property
    def architecture(self) -> str:
        return str(self.fields["general.architecture"])

    @property
    def quantised(self) -> tuple[str, ...]:
        """The quantised types among ``types``."""
        return tuple(name for name in self.types if name not in PLAIN)

    @cached_property
    def end_tokens(self) -> list[int]:
        """Ids of the tokens that end an answer."""
        ids = [self.fields.get(f"tokenizer.ggml.{role}_token_id") for role in _END_ROLES]
        return list(dict.fromkeys(int(token) for token in ids if token is not None))

    @property
    def sampling(self) -> dict[str, Any]:
        """The file's sampling options under their names in a generation config."""
        options: dict[str, Any] = {}
        for name, key in _SAMPLING.items():
            value = self.fields.get(f"general.sampling.{key}")
            if value is not None:  # stored as float32: six digits make 0.94999998 0.95
                options[name] = int(value) if name == "top_k" else float(f"{value:.6g}")
        return options and options | {"do_sample": options.get("temperature") != 0}

    @property
    def pre_tokenizer(self) -> str | None:
        """The stated pre-tokenizer, which splits text before merges, of a byte-level tokenizer."""
        byte_level = self.fields.get("tokenizer.ggml.model") == "gpt2"
        name = self.fields.get("tokenizer.ggml.pre") if byte_level else None
        return None if name is None else str(name)

    @property
    def has_unknown_pre_tokenizer(self) -> bool:
        """Whether neither we nor transformers know the file's pre-tokenizer."""
        known = {None, *_DIGITS_APART, *_AS_GPT2}
        known |= {*_of_transformers("gguf.gguf_tokenizer_mapping", "GGUF_PRE_TOKENIZER_SPLITS")}
        return self.pre_tokenizer not in known


def read_gguf(path: Path) -> GgufFile:
    """Read a file's metadata. Raises ModelLoadError (no such file, not a GGUF file, damaged, or the
    package gguf missing), UnsupportedModelError (unknown architecture or quantisation type)."""
    if not path.is_file():
        raise ModelLoadError(f"GGUF file {path} does not exist; check the path")
    require_gguf("to read GGUF files")
    status = path.stat()
    return _read(path.absolute(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)  # reading a vocabulary takes seconds, and model and tokenizer both need it
def _read(path: Path, modified: int, size: int) -> GgufFile:
    from gguf import GGUFReader, GGUFValueType, dequantize

    class Reader(GGUFReader):
        """As GGUFReader, which goes on past the end of the file where a length in it is damaged."""

        def _get(self, at: Any, dtype: Any, count: Any = 1, **order: Any) -> Any:  # type: ignore
            numbers = super()._get(at, dtype, count, **order)
            if len(numbers) < count:
                raise ValueError("the file ends before this value")
            return numbers

        def _get_field_parts(self, at: Any, kind: Any) -> Any:
            if kind == GGUFValueType.ARRAY and self._get(at + 4, "u8")[0] > len(self.data) - at:
                raise ValueError("the file ends before this array")
            return super()._get_field_parts(at, kind)

    try:
        with stage(f"reading the header of {path.name}"):
            reader = Reader(path)
            fields = {
                key: field.contents()
                for key, field in reader.fields.items()
                if len(field.types) < 2 or not key.startswith("tokenizer.")  # skip its long arrays
            }
    except OSError as error:
        raise ModelLoadError(f"GGUF file {path} cannot be read: {error.strerror}") from None
    except Exception as error:  # numpy and struct raise various errors on damaged bytes
        kind = _UNKNOWN_TYPE.search(str(error))
        if kind is not None:
            raise UnsupportedModelError(
                f"{path} holds the quantisation type number {kind[1]}, which the installed gguf "
                "package does not know; update it, or take another quantisation"
            ) from None
        raise ModelLoadError(
            f"GGUF file {path} is damaged, cut short or no GGUF at all; download or copy it again"
        ) from None
    tensors, tokens = reader.tensors, reader.fields.get("tokenizer.ggml.tokens")
    factors = [tensor for tensor in tensors if tensor.name in ROPE_FACTORS]
    file = GgufFile(
        path,
        fields,
        types=dict(Counter(tensor.tensor_type.name for tensor in tensors).most_common()),
        parameters=sum(int(tensor.n_elements) for tensor in tensors),
        stored_bytes=sum(int(tensor.n_bytes) for tensor in tensors),
        vocab_size=0 if tokens is None else len(tokens.data),
        tensor_names=frozenset(tensor.name for tensor in tensors),
        rope_factors={t.name: dequantize(t.data, t.tensor_type).tolist() for t in factors},
    )
    _check(file)
    return file


def _check(file: GgufFile) -> None:
    name, kind = file.fields.get("general.architecture"), file.fields.get("general.type", "model")
    if not isinstance(name, str) or kind != "model" or not file.tensor_names:
        raise ModelLoadError(
            f"GGUF file {file.path} holds no model (type {kind}, tensors: "
            f"{len(file.tensor_names)}); give the model's own file"
        )
    known = sorted(architectures())
    if name not in known:
        raise UnsupportedModelError(
            f"{file.path} holds a model of the architecture {name}, which is not read here from "
            f"GGUF; take the model's own folder (safetensors), or one of {', '.join(known)}"
        )
    parts = file.fields.get("split.count") or 1
    if int(parts) > 1:
        raise ModelLoadError(
            f"{file.path} is one of {parts} parts of a model; join them with llama.cpp's "
            "gguf-split --merge"
        )


@contextmanager
def dequantising(path: Path) -> Iterator[None]:
    """A stage in which transformers shows no progress bar, and gguf's table of tensor names is
    cached: transformers builds it for every submodule, which took 25 of 27 s for a model of 46
    layers."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reader

    def silent(items: Any, **_: Any) -> Any:
        return items

    names = lru_cache(gguf.get_tensor_name_map)
    with stage(f"dequantising {path.name}"), ExitStack() as undo:
        for owner, name, new in ((reader, "tqdm", silent), (gguf, "get_tensor_name_map", names)):
            if hasattr(owner, name):
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, new)
        yield


def architectures() -> frozenset[str]:
    """Names of the architectures that transformers reads from GGUF."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    new = _of_transformers("gguf", "GGUF_ARCHS")
    return frozenset({*GGUF_SUPPORTED_ARCHITECTURES, *new} - {"general", "tokenizer"})


def _of_transformers(module: str, name: str) -> Iterable[str]:
    """A table of ``transformers.integrations``; empty in versions that do not have it."""
    with suppress(ImportError, AttributeError):
        table: Iterable[str] = getattr(
            importlib.import_module(f"transformers.integrations.{module}"), name
        )
        return table
    return ()


def corrected_tokenizer(backend: Tokenizer, file: GgufFile) -> Tokenizer:
    """The tokenizer with the file's pre-tokenizer, and without tokens that the file does not have:
    transformers adds GPT-2's <|endoftext|> to every byte-level vocabulary."""
    from tokenizers import Tokenizer, pre_tokenizers

    content = json.loads(backend.to_str())
    added = [token for token in content["added_tokens"] if token["id"] < file.vocab_size]
    if len(added) < len(content["added_tokens"]):
        backend = Tokenizer.from_str(json.dumps({**content, "added_tokens": added}))
    if file.pre_tokenizer in _DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, as_gpt2])
    return backend
