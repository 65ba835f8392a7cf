"""Checks of a model's files: completeness, values, tokenizers and chat templates."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerFast

from paceline.draft.vocabulary import match_vocabularies
from paceline.errors import VocabularyMismatchError
from paceline.files import json_object
from paceline.lab.bench.prompts import evenly
from paceline.lab.doctor.findings import Finding, finding, refusal
from paceline.lab.doctor.models import Model, ModelFiles, check_tensors
from paceline.model.names import first_line
from paceline.model.tokenizer import differences

_TENSORS, _VALUES = 24, 4096  # sampled: tensors, and values of each


def check_files(files: ModelFiles) -> Iterator[Finding]:
    if files.gguf is not None:
        if files.gguf.has_unknown_pre_tokenizer:
            yield finding("gguf-tokenizer-unsure", pre=files.gguf.pre_tokenizer)
        return
    if files.absent:
        names = ", ".join(files.absent[:3])
        yield finding("shards-absent", count=len(files.absent), names=names)
    yield from (finding("weights-damaged", text) for text in files.damaged)
    if files.remote:
        yield finding("weights-remote", name=files.name)
    elif files.pickled:
        yield finding("weights-pickled", file=files.pickled[0])
    elif not files.tensors and not files.absent and not files.damaged:
        yield finding("weights-absent", name=files.name)


def check_weights(model: Model) -> Iterator[Finding]:
    yield from check_tensors(model)
    yield from check_values(model.files)
    if model.tokenizer is not None:
        last = max(model.tokenizer.get_vocab().values(), default=-1)
        if last >= model.vocab_size:
            yield finding("vocabulary-overflows", last=last, rows=model.vocab_size)


def check_values(files: ModelFiles) -> Iterator[Finding]:
    """Check a sample of the tensors for NaN and infinity."""
    stored = {} if files.remote else files.tensors
    floats = [k for k, t in stored.items() if t.is_floating_point() and t.itemsize > 1]
    for key in evenly(floats, _TENSORS):
        if not bool(stored[key].flatten()[:_VALUES].float().isfinite().all()):
            yield finding("weights-not-finite", name=key)
            return


def check_chat(model: Model, tokenizer: PreTrainedTokenizerFast) -> Iterator[Finding]:
    """Try a target's chat template on a question and an answer."""
    if tokenizer.chat_template is None:
        yield finding("chat-template-absent")
        return
    answer = "It is a number."
    chat = [{"role": "user", "content": "What is 7?"}, {"role": "assistant", "content": answer}]
    try:
        whole = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception as error:  # the template's own error, or one of jinja
        yield finding("chat-template-refuses", why=first_line(error))
        return
    # A token that the template writes after an answer must end generation. Some templates write a
    # closing tag first, so one of these tokens is enough.
    after = whole.partition(answer)[2]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    written = [i for i in tokenizer.encode(after, add_special_tokens=False) if i in special]
    ends = _ends(model)
    if written and not set(written) & ends:
        token = tokenizer.convert_ids_to_tokens(written[0])
        yield finding("turn-end-ignored", token=token, id=written[0], ends=sorted(ends) or "none")


def _ends(model: Model) -> set[int]:
    """The ids at which generation ends."""
    first = json_object(model.files.folder / "generation_config.json").get("eos_token_id")
    of_config = getattr(model.config, "eos_token_id", None) if first is None else first
    listed = of_config if isinstance(of_config, list) else [of_config]
    ids = (*listed, getattr(model.tokenizer, "eos_token_id", None))
    return {token for token in ids if isinstance(token, int)}


def compare(target: Model, draft: Model) -> Iterator[Finding]:
    """Compare two tokenizers as the engine does."""
    tokenizer, other = target.tokenizer, draft.tokenizer or target.tokenizer
    if tokenizer is None or other is None:
        return
    try:
        match = match_vocabularies(target, draft, tokenizer, other)
    except VocabularyMismatchError as error:
        yield refusal("vocabulary-refused", error)
        return
    if match is None:
        yield finding("vocabulary-same", count=len(tokenizer.get_vocab()))
    else:
        differing = differences(tokenizer, other)
        yield finding("vocabulary-differs", parts=differing, count=len(match.pairs))
