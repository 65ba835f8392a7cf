"""Whether two models mean the same tokens by the same ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import VocabularyMismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from paceline.model.target import CausalModel


def check_same_vocabulary(
    tokenizer: PreTrainedTokenizerFast,
    draft_tokenizer: PreTrainedTokenizerFast,
    target: CausalModel,
    draft: CausalModel,
) -> None:
    """Raise VocabularyMismatchError, showing the first differing entries, unless ids agree.

    Logits may be padded to different widths: only ids that stand for tokens are compared.
    """
    ours = {index: token for token, index in tokenizer.get_vocab().items()}
    theirs = {index: token for token, index in draft_tokenizer.get_vocab().items()}
    differing = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
    if differing:
        shown = "; ".join(
            f"id {i}: target {ours.get(i)!r}, draft {theirs.get(i)!r}" for i in differing[:3]
        )
        raise VocabularyMismatchError(
            f"draft {draft.name} and target {target.name} differ in {len(differing)} of "
            f"{len(ours)} vocabulary entries ({shown}); use a draft of the same family"
        )
    if draft.vocab_size < len(ours):
        raise VocabularyMismatchError(
            f"draft {draft.name} has only {draft.vocab_size} embeddings for {len(ours)} tokens; "
            "use a draft of the same family"
        )
