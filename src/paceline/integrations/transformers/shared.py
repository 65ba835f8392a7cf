"""An engine over a caller's model: a copy of the tree of modules around the same tensors.

On a processor linear weights are copied, laid out anew. The engine is kept for the
next call, until the weights change or another draft is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from paceline.build import EngineOptions, build_engine, seeded_generator
from paceline.draft.base import Drafter
from paceline.draft.spec import DraftSpec, Loading
from paceline.drafters import parse_draft, prepare_one
from paceline.engine.engine import Engine
from paceline.errors import ConfigError, ModelLoadError
from paceline.model.backends.base import check_backend
from paceline.model.loading import load_tokenizer
from paceline.model.probe import register
from paceline.model.target import CausalModel


@dataclass(frozen=True)
class Setup:
    """What an engine is built from besides the model. ``tokenizer`` is the target's, for draft
    models; None: it is read from where the model came from."""

    draft: str | DraftSpec | Drafter
    options: EngineOptions
    tokenizer: Any = None

    @property
    def key(self) -> Hashable:
        draft = str(self.draft) if isinstance(self.draft, (str, DraftSpec)) else id(self.draft)
        return draft, self.options, id(self.tokenizer)


@dataclass
class SharedEngine:
    """One model's engine, the randomness of its requests without a seed, and what both were built
    for. One call has it at a time."""

    lock: Any = field(default_factory=threading.RLock)
    busy: bool = False
    key: Hashable = None
    built: tuple[Engine, torch.Generator] | None = None


_engines: WeakKeyDictionary[Any, SharedEngine] = WeakKeyDictionary()
_guard = threading.Lock()


@contextmanager
def engine_over(model: Any, setup: Setup) -> Iterator[tuple[Engine, torch.Generator]]:
    """The engine of a transformers ``model``, built or kept from the last call. Calls of other
    threads wait. Raises UnsupportedModelError, ConfigError, and what the draft gives cause to."""
    with _guard:
        shared = _engines.setdefault(model, SharedEngine())
    with shared.lock:
        if shared.busy:
            raise ConfigError(
                "generate was called by a streamer or stopping criterion of itself; "
                "use another model object there"
            )
        key = setup.key, _weights(model)
        if shared.built is None or shared.key != key:
            shared.built = None  # before the next one: two caches need not fit
            with torch.random.fork_rng(devices=[]):  # new modules draw weights, in vain
                shared.built = _built(model, setup)
            shared.key = key
        shared.busy = True
        try:
            yield shared.built
        finally:
            shared.busy = False


def forget(model: Any) -> None:
    """Let go of the engine of a model, its cache and its draft. Nothing if there is none."""
    with _guard:
        _engines.pop(model, None)


def _weights(model: Any) -> tuple[Hashable, ...]:
    """Changes when a weight is written in place (not through ``.data``, which PyTorch does not
    count), replaced or moved, or an adapter switched."""
    tensors = (*model.parameters(), *model.buffers())
    adapters = [
        (str(module.active_adapters), bool(module.disable_adapters), str(module.merged_adapters))
        for module in model.modules()
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters")
    ]
    marks = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]
    return (*marks, *adapters)


def _built(model: Any, setup: Setup) -> tuple[Engine, torch.Generator]:
    target = _target(model, setup.options.backend)
    draft = parse_draft(setup.draft) if isinstance(setup.draft, str) else setup.draft
    tokenizer = _tokenizer(model, draft, setup.tokenizer)
    dtype = str(target.dtype).removeprefix("torch.")
    loading = Loading(target, tokenizer, dtype, setup.options.draft_quantize)
    generator = seeded_generator(target.device, None)
    return build_engine(target, prepare_one(draft, loading), setup.options, generator), generator


def _tokenizer(model: Any, draft: DraftSpec | Drafter, given: Any) -> Any:
    """The model's tokenizer, if a draft has a vocabulary of its own to be held against it."""
    if given is not None or not isinstance(draft, DraftSpec):
        return given
    if all(member.holds != "model" for member in draft.members()):
        return None
    try:
        return load_tokenizer(str(model.name_or_path))
    except ModelLoadError as error:
        raise ConfigError(
            f"a draft model needs the target's tokenizer, and {error}; give "
            "target_tokenizer=AutoTokenizer.from_pretrained(...)"
        ) from None


def _target(model: Any, backend: str) -> CausalModel:
    """The model as engines take it: modules of its own around the same weights."""
    check_backend(backend)
    kind = type(model).__name__
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or "meta" in devices:
        where = ", ".join(sorted(devices))
        raise ConfigError(
            f"the weights of this {kind} are on {where}; put all of them on one device to decode "
            "speculatively (no device_map that splits or offloads)"
        )
    register()
    return CausalModel.around(model, str(model.name_or_path) or kind, backend)
