"""Receipts: records from which anyone who has the model can decode an answer again.

    SamplingParams(receipt=True) --> Completion.receipt --> paceline replay

A receipt is JSON. It holds the token ids of prompt and answer with their hashes, the hashes of the
weights and the tokenizer, the backend, and the sampling parameters that decide tokens. ``seal`` is
the hash of all other fields. It reveals a receipt that was changed, but anybody can make a new one;
only a replay shows whether the text is the model's. In the native kernels the bits of a row depend
on that row alone, so plain decoding of one request gives the tokens that a full batch with drafts
gave.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import msgspec

from paceline.core.params import Grammar, SamplingParams
from paceline.errors import ConfigError, PacelineError
from paceline.files import FileStamp
from paceline.request.completion import Completion

if TYPE_CHECKING:
    from paceline.model.target import CausalModel

FORMAT = 1
_CHUNK = 1 << 24  # bytes of a file that are read at once
# Parameters that decide tokens. The others choose a drafter or change what is shown.
_DECIDING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "max_tokens", "min_tokens", "stop"),
    *("stop_token_ids", "ignore_eos", "skip_special_tokens", "skip_end_tokens"),
    "include_stop_str_in_output",
)
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class _Backend(TypedDict):
    name: str


class _Receipt(TypedDict):
    """The fields of a receipt. A seal does not say that they are of these types."""

    paceline_receipt: int
    model: str
    weights: str
    tokenizer: str
    backend: _Backend
    settings: dict[str, Any]
    sampling: dict[str, Any]
    finish_reason: str
    prompt: _TokenIds
    tokens: _TokenIds
    prompt_sha256: str
    tokens_sha256: str
    seal: str


class ReceiptError(PacelineError):
    """A receipt cannot be replayed: it was changed, or belongs to other weights or settings."""


class Receipts:
    """Makes the receipts of an LLM. ``origin`` is the part that all of them share."""

    def __init__(self, target: CausalModel, tokenizer: Any) -> None:
        self._target, self._tokenizer = target, tokenizer

    def begin(self, params: SamplingParams) -> tuple[SamplingParams, dict[str, Any] | None]:
        """The parameters, with a seed if they sample without one, and the origin (None if no
        receipt is asked for). Raises ConfigError if an answer of this LLM could not be replayed."""
        if not params.receipt:
            return params, None
        if not params.greedy and params.seed is None:
            params = replace(params, seed=secrets.randbelow(2**63))
        return params, self.origin

    @cached_property
    def origin(self) -> dict[str, Any]:
        """Hashes of weights (all are read) and tokenizer, backend, settings. Raises ConfigError."""
        target = self._target
        if not target.checkpoint:
            raise ConfigError(
                f"receipt: {target.name} was not loaded as a whole from safetensors or a GGUF file "
                "of this disk, so its weights cannot be hashed; leave receipt out"
            )
        backend = {"name": target.backend.name, "computes": target.backend.description}
        backend |= {"paceline": version("paceline"), "torch": version("torch")}
        spelling = getattr(self._tokenizer, "backend_tokenizer", None)
        content = self._tokenizer.get_vocab() if spelling is None else spelling.to_str()
        dtype, cache = (
            str(kind).removeprefix("torch.") for kind in (target.dtype, target.cache_dtype)
        )
        return {
            "paceline_receipt": FORMAT,
            "model": target.name,
            "weights": _hash_of_files(target.checkpoint),
            "tokenizer": _hash(content),
            "backend": backend,
            "settings": {
                "dtype": dtype,
                "device": target.device.type,
                "quantize": target.quantize,
                "kv_cache_dtype": "auto" if cache == dtype else cache,
            },
        }


@lru_cache(maxsize=8)
def _hash_of_files(checkpoint: tuple[FileStamp, ...]) -> str:
    digest = hashlib.sha256()
    for stamp in checkpoint:
        path = Path(stamp.path)
        if FileStamp.of(path) != stamp:
            raise ConfigError(f"receipt: {path} has changed since it was loaded; load it again")
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def receipt_of(
    origin: dict[str, Any], params: SamplingParams, prompt: list[int], done: Completion
) -> dict[str, Any]:
    """Make the receipt of a finished answer, from the LLM's ``origin``."""
    sampling, neutral = {name: getattr(params, name) for name in _DECIDING}, SamplingParams()
    sampling = {k: v for k, v in sampling.items() if v != getattr(neutral, k)}
    if params.grammar is not None:
        sampling["grammar"] = [params.grammar.kind, params.grammar.text]
    record = {
        **origin,
        "sampling": sampling | {"max_tokens": params.max_tokens},
        "finish_reason": done.finish_reason,
        "prompt": prompt,
        "tokens": done.token_ids,
        "prompt_sha256": _hash(prompt),
        "tokens_sha256": _hash(done.token_ids),
    }
    record = json.loads(json.dumps(record))  # the types that a reader of the JSON will see
    return {**record, "seal": _hash(record)}


def read_receipts(path: Path) -> list[dict[str, Any]]:
    """The receipts in a JSON file, which is a receipt or contains some: an answer of the server or
    the output of ``generate --json``. Raises ReceiptError if there is none, or one was changed."""
    try:
        text = path.read_text(encoding="utf-8")
        receipts = list(_find_receipts(json.loads(text)))
    except OSError as error:
        raise ReceiptError(f"{path} cannot be read: {error.strerror}; give a receipt") from None
    except (ValueError, RecursionError) as error:
        raise ReceiptError(f"{path} cannot be read as JSON: {error}; give a receipt") from None
    if not receipts:
        raise ReceiptError(f"{path} has no receipt; ask for one with receipt: true")
    for receipt in receipts:
        if receipt["paceline_receipt"] != FORMAT:
            raise ReceiptError(f"{path} is a receipt of another version of paceline; use that one")
        rest = {key: value for key, value in receipt.items() if key != "seal"}
        hashes = receipt.keys() == _Receipt.__annotations__.keys() and {
            f"{name}_sha256": _hash(receipt[name]) for name in ("prompt", "tokens")
        }
        if not hashes or receipt.get("seal") != _hash(rest) or not hashes.items() <= rest.items():
            raise ReceiptError(
                f"{path} was changed: its seal is not that of its content; get the receipt again "
                "from whoever made it"
            )
        try:
            msgspec.convert(receipt, _Receipt)
            sampling_of_receipt(receipt)
        except (TypeError, ValueError, AttributeError, PacelineError) as error:
            raise ReceiptError(f"{path} has a value that no receipt has: {error}") from None
    return receipts


def sampling_of_receipt(receipt: dict[str, Any]) -> SamplingParams:
    """The sampling parameters to decode a receipt's answer again, without drafts."""
    sampling = dict(receipt["sampling"])
    if "grammar" in sampling:
        sampling["grammar"] = Grammar(*sampling["grammar"])
    biases = sampling.pop("logit_bias", {}).items()
    return SamplingParams(
        **sampling, logit_bias={int(token): bias for token, bias in biases}, drafter="none"
    )


def _find_receipts(value: Any) -> Any:
    """The receipts inside a JSON value, in order."""
    if isinstance(value, dict) and "paceline_receipt" in value:
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _find_receipts(item)


def _hash(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
