"""Medusa heads: head k predicts the token k + 1 positions after the target's next one.

Cai et al. 2024 (arXiv 2401.10774), section 3.1. Head k sees the target's last hidden state at
position t (the final norm's output) and predicts token t + 2 + k, as the target itself predicts
token t + 1: residual blocks ``x + SiLU(Linear(x))``, then a linear layer to the vocabulary.

Checkpoints: ``medusa_lm_head.safetensors`` (or ``.pt``) has ``{head}.{layer}.linear.{weight,bias}``
and ``{head}.{layers}.weight``, as FasterDecoding/Medusa writes them. vLLM's names are read as well
(``blocks.{head}.layers.{layer}.*``, ``lm_heads.{head}.weight``), and so are its options: heads that
share the target's language-model head (``original_lm_head``), and a reduced vocabulary
(``truncated_vocab_size`` with a ``token_map``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.core.params import is_whole
from paceline.draft.heads.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from paceline.draft.spec import Target
from paceline.draft.trees.grow import scatter_to_vocabulary
from paceline.errors import ModelLoadError

Head = Callable[[torch.Tensor], torch.Tensor]  # hidden [..., width] -> logits [..., vocab]
WEIGHTS = "medusa_lm_head.safetensors"
FILES = (WEIGHTS, "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
_KIND = "Medusa heads"
# Patterns of names in files, and the name in Medusa's own layout; * is the number of blocks.
_NAMES = (
    (r"(\d+\.\d+\.linear\.(?:weight|bias)|token_map)", r"\1"),
    (r"(\d+\.\d+\.weight)", r"\1"),
    (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"\1.\2.linear.\3"),
    (r"lm_heads?\.(\d+)\.weight", r"\1.*.weight"),
    (r"lm_heads?\.weight", "0.*.weight"),
)
_VLLM_NAMES = (
    (r"^(\d+)\.(\d+)\.linear", r"blocks.\1.layers.\2"),
    (r"^(\d+)\.\d+\.weight", r"lm_heads.\1.weight"),
)
_VOCABULARY = re.compile(_NAMES[1][0])
_ACCURACY = "paceline_accuracy"
_TARGET_LAYERS = "paceline_target_layers"


@dataclass(frozen=True)
class MedusaConfig:
    """The shape of the heads, and their accuracy. ``shared_head``: they use the target's
    language-model head. ``draft_vocab_size``: if below ``vocab_size``, they draft only the tokens
    in the token map. ``accuracy[k][r]``: how often candidate r of head k was right on held-out
    text, if measured."""

    hidden_size: int
    vocab_size: int
    heads: int = 4
    layers: int = 1
    bias: bool = True
    shared_head: bool = False
    draft_vocab_size: int | None = None
    base_model: str | None = None
    accuracy: tuple[tuple[float, ...], ...] = ()

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size not in (None, self.vocab_size)

    @property
    def head_rows(self) -> int:
        """Rows of a head's vocabulary layer."""
        return self.draft_vocab_size or self.vocab_size


class ResidualBlock(nn.Module):
    """``x + SiLU(Linear(x))``; starts as the identity."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """All heads. Parameter names are those of the public checkpoints: ``{head}.{layer}.linear.*``
    (blocks) and ``{head}.{layers}.weight`` (vocabulary layer)."""

    token_map: torch.Tensor | None

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        for _ in range(config.heads):
            head: list[nn.Module] = [
                ResidualBlock(width, config.bias) for _ in range(config.layers)
            ]
            if not config.shared_head:
                head.append(nn.Linear(width, config.head_rows, bias=False))
            self.append(nn.Sequential(*head))
        # On the CPU even if the heads are on the meta device: these values are read.
        ids = torch.arange(config.head_rows, device="cpu") if config.reduced else None
        self.register_buffer("token_map", ids)

    def forward(self, features: torch.Tensor, lm_head: Head | None = None) -> torch.Tensor:
        """Logits ``[heads, T, vocab]`` from final hidden states ``[T, width]``, minus infinity
        outside a reduced vocabulary. ``lm_head``: the target's, if shared."""
        return torch.stack([self.logits(k, features, lm_head) for k in range(len(self))])

    def logits(
        self, head: int, features: torch.Tensor, lm_head: Head | None = None
    ) -> torch.Tensor:
        """Logits ``[T, vocab]`` of one head."""
        output: torch.Tensor = self[head](features)
        if self.config.shared_head:
            assert lm_head is not None, "these heads use the target's language-model head"
            output = lm_head(output)
        return self.spread(output)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary, minus infinity for tokens not in the token map."""
        if self.token_map is None:
            return logits
        if self.config.shared_head:  # the target's head knows more tokens than were trained on
            logits = logits.index_select(-1, self.token_map)
        return scatter_to_vocabulary(logits, self.token_map, self.config.vocab_size)


# -- checkpoints -------------------------------------------------------------------------------


def load_medusa(source: str | Checkpoint, target: Target) -> MedusaHeads:
    """Load heads for ``target``, on the CPU. ``source`` as in ``read_checkpoint``. Raises
    ModelLoadError for missing or damaged files, other weights, or another target."""
    checkpoint = read_checkpoint(source, FILES, _KIND)
    tensors = _public_names(checkpoint)
    config = _config(checkpoint, tensors)
    by = f" (trained on {config.base_model})" if config.base_model else ""
    sizes = config.hidden_size, config.vocab_size, _number(checkpoint.config, _TARGET_LAYERS)
    checkpoint.check_target(target, *sizes, by)
    known = {"token_map", *map(str, range(config.heads))}
    kept = {key: value for key, value in tensors.items() if key.partition(".")[0] in known}
    return replace(checkpoint, tensors=kept).filled(lambda: MedusaHeads(config))


def save_medusa(
    heads: MedusaHeads, folder: Path, target_layers: int | None = None, layout: str = "medusa"
) -> None:
    """Write heads in a ``layout``: "medusa" (its authors') or "vllm", which skips other names.
    ``target_layers``: targets with another number are then refused."""
    config = heads.config
    values: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": config.base_model,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "medusa_num_heads": config.heads,
        "medusa_num_layers": config.layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.shared_head,
        "truncated_vocab_size": config.head_rows,
    }
    if config.accuracy:
        values[_ACCURACY] = [[round(value, 4) for value in ranks] for ranks in config.accuracy]
    if target_layers is not None:
        values[_TARGET_LAYERS] = target_layers
    file, tensors = WEIGHTS, heads.state_dict()
    if layout == "vllm":
        file = "model.safetensors"
        for pattern, name in _VLLM_NAMES:
            tensors = {re.sub(pattern, name, key): value for key, value in tensors.items()}
    write_checkpoint(folder, file, dict(tensors), values)


def _public_names(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors by their names in Medusa's layout."""
    tensors: dict[str, torch.Tensor] = {}
    for key, value in checkpoint.tensors.items():
        short = key.removeprefix("medusa_heads.").removeprefix("medusa_head.")
        matches = ((re.fullmatch(pattern, short), name) for pattern, name in _NAMES)
        public = next((match.expand(name) for match, name in matches if match), None)
        if public is None:
            raise checkpoint.another_kind()
        tensors[public] = value
    blocks = 1 + max((int(key.split(".")[1]) for key in tensors if "linear" in key), default=-1)
    if not tensors.keys() - {"token_map"}:
        raise ModelLoadError(f"{checkpoint.name} holds no Medusa heads: the weights file is empty")
    return {key.replace("*", str(blocks)): value for key, value in tensors.items()}


def _number(config: dict[str, Any], *names: str) -> int | None:
    """The first of these options that is a whole number above 0."""
    stated = map(config.get, names)
    return next((value for value in stated if is_whole(value) and value > 0), None)


def _config(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> MedusaConfig:
    """The heads' shape, from tensors and config.json. Raises ModelLoadError if they disagree."""
    name, stated = checkpoint.name, checkpoint.config
    counted = 1 + max(int(key.split(".")[0]) for key in tensors if key != "token_map")
    layers = len({key.split(".")[1] for key in tensors if key.startswith("0.") and "linear" in key})
    # Released configs often name fewer heads than the file has: the first ones are used.
    heads = _number(stated, "medusa_num_heads", "num_heads") or counted
    blocks = _number(stated, "medusa_num_layers", "num_hidden_layers") or layers
    if heads > counted or blocks != layers:
        raise ModelLoadError(
            f"the config.json of {name} asks for {heads} heads of {blocks} blocks, but the weights "
            f"hold {counted} of {layers}; the two files do not belong together"
        )
    vocabulary = [key for key in tensors if _VOCABULARY.fullmatch(key)]
    shared = bool(stated.get("original_lm_head")) or not vocabulary
    if shared:
        for key in vocabulary:
            del tensors[key]  # a copy of the target's head
    sample = tensors.get("0.0.linear.weight", tensors.get("0.0.weight"))
    last = tensors.get(f"0.{layers}.weight")
    if sample is None or (last is None and not shared):
        raise ModelLoadError(f"{name} holds no first Medusa head; download or copy the file again")
    rows = None if shared or last is None else last.shape[0]
    vocab = _number(stated, "vocab_size")
    if rows is not None and _number(stated, "truncated_vocab_size") in (None, vocab):
        vocab = rows
    if vocab is None:
        raise ModelLoadError(
            f"the config.json of {name} has no vocab_size, and the heads share the target's "
            "vocabulary layer; write the target's number of logits there"
        )
    return MedusaConfig(
        hidden_size=sample.shape[1],
        vocab_size=vocab,
        heads=heads,
        layers=layers,
        bias="0.0.linear.bias" in tensors,
        shared_head=shared,
        draft_vocab_size=_reduced(checkpoint, tensors, vocab, rows),
        base_model=stated.get("base_model_name_or_path"),
        accuracy=_accuracy(checkpoint, heads),
    )


def _reduced(
    checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], vocab: int, rows: int | None
) -> int | None:
    """Size of a reduced vocabulary, to which it cuts ``tensors``; None: the heads draft all."""
    name, size = checkpoint.name, _number(checkpoint.config, "truncated_vocab_size") or vocab
    ids = tensors.pop("token_map", None)
    if size >= vocab:
        return None
    if ids is None:
        raise ModelLoadError(
            f"the Medusa heads {name} know {size} of {vocab} tokens, but the file has no token_map "
            "that says which; it is incomplete"
        )
    ids = tensors["token_map"] = ids.to(torch.int64)
    if ids.shape != (size,) or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ModelLoadError(
            f"the token_map of {name} does not name {size} tokens below {vocab}; the files do not "
            "belong together"
        )
    if rows is not None and rows > size:
        for key in [key for key in tensors if _VOCABULARY.fullmatch(key)]:
            tensors[key] = tensors[key][ids]
    return size


def _accuracy(checkpoint: Checkpoint, heads: int) -> tuple[tuple[float, ...], ...]:
    accuracy = checkpoint.config.get(_ACCURACY, [])
    try:
        table = tuple(tuple(float(value) for value in ranks) for ranks in accuracy)
    except (TypeError, ValueError):
        table = ((-1.0,),)
    if not all(0 <= value <= 1 for ranks in table for value in ranks):
        raise ModelLoadError(
            f"{_ACCURACY} in the config.json of {checkpoint.name} is not a list of shares per "
            "head; remove it, or train the heads again"
        )
    return table[:heads]
