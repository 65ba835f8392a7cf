"""Tokenizers of the kinds that real models have, made up on the spot, and random models of them.

They read and write any text, as those in ``made_tokenizers`` need not. Merges are made up, too:
every beginning of a word is a token, so a word list gives a vocabulary of any size in a moment,
where training would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from paceline.draft.vocabulary import TokenTexts, shared_ids
from support.engine_models import random_llama
from support.made_tokenizers import BYTES, GEMMA, LLAMA
from support.tiny_models import SENTENCES

# Each in its own UTF-8 bytes: two, three and four of them, and one of several characters.
UNUSUAL = "é ß 你好 ı ✓ 🙂 🇩🇪 👩‍👧 ∑ \u200d\ufe0f"
_ONSETS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "bl",
    "br",
    "ch",
    "cl",
    "dr",
    "fl",
    "gr",
    "pl",
    "pr",
    "sh",
    "sp",
    "st",
    "str",
    "th",
    "tr",
]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ee", "io", "ou"]
_CODAS = ["", *"lmnrstxdk", "ng", "nt", "st", "ck", "ly"]
_GPT = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
TURNS = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' + "
    "message['content'] + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<start_of_turn>model\n' }}{% endif %}"
)


def _words() -> Iterator[str]:
    """Those of the sentences, and then syllables upon syllables."""
    for sentence in SENTENCES:
        yield from sentence.replace("\n", " ").split()
    syllables = ["".join(parts) for parts in product(_ONSETS, _VOWELS, _CODAS)]
    # Not in order: the first words would all begin alike.
    yield from syllables
    for step in (1, 7, 191, 1009):
        for place, syllable in enumerate(syllables):
            yield syllable + syllables[place * step % len(syllables)]
    for first, second in product(syllables, syllables):
        yield first + second


def _grown(alphabet: Iterable[str], pieces: Iterable[str], size: int) -> Any:
    """A BPE model of ``size`` tokens: the alphabet, then every beginning of every piece."""
    vocab = {name: place for place, name in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for piece in pieces:
        left = piece[0]
        for letter in piece[1:]:
            if len(vocab) == size:
                return vocab, merges
            if left + letter not in vocab:
                vocab[left + letter] = len(vocab)
                merges.append((left, letter))
            left += letter
    raise AssertionError(f"only {len(vocab)} tokens, {size} are wanted")


def _in_bytes(text: str) -> str:
    """As byte-level tokenizers write it."""
    ((written, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
    return written


def _byte_level(size: int, specials: list[str], splits: Any, **options: Any) -> Tokenizer:
    """Characters outside of ASCII are half merged: their last byte is a token of its own."""
    torn = [_in_bytes(letter)[:-1] for letter in UNUSUAL if len(letter.encode()) > 2]
    pieces = (_in_bytes(lead + word) for word in _words() for lead in (" ", ""))
    vocab, merges = _grown(
        [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())],
        chain(filter(None, torn), pieces),
        size,
    )
    core = Tokenizer(models.BPE(vocab, merges, **options))
    core.pre_tokenizer = splits
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    return core


def _fast(core: Tokenizer, begin: str | None, end: str, template: str) -> PreTrainedTokenizerFast:
    ends = {"eos_token": end, "pad_token": end} | ({} if begin is None else {"bos_token": begin})
    found = PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, **ends
    )
    found.chat_template = template
    return found


def smollm(size: int = 49_152) -> PreTrainedTokenizerFast:
    """Byte-level BPE as of GPT-2 and SmolLM2: digits one by one, ChatML, no opening token."""
    splits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    core = _byte_level(size, specials, splits)
    return _fast(core, "<|im_start|>", "<|im_end|>", CHATML)


def wide(size: int = 128_000) -> PreTrainedTokenizerFast:
    """128,000 tokens as of Llama 3, Qwen and o200k: another way to split, words taken whole."""
    splits = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_GPT, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
    core = _byte_level(size, specials, splits, ignore_merges=True)
    core.post_processor = _opened("<|begin_of_text|>", core)
    return _fast(core, "<|begin_of_text|>", "<|im_end|>", CHATML)


def _opened(token: str, core: Tokenizer) -> Any:
    return TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, core.token_to_id(token))]
    )


def _blanks(specials: list[str], size: int) -> Tokenizer:
    """SentencePiece: blanks belong to words, what is unknown is written in bytes."""
    pieces = (lead + word for word in _words() for lead in ("▁", ""))
    letters = [chr(code) for code in range(0x21, 0x7F)]
    alphabet = [*specials, *BYTES, "▁", *letters, "é", "你", "\n"]
    vocab, merges = _grown(alphabet, chain(["▁▁▁▁"], pieces), size)
    unknown = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    core = Tokenizer(models.BPE(vocab, merges, **unknown))
    core.decoder = LLAMA
    core.add_special_tokens(specials)
    return core


def llama2(size: int = 32_000) -> PreTrainedTokenizerFast:
    """A blank in front of all text, and no splits: as the hub's tokenizer.json of Llama 2."""
    core = _blanks(["<unk>", "<s>", "</s>"], size)
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.post_processor = _opened("<s>", core)
    return _fast(core, "<s>", "</s>", INST)


def mistral(size: int = 32_000) -> PreTrainedTokenizerFast:
    """The same by a pre-tokenizer, a blank at the very beginning only, and control tokens."""
    core = _blanks(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], size)
    core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    core.post_processor = _opened("<s>", core)
    return _fast(core, "<s>", "</s>", INST)


def gemma(size: int = 48_000) -> PreTrainedTokenizerFast:
    """No blank in front; turns and a tag that is no special token."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    core = _blanks(specials, size)
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.decoder = GEMMA
    core.add_tokens([AddedToken("<code>", normalized=False)])
    core.post_processor = _opened("<bos>", core)
    return _fast(core, "<bos>", "<end_of_turn>", TURNS)


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "smollm": smollm,
    "wide": wide,
    "llama2": llama2,
    "mistral": mistral,
    "gemma": gemma,
}


def write_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, *, padding: int = 0, noise: float = 0.0
) -> str:
    """A random Llama whose head has ``padding`` rows more than the tokenizer has tokens."""
    model = random_llama(3, 2, noise, len(tokenizer) + padding)
    return _saved(folder, model, tokenizer)


def write_translation(folder: Path, target: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """The target itself in another vocabulary: rows of shared tokens moved, others random."""
    source = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model = random_llama(9, 2, 0.0, len(tokenizer))
    body = {key: value for key, value in source.state_dict().items() if ".layers." in key}
    model.load_state_dict(body, strict=False)
    ours = TokenTexts(AutoTokenizer.from_pretrained(target))
    pairs = shared_ids(ours, TokenTexts(tokenizer))
    mine, theirs = (torch.tensor(list(ids)) for ids in (pairs, pairs.values()))
    with torch.no_grad():
        model.model.norm.weight.copy_(source.model.norm.weight)
        for part in ("get_input_embeddings", "get_output_embeddings"):
            getattr(model, part)().weight[theirs] = getattr(source, part)().weight[mine]
    return _saved(folder, model, tokenizer)


def _saved(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> str:
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
