"""The configurations of all trainings. They determine the result of a run, except for rounding.

``paceline train`` takes its options from the fields, and its help texts from the docstrings.
Nothing here imports torch, so that ``--help`` is fast."""

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

    model: str = _data(EMBEDDED, "Target model to draft for; it is not changed.")
    data: tuple[str, ...] = _data(
        MISSING,
        "JSONL(.gz) file, and its share of the data. Its records have messages, conversations, "
        "turns, text or ids. Texts that the target wrote itself (paceline train sample) work best.",
        metavar="FILE[=WEIGHT]",
    )
    valid: tuple[str, ...] = _data(
        (), "Prompts on which held-out acceptance is measured.", metavar="FILE"
    )
    exclude_licenses: tuple[str, ...] = _data(
        ("CC-BY-SA",),
        "Leave out records whose license contains this text.",
        flags=("--exclude-license",),
    )
    loss_on: str = _data(
        "assistant", "Which parts of conversations to learn.", choices=("assistant", "all")
    )
    seq_len: int = _schedule(256, "Longest piece of a document, in tokens.", low=1)
    long_every: int = _schedule(
        10, "Interval of steps on documents joined to --max-positions; 0 is never.", low=0
    )
    max_positions: int = _schedule(
        1024, "Length of joined documents, and context of the draft, in tokens.", low=1
    )
    batch_tokens: int = _schedule(8192, "Tokens per step.", low=1)
    micro_tokens: int = _schedule(2048, "Tokens of one forward pass.", low=1)
    steps: int = _schedule(1500, "Number of training steps.", low=1)
    warmup: int = _schedule(50, "Warm-up steps, in which the learning rate rises.", low=1)
    lr: float = _schedule(0.005, "Peak learning rate of Muon (matrices).", low=0)
    adam_lr: float = _schedule(0.004, "Peak learning rate of AdamW (everything else).", low=0)
    weight_decay: float = _schedule(0.05, "Weight decay of matrices.", low=0)
    seed: int = _schedule(0, "Seed of initial weights and batches.", low=0)
    dtype: str = _schedule(
        "auto",
        "Data type to compute in; auto is float32 on CPUs without bf16 instructions. The optimizer "
        "always keeps float32 weights; the result has 16 bits unless this is float32.",
        choices=("auto", "bfloat16", "float32"),
    )
    argmax_weight: float = _loss(
        0.0,
        "Loss weight of the likeliest token; higher favours greedy decoding, lower sampling.",
        low=0,
        high=1,
    )
    draft_length: int = _held_out(4, "Draft tokens per step.", low=1)
    held_out: int = _held_out(8, "Prompts from each --valid file.", low=1)
    held_out_tokens: int = _held_out(96, "Tokens generated after each prompt.", low=2)

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
    """Distil a draft model for a target; the result goes to OUT/model."""

    trainer = "paceline.train.draft:DraftTrainer"

    init: str | None = _data(
        None,
        "Start from this draft model, which has the target's vocabulary.",
        metavar="FOLDER",
        shown="a new model of the shape below",
    )
    tv_weight: float = _loss(
        0.0,
        "Loss weight of total variation, which is the probability of rejection: 0 learns fast, "
        "1 is best at the end of training.",
        low=0,
        high=1,
    )
    parallel: bool = _loss(
        False, "Learn to draft --draft-length tokens in one pass, from mask tokens (PARD)."
    )
    hidden_size: int = _shape(192, "Hidden size.", low=1)
    layers: int = _shape(2, "Number of layers.", low=1)
    heads: int = _shape(3, "Attention heads.", low=1)
    kv_heads: int = _shape(3, "Key and value heads.", low=1)
    ffn_size: int = _shape(512, "Width of the feed-forward part.", low=1)


@dataclass(frozen=True)
class HeadConfig(TrainConfig):
    """Options that the trainings of all heads share."""

    cache_features: bool = _data(
        False,
        "Cache the target's outputs for each document on disk, to be used in several epochs.",
        flags=("--cache-features/--stream-features",),
    )
    seq_len: int = _general("seq_len", 1024)
    batch_tokens: int = _general("batch_tokens", 4096)
    steps: int = _general("steps", 1000)
    adam_lr: float = _general("adam_lr", 0.003)
    argmax_weight: float = _general("argmax_weight", 0.3)
    step_decay: float = _loss(
        0.8, "Loss weight of each drafted token relative to the one before it.", low=0
    )


@dataclass(frozen=True)
class LayersConfig(HeadConfig):
    """Options that heads of decoder layers share."""

    layers: int = _head(1, "Decoder layers.", low=1)
    feature_layers: tuple[int, ...] = _head(
        (),
        "Target layers whose inputs are read; default: 2, half of them, all but 3.",
        kind="numbers",
        metavar="N,N,N",
    )
    heads: int = _head(0, "Attention heads; 0: the target's.", low=0)
    kv_heads: int = _head(0, "Key and value heads; 0: the target's.", low=0)
    head_dim: int = _head(0, "Width of a head; 0: the target's.", low=0)
    ffn_size: int = _head(0, "Width of the feed-forward part; 0: the target's.", low=0)


@forgiving("EagleTrainConfig")
@dataclass(frozen=True)
class EagleTrainConfig(LayersConfig):
    """Train an EAGLE-3 head: features of three target layers, unrolled drafting steps."""

    trainer = "paceline.train.eagle:EagleTrainer"
    version: int = 3
    init: str = _head(
        "", "Start from this head, or with 'target' from the target's last layer.", metavar="FOLDER"
    )
    ttt_steps: int = _head(
        4, "Drafting steps that training unrolls (training-time test); 1 is no unrolling.", low=1
    )
    stride: int = _head(
        1, "Unroll only every N-th position; all positions learn the first drafted token.", low=1
    )
    parallel: bool = _head(
        False, "Draft in one pass: later steps read a mask token and a learnt feature (P-EAGLE)."
    )
    own_embedding: bool = _head(
        False, "Train an embedding of the head's own; it starts as the target's."
    )
    feature_weight: float = 1.0  # this and the next one are used by version 1 only
    token_weight: float = 0.1
    draft_vocab_size: int = _head(
        16000, "Size of the draft vocabulary, the most frequent tokens; 0 is all.", low=0
    )


@forgiving("Eagle1TrainConfig")
@dataclass(frozen=True)
class Eagle1TrainConfig(EagleTrainConfig):
    """Train an EAGLE head (also for EAGLE-2): extrapolates the target's last hidden states."""

    version: int = 1
    ttt_steps: int = changed(
        EagleTrainConfig,
        "ttt_steps",
        1,
        help="Drafting steps that training unrolls; the paper has 1.",
    )
    feature_weight: float = _head(1.0, "Weight of the feature loss.", low=0)
    token_weight: float = _head(0.1, "Weight of the token loss.", low=0)
    parallel: bool = False
    layers: int = 1
    own_embedding: bool = False
    feature_layers: tuple[int, ...] = ()  # always the last one; the head drafts all tokens
    draft_vocab_size: int = 16000


@forgiving("DFlashTrainConfig")
@dataclass(frozen=True)
class DFlashTrainConfig(LayersConfig):
    """Train a DFlash head: a few layers that draft a block of tokens in one pass."""

    trainer = "paceline.train.block:BlockTrainer"
    kind: str = "dflash"
    block_size: int = _head(8, "Rows of a block; the first is the last committed token.", low=2)
    causal: bool = _head(False, "Causal attention within a block, as in JetSpec; needed for trees.")
    feature_layers: tuple[int, ...] = changed(
        LayersConfig,
        "feature_layers",
        (),
        help="Target layers whose inputs are read; default: the third, the middle, all but 3.",
    )
    stride: int = _head(4, "Blocks start at every N-th position.", low=1)
    tv_weight: float = 0.0  # this and the next ones are used by DSpark only
    markov_rank: int = 0
    confidence_weight: float = 0.0


@forgiving("DSparkTrainConfig")
@dataclass(frozen=True)
class DSparkTrainConfig(DFlashTrainConfig):
    """Train a DSpark head: a block drafter with a previous-token bias and a confidence head."""

    kind: str = "dspark"
    block_size: int = changed(DFlashTrainConfig, "block_size", 7)
    tv_weight: float = _head(
        0.5, "Loss weight of total variation, which is the probability of rejection.", low=0, high=1
    )
    markov_rank: int = _head(
        64, "Rank of the bias that depends on the previous token; 0 is no bias.", low=0
    )
    confidence_weight: float = _head(1.0, "Weight of the confidence head's loss.", low=0)


@forgiving("MedusaTrainConfig")
@dataclass(frozen=True)
class MedusaTrainConfig(HeadConfig):
    """Train Medusa heads: each predicts one token further ahead from the last hidden state."""

    trainer = "paceline.train.medusa:MedusaTrainer"

    medusa_heads: int = _heads(
        4, "Number of heads, each of which drafts one token further ahead.", low=1
    )
    medusa_layers: int = _heads(1, "Residual blocks per head.", low=0)
    shared_head: bool = _heads(
        False,
        "Share the target's output layer instead of training one per head: far smaller.",
        flags=("--shared-head/--own-heads",),
    )


@forgiving("PromptSelection")
@dataclass(frozen=True)
class PromptSelection:
    """Which prompts a target answers."""

    num_prompts: int | None = _prompts(
        None, "Number of prompts to take.", low=1, shown="all conversations, 1000 texts"
    )
    seed: int = _prompts(0, "Seed of the choice of prompts and of sampled answers.", low=0)
    exclude_licenses: tuple[str, ...] = changed(
        TrainConfig, "exclude_licenses", ("CC-BY-SA",), panel="Prompts"
    )
    max_text_len: int = _prompts(
        96, "Longest beginning of a text that is used as a prompt, in tokens.", low=12
    )
    max_prompt_len: int = _prompts(640, "Longest conversation, in tokens.", low=1)


@dataclass(frozen=True)
class AnswerConfig:
    """How the target answers them: fields of SamplingParams."""

    max_tokens: int = _answers(256, "New tokens per prompt.", low=1)
    temperature: float = _answers(
        0.0, "Sampling temperature; 0 is greedy.", low=0, flags=("--temperature", "-t")
    )
    top_p: float = _answers(1.0, "Sample from the likeliest tokens of this total probability.")
    ignore_eos: bool = _answers(False, "Continue after end-of-sequence tokens.")
