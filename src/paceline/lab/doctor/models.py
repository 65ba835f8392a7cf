"""A model described by its files, and whether its tensors are those that its config asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from paceline.draft.spec import TargetShape
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.lab.doctor.files import ModelFiles
from paceline.lab.doctor.findings import ERROR, NOTE, Finding, finding, refusal
from paceline.model import loading
from paceline.model.gguf_weights import check_taken
from paceline.model.paged.cache import bytes_per_token
from paceline.model.target import UNLIMITED_POSITIONS

_TIE = (
    'If the model ties its embeddings, write "tie_word_embeddings": true into config.json; '
    "otherwise copy the weights again."
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True)
class Model(TargetShape):
    """A causal language model that is not loaded. ``about``: "target" or "draft". ``config`` is
    transformers' config of the text part. ``tokenizer`` is None if there is none."""

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
        heads = int(config.num_attention_heads)
        shared = int(getattr(config, "num_key_value_heads", None) or heads)
        width = int(getattr(config, "head_dim", None) or self.hidden_size // heads)
        keys = values = width
        if getattr(config, "kv_lora_rank", None):  # latent attention: as transformers unpacks it
            shared = heads
            keys = int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim)
            values = int(config.v_head_dim)
        return bytes_per_token([(shared, keys, values)] * self.num_layers, dtype)

    @cached_property
    def skeleton(self) -> Any:
        """The module that transformers builds of the config, without weights."""
        return skeleton_of(self.whole_config)


def describe(files: ModelFiles, about: str) -> tuple[Model | None, list[Finding]]:
    """The model of a folder; None, with the reason among the findings, if it is refused."""
    findings: list[Finding] = []
    foreign = bool(files.config.get("auto_map"))
    try:
        config = loading.read_config(files.name, str(files.folder))
        loading.check_architecture(config)
        text_config = config.get_text_config(decoder=True)
        if files.gguf is not None:
            check_taken(files.gguf, skeleton_of(config))
    except (ModelLoadError, UnsupportedModelError) as error:
        return None, [refusal("remote-code" if foreign else "architecture-refused", error)]
    if foreign:
        findings.append(finding("remote-code", cure="Nothing to do.", severity=NOTE))
    tokenizer = None
    if files.gguf is None and not files.has(*_TOKENIZER_FILES):
        severity = ERROR if about == "target" else NOTE
        findings.append(finding("tokenizer-absent", name=files.name, severity=severity))
    else:
        try:
            tokenizer = loading.load_tokenizer(str(files.folder))
        except ModelLoadError as error:
            findings.append(refusal("tokenizer-absent", error))
    model = Model(
        text_config.hidden_size,
        text_config.vocab_size,
        text_config.num_hidden_layers,
        getattr(text_config, "max_position_embeddings", None) or UNLIMITED_POSITIONS,
        about=about,
        files=files,
        whole_config=config,
        config=text_config,
        tokenizer=tokenizer,
    )
    if model.quantisation is None:  # machine.py tells of those
        sizes: dict[str, Any] = {"layers": model.num_layers, "width": model.hidden_size}
        sizes |= {"kind": config.model_type, "parameters": millions(model.parameters)}
        findings.append(finding("architecture-supported", **sizes))
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
    """Whether the files hold what the config asks for, by name and shape: what transformers' own
    loading, which also renames and merges tensors, says of them without their values."""
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
        )
    missing, extra = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    wrong = sorted(info["mismatched_keys"])
    if missing:
        cure = _TIE if missing == ["lm_head.weight"] else None
        yield finding("tensors-missing", cure=cure, names=_some(missing))
    if wrong:
        names, shapes, due = zip(*wrong, strict=True)
        some, held = _some(names), list(shapes[0])
        yield finding("tensors-misshapen", names=some, held=held, due=list(due[0]))
    if extra:
        yield finding("tensors-extra", names=_some(extra))
    if not (missing or wrong):
        count = len(module.state_dict()) - len(module.all_tied_weights_keys or {})
        yield finding("weights-complete", count=count)


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
