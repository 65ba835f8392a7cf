"""Reads a model's folder: architecture, tokenizer, and whether its tensors match its config.
Weights are mapped into memory, and only samples of them are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from paceline.draft.heads.mtp import mtp_names
from paceline.draft.spec import TargetShape
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.lab.doctor.findings import ERROR, NOTE, Finding, finding, refusal
from paceline.model import loading
from paceline.model.backends.reference.recurrent import adapt_mixers
from paceline.model.gguf import GgufFile, gguf_file, read_gguf
from paceline.model.gguf_weights import check_all_tensors_used
from paceline.model.names import SMALL, check_hub_name, hub_message, is_path, located
from paceline.model.paged.cache import bytes_per_token
from paceline.model.paged.states import bytes_per_state
from paceline.model.precision import quantization_of
from paceline.model.quantised.convert import split_experts
from paceline.model.target import UNLIMITED_POSITIONS
from paceline.model.tensorfile import load_tensors
from paceline.model.text_part import key_mapping
from paceline.model.tokenizer import TOKENIZER_FILES

# Dtypes by their names on the hub. Of the others only the size matters.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
_DTYPES |= {"BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32}


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder, or the files of it that could be fetched. ``tensors``: by name; on the
    meta device if the weights are on the hub (``remote``). ``absent``: missing files that an index
    names. ``damaged``: a message for each damaged file. ``pickled``: weight files that cannot be
    inspected. ``mapped``: real paths of the files that are mapped into memory."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    pickled: list[str] = field(default_factory=list)
    mapped: list[str] = field(default_factory=list)
    remote: bool = False
    gguf: GgufFile | None = None  # then ``folder`` is that file, and ``tensors`` is empty

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def whole(self) -> bool:
        return bool(self.tensors) and not (self.absent or self.damaged or self.pickled)


def read_files(name: str, weights: Iterable[str] = ()) -> ModelFiles:
    """Read a built-in model, a local folder or a hub model. ``weights``: the
    possible names of the weight file, by default model.safetensors or the shards of an index.
    Raises ModelLoadError if there is no such folder or no readable config.json in it, and
    UnsupportedModelError for an unsupported kind of GGUF file."""
    path = located(name)
    if (gguf := gguf_file(path)) is not None:
        file = read_gguf(gguf)
        config = {"model_type": file.architecture}
        return ModelFiles(name, gguf, config, mapped=[str(gguf.resolve())], gguf=file)
    folder = Path(path) if is_path(path) else _fetch(name)
    files = ModelFiles(name, folder, loading.check_folder(name, folder))
    for weight in _weights(files, tuple(weights)):
        if not os.path.isfile(weight):
            files.absent.append(weight.name)
        elif weight.suffix != ".safetensors":
            files.pickled.append(weight.name)
        else:
            try:
                files.mapped.append(str(weight.resolve()))
                files.tensors.update(load_tensors(weight))
            except ModelLoadError as error:
                files.damaged.append(str(error).partition("; ")[0])  # kinds.md has the cure
    if is_path(path) or files.tensors or files.absent or files.damaged or files.pickled:
        return files
    return replace(files, tensors=_remote_tensors(name), remote=True)


def _weights(files: ModelFiles, wanted: tuple[str, ...]) -> list[Path]:
    folder = files.folder
    if wanted:
        return [f for f in (folder / n for n in wanted) if f.is_file()][:1]
    if (single := folder / "model.safetensors").is_file():
        return [single]
    if (index := folder / "model.safetensors.index.json").is_file():
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [folder / file for file in sorted(set(named.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            files.damaged.append(f"{index.name} is no index of weights ({error})")
            return []
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _fetch(name: str) -> Path:
    """The local snapshot of a hub model, or else its small files. Raises ModelLoadError."""
    from huggingface_hub import snapshot_download

    check_hub_name(name)
    try:
        with suppress(OSError, ValueError):  # it is not downloaded
            return Path(snapshot_download(name, local_files_only=True))
        return Path(snapshot_download(name, allow_patterns=list(SMALL)))
    except (OSError, ValueError) as error:
        raise ModelLoadError(hub_message(name, error)) from None


def _remote_tensors(name: str) -> dict[str, torch.Tensor]:
    """Tensors without data, from the headers on the hub; empty if these cannot be read."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        headers = get_safetensors_metadata(name).files_metadata.values()
    except (OSError, ValueError, NotASafetensorsRepoError, SafetensorsParsingError):
        return {}
    entries = {key: entry for header in headers for key, entry in header.tensors.items()}
    dtypes = {key: _DTYPES.get(str(entry.dtype), torch.int8) for key, entry in entries.items()}
    with torch.device("meta"):
        return {key: torch.empty(entries[key].shape, dtype=dtypes[key]) for key in entries}


@dataclass(frozen=True, kw_only=True)
class Model(TargetShape):
    """A causal language model that is not loaded. ``about``: "target" or "draft". ``whole_config``
    is that of transformers, ``config`` that of the text part."""

    about: str
    files: ModelFiles
    whole_config: Any
    config: Any
    tokenizer: PreTrainedTokenizerFast | None

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def quantisation(self) -> Mapping[str, Any] | None:
        """The quantization_config of config.json; None for unquantised weights."""
        return quantization_of(self.whole_config)

    @property
    def parameters(self) -> int:
        """The number of parameters in the files, or of the skeleton if these are incomplete."""
        if self.files.whole and self.quantisation is None:
            floats = (t for t in self.files.tensors.values() if t.is_floating_point())
            return sum(tensor.numel() for tensor in floats)
        return sum(p.numel() for p in self.skeleton.parameters())

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values over all layers, in a cache of this dtype."""
        config = self.config
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        keys = values = getattr(config, "head_dim", None) or self.hidden_size // heads
        if getattr(config, "kv_lora_rank", None):  # latent attention, as transformers expands it
            keys, values = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
            shared = heads
        layers = self.num_layers - loading.layers_without_keys(self.whole_config)
        return bytes_per_token([(shared, keys, values)] * layers, dtype)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a state of all recurrent layers, in a model of this dtype."""
        if not loading.recurrent_layers(self.whole_config):
            return 0
        module = skeleton_of(self.whole_config).to(dtype)
        with torch.inference_mode():
            return bytes_per_state(adapt_mixers(module, self.num_layers))

    @cached_property
    def skeleton(self) -> Any:
        return split_experts(skeleton_of(self.whole_config))


def describe(files: ModelFiles, about: str) -> tuple[Model | None, list[Finding]]:
    """The model of a folder, and findings; None for a refused one, with the reason at the end."""
    findings: list[Finding] = []
    foreign = bool(files.config.get("auto_map"))
    try:
        config = loading.read_config(files.name, str(files.folder))
        loading.check_architecture(config)
        text_config = config.get_text_config(decoder=True)
        if files.gguf is not None:
            check_all_tensors_used(files.gguf, skeleton_of(config))
    except (ModelLoadError, UnsupportedModelError) as error:
        return None, [refusal("remote-code" if foreign else "architecture-refused", error)]
    if foreign:
        findings.append(finding("remote-code", cure="Nothing to do.", severity=NOTE))
    tokenizer = None
    known = any((files.folder / file).is_file() for file in TOKENIZER_FILES)
    if files.gguf is None and not known:
        severity = ERROR if about == "target" else NOTE
        findings.append(finding("tokenizer-absent", name=files.name, severity=severity))
    else:
        try:
            tokenizer = loading.load_tokenizer(str(files.folder))
        except ModelLoadError as error:
            findings.append(refusal("tokenizer-absent", error))
    positions = getattr(text_config, "max_position_embeddings", None) or UNLIMITED_POSITIONS
    sizes = (text_config.hidden_size, text_config.vocab_size, text_config.num_hidden_layers)
    configs = {"whole_config": config, "config": text_config}
    model = Model(*sizes, positions, about=about, files=files, tokenizer=tokenizer, **configs)
    if model.quantisation is None:  # these are described by machine.py
        shape: Any = {"layers": model.num_layers, "width": model.hidden_size}
        shape |= {"kind": config.model_type, "parameters": millions(model.parameters)}
        findings.append(finding("architecture-supported", **shape))
    return model, findings


def millions(count: float) -> str:
    """A number of parameters in millions or billions: 10.5M, 7.2B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def skeleton_of(config: Any) -> Any:
    """The module that transformers builds from a config, without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config)
    module.tie_weights()
    return module


def check_tensors(model: Model) -> Iterator[Finding]:
    """Compare names and shapes of the tensors with the config, as loading does."""
    if not model.files.whole or model.quantisation is not None:
        return
    kind: Any = loading.causal_class(model.whole_config)
    with loading.quiet():
        module, info = kind.from_pretrained(
            None,
            config=model.whole_config,
            state_dict={key: tensor.to("meta") for key, tensor in model.files.tensors.items()},
            device_map={"": "meta"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            key_mapping=key_mapping(kind),
        )
    try:
        loading.check_loaded(model.name, info)
    except ModelLoadError as error:
        yield refusal("tensors-refused", error)
        return
    if further := mtp_names(model.files.tensors, model.num_layers):
        yield finding("mtp-layer", count=len(further))
    count = len(module.state_dict()) - len(module.all_tied_weights_keys or {})
    yield finding("weights-complete", count=count)
