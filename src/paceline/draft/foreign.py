"""Speculative decoding configurations of vLLM, converted to draft specs.

``--draft @vllm.json``, or the JSON itself: the value of ``--speculative-config``, or a
configuration that contains it, as the ``export.json`` of an export to vLLM does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.params import is_whole, shown
from paceline.errors import ConfigError
from paceline.files import json_object, user_path

_WITH_MODEL = {  # method of vLLM -> draft spec
    **{"eagle": "eagle:{},nodes=0", "eagle3": "eagle3:{},nodes=0"},
    **{"draft_model": "model:{}", "medusa": "medusa:{},tree=chain"},
    **{"dflash": "dflash:{}", "dspark": "dspark:{}"},
}
_GENERIC = f"paceline can read methods {', '.join(_WITH_MODEL)}, mtp, ngram and suffix"
_USUAL_LENGTH = {"suffix": 24, "mtp": 1}  # where vLLM does not demand num_speculative_tokens


@dataclass(frozen=True)
class ForeignDraft:
    """A draft spec, the draft length in levels and the verification rule; None if not stated."""

    spec: str
    length: int | None
    rule: str | None


def foreign_of(draft: object) -> ForeignDraft | None:
    """The draft if ``draft`` is another engine's configuration (a mapping, its JSON, ``@FILE``, or
    a list of one of these), else None. Raises ConfigError."""
    if isinstance(draft, (list, tuple)) and len(draft) == 1:
        (draft,) = draft
    if isinstance(draft, Mapping):
        return foreign_draft(draft, "speculative_config")
    if isinstance(draft, str) and draft.startswith(("@", "{")):
        return _read(draft)
    return None


def _read(text: str) -> ForeignDraft:
    """Reads JSON or ``@FILE``. Raises ConfigError if it cannot be read or has no equivalent."""
    path = text[1:] if text.startswith("@") else None
    where = "the configuration" if path is None else f"the configuration {path}"
    try:
        if path is not None:
            text = user_path(path).read_text(encoding="utf-8")
        parsed = json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from None
    except (ValueError, RecursionError):  # not text, or not JSON
        parsed = None
    if not isinstance(parsed, dict):
        raise ConfigError(
            f"{where} is not JSON, or no JSON object; give vLLM's --speculative-config, "
            "or a spec such as ngram:min=2"
        )
    return foreign_draft(parsed, path or where)


def foreign_draft(config: Mapping[str, Any], where: str = "the configuration") -> ForeignDraft:
    """Converts a parsed configuration; ``where`` names it in errors. Raises ConfigError."""
    for key in ("config", "speculative_config"):
        inner = config.get(key)
        if isinstance(inner, dict):
            config = inner
    if not config.keys() & {"method", "num_speculative_tokens"}:
        raise ConfigError(f"{where} has neither vLLM's method nor its num_speculative_tokens")
    method = _method(config)
    length = _whole(config, "num_speculative_tokens", where, _USUAL_LENGTH.get(method))
    sampling = config.get("rejection_sample_method")
    if sampling not in (None, "standard", "block"):
        raise ConfigError(
            f"{where} has rejection_sample_method {sampling!r}, which is not lossless; "
            "use standard or block"
        )
    rule = "token" if sampling == "standard" else sampling
    return ForeignDraft(_spec(method, config, length, where), length, rule)


def _whole(values: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if not is_whole(value) or value < 1:
        has = f"lacks {key}" if value is None else f"has {shown(value)} for {key}"
        raise ConfigError(f"{where} {has}; it must be a whole number above 0")
    return value


def _model(values: Mapping[str, Any], key: str, where: str) -> str:
    model = values.get(key)
    if not isinstance(model, str) or not model:
        raise ConfigError(f"{where} names no {key}; give the folder of the draft")
    return model


def _head_config(model: str) -> Mapping[str, Any]:
    """The config.json in a local folder; {} if it cannot be read."""
    return json_object(user_path(model) / "config.json")


def _method(values: Mapping[str, Any]) -> str:
    """The method, or what vLLM infers from the model if none is named."""
    method, model = values.get("method"), str(values.get("model", ""))
    if method:
        return "mtp" if str(method).endswith("_mtp") else str(method)
    if model in ("ngram", "[ngram]", "suffix"):
        return model.strip("[]")
    kind = _head_config(model).get("speculators_model_type")
    named = (k for k in ("eagle3", "peagle", "dflash", "dspark") if k == kind or k in model.lower())
    return next(named, "draft_model").replace("peagle", "eagle3")


def _spec(method: str, values: Mapping[str, Any], length: int, where: str) -> str:
    if method in _WITH_MODEL:
        model = _model(values, "model", where)
        alone = method == "draft_model" and "pard_token" in _head_config(model)
        off = ",parallel=off" if alone and not values.get("parallel_drafting") else ""
        return _WITH_MODEL[method].format(model) + off
    if method == "mtp":
        return f"mtp:{values['model']}" if values.get("model") else method
    if method in ("ngram", "ngram_gpu"):
        ends = "prompt_lookup_min", "prompt_lookup_max"
        given = {key: _whole(values, key, where) for key in ends if values.get(key)}
        usual = next(iter(given.values()), 5)  # 5: vLLM's own default
        # More than ours takes: the longest matches are as good.
        least, most = (min(given.get(key, usual), 256) for key in ends)
        return f"ngram:min={least},max={most},length={length},candidates=1"
    if method == "suffix":
        kept = values.get("suffix_decoding_max_cached_requests", 10_000)
        return (
            f"suffix:max_depth={_whole(values, 'suffix_decoding_max_tree_depth', where, 24)},"
            f"factor={values.get('suffix_decoding_max_spec_factor', 1.0)},"
            f"min_prob={values.get('suffix_decoding_min_token_prob', 0.1)}"
            + ("" if kept else ",global=off")
        )
    raise ConfigError(f"{where} has vLLM's method {method!r}; {_GENERIC}")
