"""Checkpoints of heads: a config.json and a file of tensors. Also what the layouts of EAGLE heads
and block drafters share, such as the config of ``vllm-project/speculators`` (0.1 to 0.5)::

    {"speculators_model_type": "eagle3", "draft_vocab_size": ..., "norm_before_residual": ...,
     "target_hidden_size": ..., "eagle_aux_hidden_state_layer_ids": [...],
     "transformer_layer_config": {"model_type": "llama", "hidden_size": ..., ...},
     "speculators_config": {"algorithm": "eagle3", "proposal_methods": [...], "verifier": {...}}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.core.params import is_whole
from paceline.draft.heads.network import SIZES, HeadShape
from paceline.draft.spec import Target
from paceline.errors import ModelLoadError
from paceline.files import write_files
from paceline.model.loading import read_options
from paceline.model.names import first_line, model_path
from paceline.model.tensorfile import as_bytes, check_finite, load_tensors, read_table

_Made = TypeVar("_Made")
_Module = TypeVar("_Module", bound=torch.nn.Module)
WEIGHTS = "model.safetensors"
FILES = (WEIGHTS, "pytorch_model.bin")
SPECULATORS = "speculators_model_type"  # in config.json of that library
# Names, as vLLM reads them, of the mask token: it stands for a token to be drafted.
MASK_OPTIONS = ("pard_token", "ptd_token_id")
# Tensors to ignore: copies of the target's weights, and tables that follow from the config.
_COPIES = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_BY_TOKEN = ("lm_head.weight", "markov_head.markov_w2.weight")  # one row per draft vocabulary id


@dataclass(frozen=True)
class Checkpoint:
    """``config``: config.json, later a head's options without None. ``tensors``: by their name in
    the file, later in the head, on the CPU. ``noun``: what it should contain, as in "Medusa heads".
    Methods raise ModelLoadError."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    noun: str = ""

    @property
    def title(self) -> str:
        return f"the {self.noun} {self.name}"

    def another_kind(self) -> ModelLoadError:
        """The error for a folder that does not hold what ``noun`` says."""
        (what, kind), name = weights_kind(self.tensors), self.name
        advice = f"give the folder of the {self.noun}"
        if kind:
            advice = f"use --draft {kind}:{name} for that"
        elif what == "a language model":
            advice = f"use --draft {name} to draft with it"
        return ModelLoadError(f"{name} holds no {self.noun} but {what}; {advice}")

    def check_target(
        self, target: Target, hidden: int, vocab: int, layers: int | None, by: str = ""
    ) -> None:
        """Refuse what was made for a target of other sizes; ``layers`` None: any number."""
        sizes = {
            "hidden size": (hidden, target.hidden_size),
            "vocabulary size": (vocab, target.vocab_size),
            "number of layers": (layers, target.num_layers),
        }
        for size, (expected, wanted) in sizes.items():
            if expected not in (None, wanted):
                raise ModelLoadError(
                    f"{self.title}{by}: made for a target with {size} {expected}, but "
                    f"this one has {wanted}; use one that was trained for this target"
                )

    def options(self) -> dict[str, Any]:
        """The options of config.json; those that speculators nests are beside the others."""
        flat: dict[str, Any] = {}
        if SPECULATORS in self.config:
            from transformers import AutoConfig

            layer = self.config.get("transformer_layer_config")
            if not isinstance(layer, dict):
                raise ModelLoadError(
                    f"the config.json of {self.name} has no transformer_layer_config, which a "
                    "speculators checkpoint must have; copy the file again"
                )
            try:  # the library leaves out the defaults of the model type
                flat = AutoConfig.for_model(**{"model_type": "llama", **layer}).to_dict()
            except Exception as error:  # transformers raises all kinds of errors for a wrong value
                raise ModelLoadError(
                    f"the transformer_layer_config of {self.name} cannot be read "
                    f"({first_line(error)}); copy config.json again"
                ) from None
        pairs = [*flat.items(), *self.config.items()]
        return {key: value for key, value in pairs if value is not None}

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors without the prefix "model." and without copies of the target's."""
        tensors = {key.removeprefix("model."): value for key, value in self.tensors.items()}
        return {key: value for key, value in tensors.items() if not key.endswith(_COPIES)}

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number above 0 from the config."""
        value = self.config.get(key, default)
        if not is_whole(value) or value < 1:
            problem = "has no" if value is None else f"has {value!r} for"
            raise ModelLoadError(
                f"the config.json of {self.name} {problem} {key}, a whole number above 0; "
                "copy the file again"
            )
        return value

    def shape(self, target: Target, feature_layers: Any) -> dict[str, Any]:
        """The fields of HeadShape. ``feature_layers`` as the config states them."""
        name, config = self.name, self.config
        hidden, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        usual = {
            "num_key_value_heads": heads,
            "head_dim": max(1, hidden // heads),
            "max_position_embeddings": 2048,
        }
        if not isinstance(feature_layers, list) or any(type(n) is not int for n in feature_layers):
            raise ModelLoadError(
                f"the layers that {name} reads are {feature_layers!r}, not a list of layer numbers"
            )
        try:
            rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
            theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
            epsilon = float(config.get("rms_norm_eps", 1e-6))
        except (TypeError, ValueError) as error:
            raise ModelLoadError(
                f"rope_parameters, rope_theta or rms_norm_eps in the config.json of {name} cannot "
                f"be read ({first_line(error)}); copy the file again"
            ) from None
        kind = rope.pop("type", None)
        rope.setdefault("rope_type", kind or "default")
        return {
            **{field: self.whole(key, usual.get(key)) for key, field in SIZES.items()},
            "layers": self._layers(),
            "target_layers": target.num_layers,
            "feature_layers": tuple(feature_layers),
            "rope_theta": theta,
            "rope_scaling": None if rope["rope_type"] == "default" else rope,
            "rms_norm_eps": epsilon,
            "attention_bias": any(key.endswith("q_proj.bias") for key in self.tensors),
            "has_embedding": "embed_tokens.weight" in self.tensors,
            "has_lm_head": "lm_head.weight" in self.tensors,
        }

    def _layers(self) -> int:
        layers, count = self.whole("num_hidden_layers", 1), len(self.tensors)
        if layers > count:
            raise ModelLoadError(
                f"the config.json of {self.name} has {layers} num_hidden_layers, but its weights "
                f"are {count} tensors; copy both files again"
            )
        return layers

    def draft_ids(self, config: HeadShape) -> torch.Tensor:
        """The target ids of the draft vocabulary, ascending; sorts the tensors by them."""
        title, tensors, count, vocab = self.title, self.tensors, config.columns, config.vocab_size
        offsets = tensors.get("d2t")
        if offsets is None and count != vocab:
            raise ModelLoadError(
                f"{title} drafts {count} of {vocab} tokens but has no d2t that says "
                "which; its weights are incomplete"
            )
        offsets = torch.zeros(vocab, dtype=torch.int64) if offsets is None else offsets
        if offsets.shape != (count,):
            raise ModelLoadError(
                f"d2t of {title} has shape {list(offsets.shape)}, but the config has a "
                f"draft vocabulary of {count}; the two files do not belong together"
            )
        ids, order = (offsets.to(torch.int64) + torch.arange(count)).sort()
        if int(ids[0]) < 0 or int(ids[-1]) >= vocab or bool((ids.diff() == 0).any()):
            raise ModelLoadError(
                f"d2t of {title} does not name {count} different tokens below {vocab}; "
                "it must hold offsets (target id = i + d2t[i])"
            )
        known = torch.zeros(vocab, dtype=torch.bool)
        known[ids] = True
        t2d = tensors.get("t2d")
        if t2d is not None and not (t2d.shape == (vocab,) and torch.equal(t2d.bool(), known)):
            raise ModelLoadError(
                f"t2d and d2t of {title} name different tokens; the file is damaged"
            )
        for key in _BY_TOKEN:
            if key in tensors and tensors[key].shape[0] == count:
                tensors[key] = tensors[key][order]
        tensors["d2t"], tensors["t2d"] = ids - torch.arange(count), known
        return ids

    def made(self, make: Callable[[], _Made]) -> _Made:
        """``make()``; its errors, such as torch's for impossible sizes, become ModelLoadErrors."""
        try:
            return make()
        except Exception as error:
            what = first_line(error)
            raise ModelLoadError(f"{self.title} does not fit the target: {what}") from None

    def filled(self, make: Callable[[], _Module]) -> _Module:
        """The module ``make()`` with the tensors as its weights, in their dtype and on their
        device. Names and shapes must be exactly the module's."""
        tensors = self.tensors
        weight = max(tensors.values(), key=torch.is_floating_point)  # the first float tensor
        with torch.device("meta"):  # sizes from a damaged config may exceed memory
            module = self.made(make)
        expected = {key: list(value.shape) for key, value in module.state_dict().items()}
        actual = {key: list(value.shape) for key, value in tensors.items()}
        for key in sorted(expected.keys() | actual.keys()):
            if key not in actual:
                problem = f"lacks the weight {key}"
            elif key not in expected:
                problem = f"has an unknown weight {key}"
            elif expected[key] != actual[key]:
                problem = f"has {key} of shape {actual[key]} where {expected[key]} is due"
            else:
                continue
            raise ModelLoadError(
                f"{self.title} {problem}; its config.json and weights do not belong together"
            )
        # The tensors are mapped from the file, which may be written to later: copy them.
        copies = {key: value.clone() for key, value in tensors.items()}
        module.load_state_dict(copies, assign=True)
        return module.to(weight.dtype)


def read_checkpoint(source: str | Checkpoint, files: Sequence[str], noun: str) -> Checkpoint:
    """Read config.json and the first of ``files`` that exists in a folder, built-in or hub name.
    Pickled files may hold only tensors. A Checkpoint is taken as it is; its tensors, except token
    ids, may be on the meta device, and then its head is, too. Raises ModelLoadError."""
    if isinstance(source, Checkpoint):
        return replace(source, noun=noun)
    name = source
    folder = Path(model_path(name))
    if not folder.is_dir():
        raise ModelLoadError(f"folder {name} does not exist; give the folder that holds the {noun}")
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelLoadError(
            f"folder {name} has no config.json; {noun} need one beside the weights"
        )
    config = read_options(config_file)
    for file in files:
        weights = folder / file
        if weights.is_file():
            tensors = _tensors(weights)
            check_finite(tensors, f"the {noun} {name} cannot be used")
            return Checkpoint(name, config, tensors, noun)
    raise ModelLoadError(f"folder {name} has no {noun}: there is no {' or '.join(files)} in it")


def write_checkpoint(
    folder: Path, file: str, tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> None:
    """Write ``file`` (safetensors) and config.json. Raises WriteError."""
    weights, text = as_bytes(tensors), json.dumps(config, indent=2) + "\n"
    contents = {folder / file: weights, folder / "config.json": text.encode()}
    write_files(contents, "the checkpoint")


def weights_kind(names: Iterable[str]) -> tuple[str, str]:
    """What tensors of these names are, and the kind of drafter they are for ("" for models)."""
    stripped = {name.removeprefix("model.") for name in names}
    if {"fc.weight", "hidden_norm.weight"} <= stripped:
        extended = any(key.startswith(("markov_head.", "confidence_head.")) for key in stripped)
        return ("a DSpark head", "dspark") if extended else ("a DFlash head", "dflash")
    if any(key.startswith(("fc.", "midlayer.")) for key in stripped):
        third = "d2t" in stripped or any("hidden_norm" in k or "midlayer" in k for k in stripped)
        return ("an EAGLE-3 head", "eagle3") if third else ("an EAGLE head", "eagle")
    if any("medusa" in key or key[:1].isdigit() or key.startswith("blocks.") for key in stripped):
        return "Medusa heads", "medusa"
    attends = any("attn" in key for key in stripped)
    return ("a language model" if attends else "weights of another kind"), ""


def refuse_head(name: str) -> None:
    """Raise ModelLoadError if a folder that should hold a draft model holds a head."""
    tables = [read_table(file) for file in Path(model_path(name)).glob("*.safetensors")]
    what, kind = weights_kind(key for table in tables for key in table)
    if kind:
        raise ModelLoadError(f"{name} is no language model but {what}; use --draft {kind}:{name}")


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_tensors(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (ModelLoadError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle leads to errors of any kind
        raise ModelLoadError(
            f"{file} cannot be read as weights ({first_line(error)}); download or copy it again"
        ) from None
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items()
    ):
        raise ModelLoadError(
            f"{file} holds no table of tensors by name; it is another kind of file"
        )
    return loaded


def flat_options(config: HeadShape, kind: str = "llama") -> dict[str, Any]:
    """The options of config.json that all layouts share."""
    return {
        "model_type": kind,
        "num_hidden_layers": config.layers,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        **{key: getattr(config, field) for key, field in SIZES.items()},
    }


def speculators_options(
    algorithm: str,
    architecture: str,
    layer: dict[str, Any],
    drafted: int,
    verifier: tuple[str | None, tuple[str, ...]],
) -> dict[str, Any]:
    """A speculators config. ``drafted``: draft length for engines that take it from the config.
    ``verifier``: the target's name or path, and its classes in transformers."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafted}
    proposal |= {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    target, architectures = verifier
    return {
        "architectures": [architecture],
        SPECULATORS: algorithm,
        "speculators_version": "0.5.0",
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "transformer_layer_config": layer,
    }
