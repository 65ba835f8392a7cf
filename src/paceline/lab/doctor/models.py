"""What a model's folder says of itself: architecture, tokenizer, and whether its tensors are those
that its config asks for. Weights are mapped into memory, and read only where they are sampled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from paceline.draft.heads.mtp import mtp_name, mtp_names
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
from paceline.model.quantised.convert import split_experts
from paceline.model.target import UNLIMITED_POSITIONS
from paceline.model.tensorfile import verify
from paceline.model.text_part import key_mapping
from paceline.model.tokenizer import TOKENIZER_FILES

_TIE = (
    'If the model ties its embeddings, write "tie_word_embeddings": true into config.json; '
    "otherwise copy the weights again."
)
# By their names on the hub; of all others only the number of bytes matters.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
_DTYPES |= {"BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32}


@dataclass(frozen=True)
class ModelFiles:
    """A folder, or what of it could be fetched. ``tensors`` by their names in the files; on the
    meta device if the weights are on the hub (``remote``). ``absent``: files that an index names
    and the folder lacks. ``damaged``: what is wrong with which file. ``pickled``: weights that
    cannot be looked into. ``mapped``: real paths of those that are."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    pickled: list[str] = field(default_factory=list)
    mapped: list[str] = field(default_factory=list)
    remote: bool = False
    gguf: GgufFile | None = None  # then ``folder`` is that file, and ``tensors`` are not named

    @property
    def parameters(self) -> int:
        return sum(t.numel() for t in self.tensors.values() if t.is_floating_point())

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def whole(self) -> bool:
        return bool(self.tensors) and not (self.absent or self.damaged or self.pickled)

    def has(self, *names: str) -> bool:
        return any((self.folder / name).is_file() for name in names)


def read_files(name: str, weights: Iterable[str] = ()) -> ModelFiles:
    """Look into a built-in, a local folder or a hub name; checksums are checked. ``weights``: file
    names that count, by default model.safetensors or the shards of an index. Raises ModelLoadError
    if there is no such folder or no readable config.json in it, and UnsupportedModelError on a GGUF
    file of a kind that is not read."""
    path = located(name)
    if (gguf := gguf_file(path)) is not None:
        file = read_gguf(gguf)
        config = {"model_type": file.architecture}
        return ModelFiles(name, gguf, config, mapped=[str(gguf.resolve())], gguf=file)
    folder = Path(path) if is_path(path) else _fetch(name)
    files = ModelFiles(name, folder, loading.check_folder(name, folder))
    for weight in _weights(files, tuple(weights)):
        if not weight.is_file():
            files.absent.append(weight.name)
        elif weight.suffix != ".safetensors":
            files.pickled.append(weight.name)
        else:
            try:
                verify(weight)
                files.mapped.append(str(weight.resolve()))
                with safe_open(weight, framework="pt") as opened:
                    names = opened.keys()
                    files.tensors.update({key: opened.get_tensor(key) for key in names})
            except ModelLoadError as error:
                files.damaged.append(str(error).partition("; ")[0])  # kinds.md has a cure
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
    """The snapshot of a hub model that is on this machine, or its small files. ModelLoadError."""
    from huggingface_hub import snapshot_download

    check_hub_name(name)
    try:
        with suppress(OSError, ValueError):  # those that are not downloaded
            return Path(snapshot_download(name, local_files_only=True))
        return Path(snapshot_download(name, allow_patterns=list(SMALL)))
    except (OSError, ValueError) as error:
        raise ModelLoadError(hub_message(name, error)) from None


def _remote_tensors(name: str) -> dict[str, torch.Tensor]:
    """By the headers on the hub; empty if there are none to be read."""
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
    is transformers', ``config`` that of the text part. ``tokenizer`` is None if there is none."""

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
        """What config.json says of packed weights, None if they are plain numbers."""
        options = self.files.config.get("quantization_config")
        return options if options is None or isinstance(options, Mapping) else {}

    @property
    def parameters(self) -> int:
        """Of the files, or of the skeleton where the files do not tell."""
        if self.files.whole and self.quantisation is None:
            return self.files.parameters
        return sum(p.numel() for p in self.skeleton.parameters())

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Keys and values of one token over all layers, in a cache of this dtype."""
        config = self.config
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        keys = values = getattr(config, "head_dim", None) or self.hidden_size // heads
        if getattr(config, "kv_lora_rank", None):  # latent attention: as transformers unpacks it
            keys, values = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
            shared = heads
        layers = self.num_layers - loading.layers_without_keys(self.whole_config)
        return bytes_per_token([(shared, keys, values)] * layers, dtype)

    @property
    def recurrent_layers(self) -> list[str]:
        """The kinds of the layers that have a state."""
        return loading.recurrent_layers(self.whole_config)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Of a state of all its recurrent layers, in a model of this dtype."""
        if not self.recurrent_layers:
            return 0
        module = skeleton_of(self.whole_config).to(dtype)
        with torch.inference_mode():
            return bytes_per_state(adapt_mixers(module, self.num_layers))

    @cached_property
    def skeleton(self) -> Any:
        return split_experts(skeleton_of(self.whole_config))


def describe(files: ModelFiles, about: str) -> tuple[Model | None, list[Finding]]:
    """The model of a folder; None, with the reason among the findings, if it is refused."""
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
    if files.gguf is None and not files.has(*TOKENIZER_FILES):
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
    if model.quantisation is None:  # machine.py tells of those
        shape: Any = {"layers": model.num_layers, "width": model.hidden_size}
        shape |= {"kind": config.model_type, "parameters": millions(model.parameters)}
        findings.append(finding("architecture-supported", **shape))
    return model, findings


def millions(count: float) -> str:
    """A number of parameters as people say it: 10.5M, 7.2B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def skeleton_of(config: Any) -> Any:
    """The module that transformers builds of a config, without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config)
    module.tie_weights()
    return module


def check_tensors(model: Model) -> Iterator[Finding]:
    """Whether the files hold what the config asks for, by name and shape, as transformers does."""
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
            ignore_mismatched_sizes=True,  # reported below
            key_mapping=key_mapping(kind),
        )
    missing, extra = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    wrong = sorted(info["mismatched_keys"])
    further = mtp_names(model.files.tensors, model.num_layers)
    if further:
        # By rule, as the library joins the names of experts.
        extra = [key for key in extra if not mtp_name(key, model.num_layers)]
        yield finding("mtp-layer", count=len(further))
    if missing:
        cure = _TIE if missing == ["lm_head.weight"] else None
        yield finding("tensors-missing", cure=cure, names=_some(missing))
    if wrong:
        names, shapes, due = zip(*wrong, strict=True)
        first, shape = _some(names), list(shapes[0])
        yield finding("tensors-misshapen", names=first, held=shape, due=list(due[0]))
    if extra and "vision_config" not in model.files.config:  # whose tower is not read
        yield finding("tensors-extra", names=_some(extra))
    if not (missing or wrong):
        count = len(module.state_dict()) - len(module.all_tied_weights_keys or {})
        yield finding("weights-complete", count=count)


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
