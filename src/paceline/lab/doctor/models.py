"""A model described by its files: architecture, sizes, context and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.lab.doctor.files import ModelFiles, TensorEntry
from paceline.lab.doctor.findings import ERROR, NOTE, Finding, finding, parted
from paceline.model.gguf_weights import check_taken
from paceline.model.loading import check_architecture, load_tokenizer, read_config
from paceline.model.paged.cache import bytes_per_token
from paceline.model.target import UNLIMITED_POSITIONS

_TIE = (
    'If the model ties its embeddings, write "tie_word_embeddings": true into config.json; '
    "otherwise copy the weights again."
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Model:
    """A causal language model that is not loaded. ``about``: "target" or "draft".

    ``config`` is transformers' config of the text part. ``tokenizer`` is None if there is none.
    """

    about: str
    files: ModelFiles
    whole_config: Any
    config: Any
    tokenizer: PreTrainedTokenizerFast | None

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def vocab_size(self) -> int:
        """Rows of logits."""
        return int(self.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def max_positions(self) -> int:
        limit = getattr(self.config, "max_position_embeddings", None)
        return int(limit or UNLIMITED_POSITIONS)

    @property
    def quantisation_options(self) -> Mapping[str, Any] | None:
        """What config.json says of packed weights, None if they are plain numbers."""
        quantisation = self.files.config.get("quantization_config")
        return quantisation if quantisation is None or isinstance(quantisation, Mapping) else {}

    @property
    def quantisation(self) -> str | None:
        """The method by which the weights are packed, None if they are plain numbers."""
        options = self.quantisation_options
        return None if options is None else str(options.get("quant_method") or "unknown")

    @property
    def parameters(self) -> int:
        """Of the files, or of the skeleton where the files do not tell."""
        if self.files.whole and self.quantisation is None:
            return self.files.parameters
        return sum(p.numel() for p in self.skeleton.parameters())

    def weight_bytes(self, dtype: torch.dtype | None) -> int:
        """In memory, loaded in this dtype; None keeps what the files hold."""
        if (dtype is None or self.quantisation) and self.files.stored_bytes:
            return self.files.stored_bytes
        return self.parameters * (dtype or torch.bfloat16).itemsize

    def cache_bytes(self, dtype: torch.dtype | None) -> int:
        """Keys and values of one token over all layers, in a cache of this dtype."""
        config = self.config
        heads = int(config.num_attention_heads)
        shared = int(getattr(config, "num_key_value_heads", None) or heads)
        width = int(getattr(config, "head_dim", None) or self.hidden_size // heads)
        keys = values = width
        if getattr(config, "kv_lora_rank", None):  # latent attention: as transformers unpacks it
            shared = heads
            keys = int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim)
            values = int(config.v_head_dim)
        shapes = [(shared, keys, values)] * self.num_layers
        return bytes_per_token(shapes, dtype or torch.bfloat16)

    @cached_property
    def skeleton(self) -> Any:
        """The module that transformers builds of the config, without weights."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.whole_config)


def describe(files: ModelFiles, about: str) -> tuple[Model | None, list[Finding]]:
    """The model of a folder; None, with the reason among the findings, if it is refused."""
    findings: list[Finding] = []
    foreign = bool(files.config.get("auto_map"))
    try:
        config = read_config(files.name, str(files.folder))
        check_architecture(config)
        if files.gguf is not None:
            whole = Model(about, files, config, config.get_text_config(decoder=True), None)
            check_taken(files.gguf, whole.skeleton)
    except (ModelLoadError, UnsupportedModelError) as error:
        problem, cure = parted(error)
        code = "remote-code" if foreign else "architecture-refused"
        return None, [finding(code, about, problem, cure=cure)]
    if foreign:
        text = "the folder brings code of its own (auto_map), which is not run"
        findings.append(finding("remote-code", about, text, NOTE, "Nothing to do."))
    tokenizer = None
    if files.gguf is None and not files.has(*_TOKENIZER_FILES):
        severity = ERROR if about == "target" else NOTE
        text = f"there is no tokenizer in {files.name}"
        findings.append(finding("tokenizer-absent", about, text, severity))
    else:
        try:
            tokenizer = load_tokenizer(str(files.folder))
        except ModelLoadError as error:
            problem, cure = parted(error)
            findings.append(finding("tokenizer-absent", about, problem, ERROR, cure))
    model = Model(about, files, config, config.get_text_config(decoder=True), tokenizer)
    if model.quantisation is not None:
        return model, findings  # precision.py tells of those
    text = (
        f"{config.model_type}: {model.num_layers} attention layers of width "
        f"{model.hidden_size}, {millions(model.parameters)} parameters"
    )
    return model, [*findings, finding("architecture-supported", about, text)]


def millions(count: float) -> str:
    """A number of parameters as people say it: 10.5M, 7.2B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


# -- the weights against the config ------------------------------------------------------------


def check_tensors(model: Model) -> Iterator[Finding]:
    """Whether the files hold what the config asks for, by name and shape."""
    if not model.files.whole or model.quantisation is not None:
        return
    skeleton, about = model.skeleton, model.about
    wanted = {key: tuple(value.shape) for key, value in skeleton.state_dict().items()}
    held, converted = _renamed(skeleton, model.files.tensors, wanted)
    pairs = dict(getattr(skeleton, "all_tied_weights_keys", None) or {})
    # Of two tied weights either may be the one that was saved.
    tied = {*pairs, *(source for target, source in pairs.items() if target in held)}
    missing = _counting(skeleton, "missing", wanted.keys() - held.keys() - converted - tied)
    extra = _counting(skeleton, "unexpected", held.keys() - wanted.keys())
    wrong = sorted(key for key in held.keys() & wanted.keys() if held[key] != wanted[key])
    if missing:
        text = f"the files lack {_some(missing)}, which config.json asks for"
        cure = _TIE if missing == ["lm_head.weight"] else None
        yield finding("tensors-missing", about, text, cure=cure)
    if wrong:
        shapes = f"{list(held[wrong[0]])} where {list(wanted[wrong[0]])} is due"
        text = f"{_some(wrong)} of another shape than config.json asks for ({shapes})"
        yield finding("tensors-misshapen", about, text)
    if extra:
        text = f"the files hold {_some(extra)}, which config.json does not ask for"
        yield finding("tensors-extra", about, text)
    if not (missing or wrong):
        text = f"all {len(wanted) - len(pairs)} tensors are there, in the right shapes"
        yield finding("weights-complete", about, text)


def _renamed(
    skeleton: Any, tensors: Mapping[str, TensorEntry], wanted: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes by the names that loading gives the tensors, and the names of those it merges.

    Checkpoints may be older than a model's present layout, or lack the prefix of its body;
    transformers renames and merges (experts, for example) while it loads.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping = get_model_conversion_mapping(skeleton)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    held: dict[str, tuple[int, ...]] = {}
    converted: set[str] = set()
    targets: dict[str, list[str]] = {
        pattern: list(entry.target_patterns)
        for entry in converters
        for pattern in entry.source_patterns
    }
    for key, entry in tensors.items():
        prefix = skeleton.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if pattern is None:
            held[name] = entry.shape
        else:  # one to many: the first name stands for all
            first, *others = targets[pattern]
            converted |= {name, *(name.replace(first, other) for other in others)}
    return held, converted


def _counting(skeleton: Any, kind: str, keys: Set[str]) -> list[str]:
    """Those that the architecture does not tell transformers to ignore."""
    patterns = getattr(skeleton, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return sorted(key for key in keys if not any(re.search(p, key) for p in patterns))


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
