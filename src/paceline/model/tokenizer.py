"""Read a tokenizer, and tell whether two mean the same tokens by the same ids; without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.core.stages import stage
from paceline.errors import ModelLoadError, VocabularyMismatchError
from paceline.model.gguf import gguf_file, mended, read_gguf
from paceline.model.hub import fetched
from paceline.model.hub import first_line as first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a model's folder. Raises ModelLoadError if there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = fetched(name)
    gguf = gguf_file(path)
    if gguf is not None:
        return _of_gguf(gguf)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the tokenizers library raises nothing more precise
        raise ModelLoadError(
            f"no tokenizer in {name}: {first_line(error)}; put tokenizer.json beside the weights"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(
            f"the tokenizer of {name} is not a fast one (tokenizer.json); "
            "convert it with transformers' convert_slow_tokenizer and save it there"
        )
    return tokenizer


def _of_gguf(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, with the chat template, inside a GGUF file."""
    from transformers import AutoTokenizer

    file = read_gguf(path)
    try:
        with stage(f"reading the tokenizer of {path.name}"):
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # of whatever the tokens in the file lead to
        raise ModelLoadError(
            f"the tokenizer of {path} cannot be read: {first_line(error)}; another file of the "
            "same model may hold one that can"
        ) from None
    tokenizer._tokenizer = mended(tokenizer.backend_tokenizer, file)
    end = file.fields.get("tokenizer.ggml.eos_token_id")
    if end is not None and 0 <= int(end) < len(tokenizer):  # transformers 5.17 takes <s> for it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(int(end))
    return tokenizer


class Named(Protocol):
    """What is held against a vocabulary: a loaded model, or only its description.

    ``vocab_size`` counts rows of logits.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...


def differences(
    tokenizer: PreTrainedTokenizerFast, draft_tokenizer: PreTrainedTokenizerFast
) -> str:
    """In how many entries the vocabularies differ, and the first of them; "" if they agree.

    Logits may be padded to different widths: only ids that stand for tokens are compared.
    """
    ours = {index: token for token, index in tokenizer.get_vocab().items()}
    theirs = {index: token for token, index in draft_tokenizer.get_vocab().items()}
    differing = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
    if not differing:
        return ""
    shown = "; ".join(
        f"id {i}: target {ours.get(i)!r}, draft {theirs.get(i)!r}" for i in differing[:3]
    )
    return f"{len(differing)} of {len(ours)} vocabulary entries ({shown})"


def check_embeddings(draft: Named, tokens: int) -> None:
    """Raise VocabularyMismatchError if the draft lacks embeddings for the ``tokens`` it shares."""
    if draft.vocab_size < tokens:
        raise VocabularyMismatchError(
            f"draft {draft.name} has only {draft.vocab_size} embeddings for {tokens} tokens; "
            "use a draft of the same family"
        )
