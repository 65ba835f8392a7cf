"""A byte-level BPE tokenizer with a chat template, trained from text."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
ROLE_TOKENS = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
SPECIAL_TOKENS = [END_OF_TEXT, END_OF_TURN, *ROLE_TOKENS.values()]

# One special token opens a turn and one closes it; `chat.own_text` writes the same.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '" + END_OF_TURN + "' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer as GPT-2's, with every digit a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # "<bos> text": every document is learnt with the separator in front of it.
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{END_OF_TEXT} $A",
                special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
            ),
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def mask_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token of rows that stand for what is to be drafted in one pass."""
    known = (getattr(tokenizer, f"{kind}_token_id") for kind in ("mask", "unk", "pad", "eos"))
    return next((token for token in known if token is not None), 0)
