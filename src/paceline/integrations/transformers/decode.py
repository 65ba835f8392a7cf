"""The decoding loop that ``model.generate`` of transformers calls in place of its own.

It runs an engine over the caller's model: a copy of its modules that shares the tensors (on a CPU,
linear weights are copied into another layout). The engine is reused by later calls until the
weights or the draft change."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from paceline.build import EngineOptions, build_engine, seeded_generator
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.base import Drafter
from paceline.draft.spec import DraftSpec, LoadContext
from paceline.drafters import parse_draft, prepare_one
from paceline.engine.driver import Drive, sequence
from paceline.engine.engine import Engine
from paceline.errors import ConfigError, ModelLoadError, PacelineError
from paceline.integrations.transformers.terms import (
    CriteriaReader,
    RowProcessor,
    Terms,
    read_prompts,
    read_terms,
    refuse,
)
from paceline.model.backends.base import check_backend
from paceline.model.loading import check_architecture, load_tokenizer
from paceline.model.probe import register
from paceline.model.target import CausalModel
from paceline.request.completion import CompletionStats


@dataclass
class SharedEngine:
    """A model's engine, for one call at a time, and the ``key`` of what it was built for."""

    lock: Any = field(default_factory=threading.RLock)
    busy: bool = False
    key: Hashable = None
    built: Engine | None = None


_engines: WeakKeyDictionary[Any, SharedEngine] = WeakKeyDictionary()
_guard = threading.Lock()


@contextmanager
def engine_over(
    model: Any, draft: str | DraftSpec | Drafter, options: EngineOptions, tokenizer: Any
) -> Iterator[Engine]:
    """The engine of a transformers ``model``, newly built or that of an earlier call. ``tokenizer``
    is the target's, which draft models need; None loads it from where the model was loaded. Calls
    of other threads wait. Raises UnsupportedModelError, ConfigError, and errors of the draft."""
    with _guard:
        shared = _engines.setdefault(model, SharedEngine())
    with shared.lock:
        if shared.busy:
            raise ConfigError(
                "a streamer or stopping criterion of generate has called generate with the same "
                "model; use another model object there"
            )
        named = str(draft) if isinstance(draft, (str, DraftSpec)) else id(draft)
        key = named, options, id(tokenizer), _weights(model)
        if shared.built is None or shared.key != key:
            shared.built = None  # free it first, since two caches may not fit
            with torch.random.fork_rng(devices=[]):  # creating modules draws random weights
                shared.built = _built(model, draft, options, tokenizer)
            shared.key = key
        shared.busy = True
        try:
            yield shared.built
        finally:
            shared.busy = False


def forget(model: Any) -> None:
    """Free the engine of a model with its cache and draft, if there is one."""
    with _guard:
        _engines.pop(model, None)


def _weights(model: Any) -> tuple[Hashable, ...]:
    """A key that changes when a weight is written in place (except through ``.data``, which PyTorch
    does not track), replaced or moved, or when an adapter is switched."""
    tensors = (*model.parameters(), *model.buffers())
    adapters = [
        (str(module.active_adapters), bool(module.disable_adapters), str(module.merged_adapters))
        for module in model.modules()
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters")
    ]
    marks = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]
    return (*marks, *adapters)


def _built(
    model: Any, draft: str | DraftSpec | Drafter, options: EngineOptions, tokenizer: Any
) -> Engine:
    check_backend(options.backend)
    kind = type(model).__name__
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or "meta" in devices:
        where = ", ".join(sorted(devices))
        raise ConfigError(
            f"the weights of this {kind} are on {where}; put all of them on one device to decode "
            "speculatively (no device_map that splits or offloads)"
        )
    register()
    # New modules that share the weights.
    target = CausalModel.from_module(model, str(model.name_or_path) or kind, options.backend)
    draft = parse_draft(draft) if isinstance(draft, str) else draft
    tokenizer = _tokenizer(model, draft, tokenizer)
    dtype = str(target.dtype).removeprefix("torch.")
    loading = LoadContext(target, tokenizer, dtype, options.draft_quantize)
    generator = seeded_generator(target.device, None)
    return build_engine(target, prepare_one(draft, loading), options, generator)


def _tokenizer(model: Any, draft: DraftSpec | Drafter, given: Any) -> Any:
    """The tokenizer of the target, if a draft model must be checked to have the same vocabulary."""
    if given is not None or not isinstance(draft, DraftSpec):
        return given
    if all(member.argument_kind != "model" for member in draft.members()):
        return None
    try:
        return load_tokenizer(str(model.name_or_path))
    except ModelLoadError as error:
        raise ConfigError(
            f"a draft model needs the target's tokenizer, and {error}; give "
            "target_tokenizer=AutoTokenizer.from_pretrained(...)"
        ) from None


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """The result with ``return_dict_in_generate=True``: ``sequences`` int64 ``[batch, length]``,
    padded on both sides, and the ``stats`` of each row. Scores and caches are not returned."""

    stats: list[CompletionStats] | None = None


def generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    draft: str | DraftSpec | Drafter = "suffix",
    draft_length: int | str = "auto",
    rule: str = "auto",
    seed: int | None = None,
    backend: str = "auto",
    max_batch_size: int = 8,
    kv_cache_memory: int | None = None,
    draft_quantize: str | None = None,
    target_tokenizer: Any = None,
    streamer: Any = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> torch.Tensor | SpeculativeOutput:
    """Lossless speculative decoding, as ``custom_generate`` of ``model.generate``.

    ``draft`` is any drafter of Paceline, as a spec or an object. ``draft_length``, ``rule``,
    ``backend``, ``max_batch_size`` (further rows wait), ``kv_cache_memory`` in bytes and
    ``draft_quantize`` are those of ``LLM``. Sampled row r has the seed ``seed + r``; without
    ``seed`` it is drawn from PyTorch's global generator, so that after ``torch.manual_seed`` the
    text is reproducible, whatever the draft. With ``rule`` "token" or "block" rows without ``seed``
    have no seeds of their own. ``target_tokenizer``: see docs/guides/transformers.md.

    Returns token ids ``[batch, length]`` including the prompts, or a SpeculativeOutput if the
    configuration asks for a dict. Raises ConfigError for options that are not supported, and
    whatever a stopping criterion, logits processor or streamer raises."""
    streamer = _checked_streamer(streamer, synced_gpus)
    check_architecture(model.config)
    terms = read_terms(generation_config, logits_processor, stopping_criteria, input_ids.shape[1])
    prompts = read_prompts(input_ids, model_kwargs)
    options = EngineOptions(
        draft_length=draft_length,
        rule=rule,
        backend=backend,
        max_batch_size=max_batch_size,
        kv_cache_memory=kv_cache_memory,
        draft_quantize=draft_quantize,
    )
    params = replace(terms.params, seed=seed)
    seeds = [_seed(params, rule, number) for number in range(len(prompts))]
    with engine_over(model, draft, options, target_tokenizer) as engine:
        engine.verifier.reseed(int(torch.randint(2**62, ())))
        rows = [
            _row(engine, replace(params, seed=row_seed), terms, input_ids, number, prompt)
            for number, (prompt, row_seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        pad = getattr(generation_config, "_pad_token_tensor", None)
        pad = generation_config.pad_token_id if pad is None else int(pad)
        _decode(engine, rows, pad, streamer)
    sequences = torch.cat((input_ids, input_ids.new_tensor(_columns(rows, pad)).T), 1)
    if generation_config.return_dict_in_generate:
        return SpeculativeOutput(sequences=sequences, stats=list(map(CompletionStats.of, rows)))
    return sequences


def _checked_streamer(given: Any, synced_gpus: bool) -> Any:
    """The streamer. transformers 5.17 to 5.23 keep it in the local variables of ``model.generate``.
    Raises ConfigError for decoding modes that only transformers has."""
    frame = sys._getframe(2)
    caller = frame.f_locals if frame.f_code.co_name == "generate" else {}
    if caller.get("assistant_model") is not None:
        raise refuse("assistant_model", "give its folder as draft=...")
    if synced_gpus:
        raise refuse("synced_gpus", "decode on one device")
    return caller.get("streamer") if given is None else given


def _seed(params: SamplingParams, rule: str, number: int) -> int | None:
    """The seed of a row; None if it is greedy or uses the engine's random numbers."""
    if params.greedy:
        return None
    if params.seed is not None:
        return (params.seed + number) % 2**63
    # From PyTorch's global generator, so that ``torch.manual_seed`` has an effect.
    return int(torch.randint(2**62, ())) if rule in ("auto", "coupled") else None


def _row(
    engine: Engine,
    params: SamplingParams,
    terms: Terms,
    input_ids: torch.Tensor,
    number: int,
    prompt: list[int],
) -> SequenceState:
    """Row ``number`` of the batch as a sequence of the engine. Raises ConfigError."""
    vocab_size, limit = engine.target.vocab_size, engine.scheduler.config.max_positions
    if len(prompt) >= limit:
        raise ConfigError(
            f"a prompt has {len(prompt)} tokens, but the engine takes {limit} with the answer; "
            "shorten it, or raise kv_cache_memory if the model supports more"
        )
    if not all(0 <= token < vocab_size for token in prompt):
        raise ConfigError(f"a prompt has ids outside the vocabulary (0 to {vocab_size - 1})")
    if terms.processors is not None:
        processor = RowProcessor(terms.processors, input_ids, number)
        params = replace(params, logits_processors=(processor,))
    row = sequence(prompt, params, terms.stop_ids)
    if terms.criteria:
        row.stops = CriteriaReader(terms.criteria, input_ids[number], params.max_tokens)
    return row


def _columns(
    rows: list[SequenceState],
    pad: int | None,
    first: int = 0,
    running: Collection[SequenceState] = (),
) -> list[tuple[int, ...]]:
    """The generated tokens as columns, one token per row, from ``first`` to the last that all
    ``running`` rows have. Ended rows are padded; raises ConfigError without a padding token."""
    last = min((row.generated for row in running), default=max(row.generated for row in rows))
    texts = (row.tokens[row.prompt_length + first :] for row in rows)
    columns: list[Any] = list(islice(zip_longest(*texts, fillvalue=pad), last - first))
    if any(None in column for column in columns):
        raise ConfigError(
            "the rows have different lengths and there is no pad_token_id; set pad_token_id"
        )
    return columns


def _decode(engine: Engine, rows: list[SequenceState], pad: int | None, streamer: Any) -> None:
    """Decode all rows. A ``streamer`` gets one column of tokens at a time, as from transformers.
    Raises PacelineError, and what a criterion, processor or streamer raises."""
    streamed = 0
    with Drive(engine, rows) as drive:
        for step in drive:
            for commit in step.commits:
                if commit.error is not None:  # perhaps raised by one of the caller's own functions
                    row = next(row for row in rows if row.seq_id == commit.seq_id)
                    callbacks = row.stops, *row.params.logits_processors
                    errors = (getattr(callback, "error", None) for callback in callbacks)
                    raise next(filter(None, errors), PacelineError(commit.error))
            if streamer is not None:
                columns = _columns(rows, pad, streamed, drive.running.values())
                streamed += len(columns)
                for tokens in columns:
                    streamer.put(torch.tensor(tokens))
    if streamer is not None:
        streamer.end()


def generate_whole(
    model: Any, inputs: Any = None, tokenizer: Any = None, streamer: Any = None, **kwargs: Any
) -> Any:
    """``model.generate(inputs, ...)`` with Paceline's decoding. Arguments, result and errors are
    those of ``generate``; ``stop_strings`` work, too, and need ``tokenizer``. This is for
    ``custom_generate/generate.py`` in a folder or on the hub, since such a function gets all
    arguments of ``model.generate``. A function that is passed as an object gets neither the
    tokenizer nor, in transformers 5.17 to 5.23, the streamer."""
    stops = kwargs.pop("stop_strings", None)
    if stops is not None:
        if tokenizer is None:
            raise ConfigError("stop_strings need the tokenizer; give tokenizer=...")
        criteria = kwargs.pop("stopping_criteria", None) or ()
        added = StopStringCriteria(tokenizer, stops)
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, added])
    if tokenizer is not None:
        kwargs.setdefault("target_tokenizer", tokenizer)
    # Not model.generate, which is this function if the model's folder has a custom_generate.
    return GenerationMixin.generate(
        model, inputs, custom_generate=generate, streamer=streamer, **kwargs
    )
