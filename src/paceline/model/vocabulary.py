"""Whether two models mean the same tokens by the same ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paceline.errors import VocabularyMismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
