"""The configurations of all trainings. They determine the result of a run, except for rounding.

``paceline train`` takes its options from the fields, and its help texts from the docstrings.
Nothing here imports torch, so that ``--help`` is fast.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import partial
from typing import ClassVar

from paceline.core.keywords import forgiving
from paceline.model.names import EMBEDDED
from paceline.settings import changed, entries, under

_data, _shape, _schedule = under("Data"), under("Model shape"), under("Schedule")
_loss, _held_out = under("Loss"), under("Held-out acceptance")
_head, _heads = under("Head"), under("Heads")
_prompts, _answers = under("Prompts"), under("Answers")


@dataclass(frozen=True)
class TrainConfig:
    """Options that all trainings share."""

    trainer: ClassVar[str]  # MODULE:CLASS, whose import loads torch

    model: str = _data(EMBEDDED, "The target: the model to draft for. It is not changed.")
    data: tuple[str, ...] = _data(
        MISSING,
        "JSONL(.gz) file with messages, conversations, turns, text or ids, and its share. "
        "Text that the target wrote itself works best (paceline train sample).",
        metavar="FILE[=WEIGHT]",
    )
    valid: tuple[str, ...] = _data((), "Prompts for the held-out acceptance.", metavar="FILE")
    exclude_licenses: tuple[str, ...] = _data(
        ("CC-BY-SA",),
        "Leave out records whose license contains this.",
        flags=("--exclude-license",),
    )
    loss_on: str = _data(
        "assistant", "Messages of conversations to train on.", choices=("assistant", "all")
    )
    seq_len: int = _schedule(
        256, "Longest sequence in tokens; longer documents are divided.", low=1
    )
    long_every: int = _schedule(
        10, "Every N-th step, pack documents up to --max-positions; 0: never.", low=0
    )
    max_positions: int = _schedule(1024, "Length of packed documents, and the context.", low=1)
    batch_tokens: int = _schedule(8192, "Tokens per step.", low=1)
    micro_tokens: int = _schedule(2048, "Tokens per forward pass (gradient accumulation).", low=1)
    steps: int = _schedule(1500, "Total number of steps.", low=1)
    warmup: int = _schedule(50, "Steps in which the learning rate rises.", low=1)
    lr: float = _schedule(0.005, "Peak learning rate of Muon (for matrices).", low=0)
    adam_lr: float = _schedule(0.004, "Peak learning rate of AdamW (for all else).", low=0)
    weight_decay: float = _schedule(0.05, "Weight decay of matrices.", low=0)
    seed: int = _schedule(0, "Random seed for weights and batches.", low=0)
    argmax_weight: float = _loss(
        0.0,
        "Share of the loss on the target's likeliest token: more is better for greedy decoding, "
        "less for sampling.",
        low=0,
        high=1,
    )
    draft_length: int = _held_out(4, "Draft tokens per step.", low=1)
    held_out: int = _held_out(8, "Prompts from each --valid file.", low=1)
    held_out_tokens: int = _held_out(96, "Tokens that the target generates for each.", low=2)

    def __post_init__(self) -> None:
        """Raise ConfigError for an invalid choice or a value out of range."""
        table: type = type(self)
        for entry in entries(table):
            value = getattr(self, entry.name)
            if value is not None and value != entry.default:
                entry.read(value, entry.flag)


_general = partial(changed, TrainConfig)


@forgiving("DraftConfig")
@dataclass(frozen=True)
class DraftConfig(TrainConfig):
    """Distil a draft model for a target. The result is in OUT/model."""

    trainer = "paceline.train.draft:DraftTrainer"

    init: str | None = _data(
        None,
        "Continue from this draft model, which must have the target's vocabulary.",
        metavar="FOLDER",
        shown="a new model of the shape below",
    )
    tv_weight: float = _loss(
        0.0,
        "Share of the total variation distance, which is the rejection rate, in the loss: 0 learns "
        "fast, 1 is best for the last steps.",
        low=0,
        high=1,
    )
    parallel: bool = _loss(
        False, "Learn to draft --draft-length tokens in one pass with mask tokens (PARD)."
    )
    hidden_size: int = _shape(192, "Width.", low=1)
    layers: int = _shape(2, "Depth.", low=1)
    heads: int = _shape(3, "Attention heads.", low=1)
    kv_heads: int = _shape(3, "Key and value heads.", low=1)
    ffn_size: int = _shape(512, "Width of the feed-forward layers.", low=1)


@dataclass(frozen=True)
class HeadConfig(TrainConfig):
    """Options that the trainings of all heads share."""

    cache_features: bool = _data(
        False,
        "Store the target's features of each document on disk, for several passes over the data.",
        flags=("--cache-features/--stream-features",),
    )
    seq_len: int = _general("seq_len", 1024)
    batch_tokens: int = _general("batch_tokens", 4096)
    steps: int = _general("steps", 1000)
    adam_lr: float = _general("adam_lr", 0.003)
    argmax_weight: float = _general("argmax_weight", 0.3)
    step_decay: float = _loss(
        0.8, "Weight of each draft position in the loss, relative to the one before.", low=0
    )
    dtype: str = _schedule(
        "bfloat16",
        "Data type of target and head; the optimizer's weights are always float32.",
        choices=("bfloat16", "float32", "auto"),
    )


@forgiving("EagleTrainConfig")
@dataclass(frozen=True)
class EagleTrainConfig(HeadConfig):
    """Train an EAGLE-3 head: it reads features of three layers and is unrolled as in drafting."""

    trainer = "paceline.train.eagle:EagleTrainer"
    version: int = 3
    init: str = _head(
        "",
        "Continue from this head; 'target': start from the target's last layer.",
        metavar="FOLDER",
    )
    ttt_steps: int = _head(
        4, "Drafting steps to unroll in training (training-time test); 1: do not unroll.", low=1
    )
    stride: int = _head(
        1, "Unroll only every N-th position; the first step is trained at all positions.", low=1
    )
    parallel: bool = _head(
        False,
        "Draft in one pass: later steps read a mask token and a learnt feature (P-EAGLE).",
    )
    feature_weight: float = 1.0  # this and the next one are used by version 1 only
    token_weight: float = 0.1
    feature_layers: tuple[int, ...] = _head(
        (),
        "Target layers whose inputs are read; default: layer 2, the middle, the third from last.",
        kind="numbers",
        metavar="N,N,N",
    )
    draft_vocab_size: int = _head(
        16000, "Number of most frequent tokens that the head can draft; 0: all.", low=0
    )
    heads: int = _head(0, "Attention heads; 0: as the target.", low=0)
    kv_heads: int = _head(0, "Key and value heads; 0: as the target.", low=0)
    head_dim: int = _head(0, "Width of an attention head; 0: as the target.", low=0)
    ffn_size: int = _head(0, "Width of the feed-forward layer; 0: as the target.", low=0)


@forgiving("Eagle1TrainConfig")
@dataclass(frozen=True)
class Eagle1TrainConfig(EagleTrainConfig):
    """Train an EAGLE head (also for EAGLE-2): it predicts the target's next final features."""

    version: int = 1
    ttt_steps: int = changed(
        EagleTrainConfig,
        "ttt_steps",
        1,
        help="Drafting steps to unroll in training; the paper uses 1.",
    )
    feature_weight: float = _head(1.0, "Weight of the feature loss.", low=0)
    token_weight: float = _head(0.1, "Weight of the token loss.", low=0)
    parallel: bool = False
    feature_layers: tuple[int, ...] = ()  # always the last one; the head drafts all tokens
    draft_vocab_size: int = 16000


@forgiving("DFlashTrainConfig")
@dataclass(frozen=True)
class DFlashTrainConfig(HeadConfig):
    """Train a DFlash head: a few layers that draft a block of tokens in one pass."""

    trainer = "paceline.train.block:BlockTrainer"
    kind: str = "dflash"
    block_size: int = _head(8, "Rows of a block; the first is the last committed token.", low=2)
    layers: int = _head(1, "Number of layers.", low=1)
    causal: bool = _head(
        False, "Causal attention within a block, as in JetSpec: suits draft trees."
    )
    ffn_size: int = _head(0, "Width of the feed-forward layers; 0: as the target.", low=0)
    feature_layers: tuple[int, ...] = changed(
        EagleTrainConfig,
        "feature_layers",
        (),
        help="Target layers whose inputs are read; default: the third, the middle, the third from "
        "last.",
    )
    stride: int = _head(4, "Start a block at every N-th position.", low=1)
    tv_weight: float = 0.0  # this and the next ones are used by DSpark only
    markov_rank: int = 0
    confidence_weight: float = 0.0


@forgiving("DSparkTrainConfig")
@dataclass(frozen=True)
class DSparkTrainConfig(DFlashTrainConfig):
    """Train a DSpark head: a DFlash head with a bias that depends on the previous token, and a
    confidence head."""

    kind: str = "dspark"
    block_size: int = changed(DFlashTrainConfig, "block_size", 7)
    tv_weight: float = _head(
        0.5,
        "Share of the total variation distance, which is the rejection rate, in the loss.",
        low=0,
        high=1,
    )
    markov_rank: int = _head(64, "Rank of the bias by the previous token; 0: no bias.", low=0)
    confidence_weight: float = _head(1.0, "Weight of the loss of the confidence head.", low=0)


@forgiving("MedusaTrainConfig")
@dataclass(frozen=True)
class MedusaTrainConfig(HeadConfig):
    """Train Medusa heads: each predicts a token further ahead from the target's last hidden
    state."""

    trainer = "paceline.train.medusa:MedusaTrainer"

    medusa_heads: int = _heads(4, "Number of heads: the draft length.", low=1)
    medusa_layers: int = _heads(1, "Residual blocks per head.", low=0)
    shared_head: bool = _heads(
        False,
        "Use the target's lm_head instead of one per head, which is far smaller.",
        flags=("--shared-head/--own-heads",),
    )


@forgiving("PromptSelection")
@dataclass(frozen=True)
class PromptSelection:
    """The prompts for the target to answer."""

    num_prompts: int | None = _prompts(
        None, "Number of prompts.", low=1, shown="all conversations, or 1000 texts"
    )
    seed: int = _prompts(0, "Random seed for the choice of prompts and the answers.", low=0)
    exclude_licenses: tuple[str, ...] = _prompts(
        ("CC-BY-SA",),
        "Leave out records whose license contains this.",
        flags=("--exclude-license",),
    )
    max_text_len: int = _prompts(96, "Longest prefix of a text to continue, in tokens.", low=12)
    max_prompt_len: int = _prompts(640, "Longest conversation, in tokens.", low=1)
    follow_ups: float = _prompts(
        0.0,
        "Share of conversations that get a follow-up question. The questions of records with "
        "several turns are always asked.",
        low=0,
        high=1,
    )


@dataclass(frozen=True)
class AnswerConfig:
    """How the target answers the prompts: fields of SamplingParams."""

    max_tokens: int = _answers(256, "Most new tokens per answer.", low=1)
    temperature: float = _answers(
        0.0, "Temperature; 0 is greedy.", low=0, flags=("--temperature", "-t")
    )
    top_p: float = _answers(1.0, "Sample from the likeliest tokens with this total probability.")
    ignore_eos: bool = _answers(False, "Continue after the end token.")
