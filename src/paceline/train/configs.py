"""What determines a training's result: the configuration of each, from which ``paceline train``
has its options and its help (the docstring). Sizes are in tokens, rates per step.

Nothing here loads torch, so that ``--help`` is fast.
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
    """What every training is told, of what drafts for a target."""

    trainer: ClassVar[str]  # MODULE:CLASS, which loads torch

    model: str = _data(EMBEDDED, "The model to draft for; it stays as it is.")
    data: tuple[str, ...] = _data(
        MISSING,
        "JSONL(.gz) with messages, conversations, turns, text or ids, and its share. "
        "For a draft, best is what the target wrote itself (paceline train sample).",
        metavar="FILE[=WEIGHT]",
    )
    valid: tuple[str, ...] = _data((), "Openings for the held-out acceptance.", metavar="FILE")
    exclude_licenses: tuple[str, ...] = _data(
        ("CC-BY-SA",),
        "Leave out records whose license contains this.",
        flags=("--exclude-license",),
    )
    loss_on: str = _data(
        "assistant", "What is learnt of conversations.", choices=("assistant", "all")
    )
    seq_len: int = _schedule(256, "Longest piece of a document, in tokens.", low=1)
    long_every: int = _schedule(
        10, "Every so many steps, documents joined to --max-positions; 0: never.", low=0
    )
    max_positions: int = _schedule(1024, "Longest of joined documents, and context.", low=1)
    batch_tokens: int = _schedule(8192, "Tokens a step.", low=1)
    micro_tokens: int = _schedule(2048, "Tokens of one forward pass.", low=1)
    steps: int = _schedule(1500, "Steps in all.", low=1)
    warmup: int = _schedule(50, "Steps of rising learning rate.", low=1)
    lr: float = _schedule(0.005, "Peak rate of Muon (matrices).", low=0)
    adam_lr: float = _schedule(0.004, "Peak rate of AdamW (the rest).", low=0)
    weight_decay: float = _schedule(0.05, "Weight decay of matrices.", low=0)
    seed: int = _schedule(0, "Of weights and batches.", low=0)
    argmax_weight: float = _loss(
        0.0,
        "Share of the likeliest token; more serves greedy decoding, less sampling.",
        low=0,
        high=1,
    )
    draft_length: int = _held_out(4, "Draft tokens a step.", low=1)
    held_out: int = _held_out(8, "Openings of each --valid file.", low=1)
    held_out_tokens: int = _held_out(96, "Tokens written from each.", low=2)

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that is no choice or out of range."""
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
        "Go on from this draft model, of the target's vocabulary.",
        metavar="FOLDER",
        shown="a new one of the shape below",
    )
    tv_weight: float = _loss(
        0.0,
        "Share of total variation, the chance of rejection itself: 0 learns fast, 1 is best to "
        "finish with.",
        low=0,
        high=1,
    )
    parallel: bool = _loss(
        False, "Learn to draft --draft-length tokens in one pass, behind tokens of one kind (PARD)."
    )
    hidden_size: int = _shape(192, "Width.", low=1)
    layers: int = _shape(2, "Depth.", low=1)
    heads: int = _shape(3, "Attention heads.", low=1)
    kv_heads: int = _shape(3, "Key and value heads.", low=1)
    ffn_size: int = _shape(512, "Width of the feed-forward part.", low=1)


@dataclass(frozen=True)
class HeadConfig(TrainConfig):
    """Heads of any kind on a frozen target."""

    cache_features: bool = _data(
        False,
        "Keep what the target says about each document on disk, for several passes.",
        flags=("--cache-features/--stream-features",),
    )
    seq_len: int = _general("seq_len", 1024)
    batch_tokens: int = _general("batch_tokens", 4096)
    steps: int = _general("steps", 1000)
    adam_lr: float = _general("adam_lr", 0.003)
    argmax_weight: float = _general("argmax_weight", 0.3)
    step_decay: float = _loss(0.8, "Weight of each further drafted token.", low=0)
    dtype: str = _schedule(
        "bfloat16",
        "Of target and head; the optimizer's weights are float32 in any case.",
        choices=("bfloat16", "float32", "auto"),
    )


@forgiving("EagleTrainConfig")
@dataclass(frozen=True)
class EagleTrainConfig(HeadConfig):
    """Train an EAGLE-3 head: three layers' features, unrolled as in drafting."""

    trainer = "paceline.train.eagle:EagleTrainer"
    version: int = 3
    init: str = _head("", "Go on from this head; 'target': from its last layer.", metavar="FOLDER")
    ttt_steps: int = _head(
        4, "Drafting steps that training unrolls (training-time test); 1 is none.", low=1
    )
    stride: int = _head(
        1, "Unroll every N-th position only; all learn their first drafted token.", low=1
    )
    parallel: bool = _head(
        False, "Draft in one pass: later steps read one token and one learnt feature (P-EAGLE)."
    )
    feature_weight: float = 1.0  # of version 1 alone, as the next one
    token_weight: float = 0.1
    feature_layers: tuple[int, ...] = _head(
        (),
        "Target layers whose inputs are read; default: 2, half of them, all but 3.",
        kind="numbers",
        metavar="N,N,N",
    )
    draft_vocab_size: int = _head(16000, "Most frequent tokens that it can draft; 0: all.", low=0)
    heads: int = _head(0, "Attention heads; 0: the target's.", low=0)
    kv_heads: int = _head(0, "Key and value heads; 0: the target's.", low=0)
    head_dim: int = _head(0, "Width of a head; 0: the target's.", low=0)
    ffn_size: int = _head(0, "Width of the feed-forward part; 0: the target's.", low=0)


@forgiving("Eagle1TrainConfig")
@dataclass(frozen=True)
class Eagle1TrainConfig(EagleTrainConfig):
    """Train an EAGLE head (also for EAGLE-2): continues the target's last features."""

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
    feature_layers: tuple[int, ...] = ()  # it has one, and drafts all tokens
    draft_vocab_size: int = 16000


@forgiving("DFlashTrainConfig")
@dataclass(frozen=True)
class DFlashTrainConfig(HeadConfig):
    """Train a DFlash head: a few layers that draft a block of tokens in one pass."""

    trainer = "paceline.train.block:BlockTrainer"
    kind: str = "dflash"
    block_size: int = _head(8, "Rows of a block; the first is the last committed token.", low=2)
    layers: int = _head(1, "Layers.", low=1)
    causal: bool = _head(False, "Rows of a block see none behind them, as JetSpec's: for trees.")
    ffn_size: int = _head(0, "Width of the feed-forward part; 0: the target's.", low=0)
    feature_layers: tuple[int, ...] = changed(
        EagleTrainConfig,
        "feature_layers",
        (),
        help="Target layers whose inputs are read; default: the third, the middle, all but 3.",
    )
    stride: int = _head(4, "Blocks start at every N-th position.", low=1)
    tv_weight: float = 0.0  # of DSpark, as the next ones
    markov_rank: int = 0
    confidence_weight: float = 0.0


@forgiving("DSparkTrainConfig")
@dataclass(frozen=True)
class DSparkTrainConfig(DFlashTrainConfig):
    """Train a DSpark head: a block drafter with a bias by the token before and a confidence."""

    kind: str = "dspark"
    block_size: int = changed(DFlashTrainConfig, "block_size", 7)
    tv_weight: float = _head(
        0.5, "Share of total variation, the chance of rejection itself.", low=0, high=1
    )
    markov_rank: int = _head(64, "Rank of the bias by the token before; 0: none.", low=0)
    confidence_weight: float = _head(1.0, "Weight of the confidence head's loss.", low=0)


@forgiving("MedusaTrainConfig")
@dataclass(frozen=True)
class MedusaTrainConfig(HeadConfig):
    """Train Medusa heads: several tokens ahead from the target's last hidden state."""

    trainer = "paceline.train.medusa:MedusaTrainer"

    medusa_heads: int = _heads(4, "Heads: tokens drafted ahead.", low=1)
    medusa_layers: int = _heads(1, "Residual blocks of each.", low=0)
    shared_head: bool = _heads(
        False,
        "Use the target's vocabulary layer instead of one per head: far smaller.",
        flags=("--shared-head/--own-heads",),
    )


@forgiving("PromptSelection")
@dataclass(frozen=True)
class PromptSelection:
    """Which prompts a target answers."""

    num_prompts: int | None = _prompts(
        None, "Prompts to take.", low=1, shown="all conversations, 1000 texts"
    )
    seed: int = _prompts(0, "Of choice and text.", low=0)
    exclude_licenses: tuple[str, ...] = _prompts(
        ("CC-BY-SA",), "Leave out such records.", flags=("--exclude-license",)
    )
    max_text_len: int = _prompts(96, "Longest beginning of a text, in tokens.", low=12)
    max_prompt_len: int = _prompts(640, "Longest conversation, in tokens.", low=1)
    follow_ups: float = _prompts(
        0.0,
        "Share of the conversations that are asked a further question. Questions of several "
        "turns are always asked to the end.",
        low=0,
        high=1,
    )


@dataclass(frozen=True)
class AnswerConfig:
    """How the target answers them: fields of SamplingParams."""

    max_tokens: int = _answers(256, "New tokens of each prompt.", low=1)
    temperature: float = _answers(0.0, "0 is greedy.", low=0, flags=("--temperature", "-t"))
    top_p: float = _answers(1.0, "Keep this much probability.")
    ignore_eos: bool = _answers(False, "Go on past the end of a text.")
