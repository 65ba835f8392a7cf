"""Trains a small Llama from text, with a new tokenizer or a given one: the target of
recipes/embedded.sh, and the initial weights of its draft model. The result is in OUT/model.

    python recipes/embedded_target.py --data FILE[=WEIGHT] --out OUT [--steps N ...]"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.cli.options import Command, expand
from paceline.cli.train import RunningOptions, train
from paceline.core.stages import stage
from paceline.files import atomic_folder
from paceline.model.loading import load_tokenizer
from paceline.settings import changed, setting
from paceline.train.chat import conversation_from_record
from paceline.train.configs import DraftConfig
from paceline.train.data import Windows
from paceline.train.draft import DraftTrainer
from paceline.train.records import RecordError, Records

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>"]
# A special token begins a turn and another one ends it. ``chat_text`` renders the same format.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '" + END_OF_TURN + "' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def chat_text(record: dict[str, Any]) -> str:
    """A record in the format of ``CHAT_TEMPLATE``; "" if it cannot be rendered."""
    try:
        conversation = conversation_from_record(record)
    except RecordError:
        return ""
    if conversation is None:
        text = record.get("text")
        return text if isinstance(text, str) else ""
    return "".join(f"<|{m['role']}|>{m['content']}{END_OF_TURN}" for m in conversation.messages)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like that of GPT-2, in which every digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # "<bos> text": in training every document follows the separator.
    begins = [(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    before = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=begins)
    parts = [processors.ByteLevel(trim_offsets=False), before]
    tokenizer.post_processor = processors.Sequence(parts)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@dataclass(frozen=True)
class TargetConfig(DraftConfig):
    """Train a small Llama from text."""

    trainer = "embedded_target:TargetTrainer"
    valid: tuple[str, ...] = ()
    tokenizer: str | None = setting(None, "Use the tokenizer of this folder.")
    vocab_size: int = setting(4096, "Tokens of a new tokenizer.", low=1)
    hidden_size: int = changed(DraftConfig, "hidden_size", 256)
    layers: int = changed(DraftConfig, "layers", 12)
    heads: int = changed(DraftConfig, "heads", 4)
    kv_heads: int = changed(DraftConfig, "kv_heads", 2)
    ffn_size: int = changed(DraftConfig, "ffn_size", 768)


class TargetTrainer(DraftTrainer):
    """Trains on the text itself, without a target; only the loss is measured."""

    config: TargetConfig
    noun, spec = "model", None

    def prepare(self) -> None:
        folder = self.out / "model"
        existing = folder if (folder / "tokenizer.json").is_file() else self.config.tokenizer
        if existing is None:
            with stage(f"training a tokenizer of {self.config.vocab_size:,} tokens"):
                files = (Records(s.path, self.config.exclude_licenses) for s in self.sources)
                texts = filter(None, map(chat_text, chain.from_iterable(files)))
                tokenizer = train_tokenizer(texts, self.config.vocab_size)
            with atomic_folder(folder, "the tokenizer") as partial:
                tokenizer.save_pretrained(partial)
        self.tokenizer = tokenizer if existing is None else load_tokenizer(str(existing))
        self.begin()

    def new_model(self) -> PreTrainedModel:
        model = super().new_model()
        ends = self.tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_OF_TURN])
        model.config.eos_token_id = model.generation_config.eos_token_id = ends
        return model

    def loss(self, windows: Windows) -> torch.Tensor:
        ids, loss_mask = windows.ids.to(self.device), windows.loss_mask[:, 1:].to(self.device)
        logits = self._student(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits[loss_mask].float(), ids[:, 1:][loss_mask])

    def describe(self) -> str:
        return (
            f"A Llama of {self.model.num_parameters():,} parameters, trained by Paceline from the "
            "text of the files below. It is for testing decoding; its statements are often wrong."
        )


@expand
def main(config: TargetConfig, running: RunningOptions) -> None:
    """Train a small Llama from text."""
    train(config, running, "embedded_target.py")


if __name__ == "__main__":
    app = typer.Typer()
    app.command(cls=Command)(main)
    app()
