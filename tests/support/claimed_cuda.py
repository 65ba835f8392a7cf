"""CUDA devices on a machine that has none: tensors of the host that claim to be on one.

A ``Claimed`` tensor holds a host tensor and says that it is on ``cuda:0`` or ``cuda:1``. What
torch is asked to do with it is computed by the host, so whole engine steps run with real results;
but an operation whose tensors claim different devices fails, as it would there, and what would make
the host wait or copy is counted. Tensors without a dimension may meet any device, as in CUDA.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import paceline
from paceline.model import target

ROOT = str(Path(paceline.__file__).parent)
HOST = torch.device("cpu")
Tensor = torch.Tensor
_MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}
_LOOKS = {Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__bool__, Tensor.__int__}
_LOOKS |= {Tensor.__float__, Tensor.__index__, torch.equal}
_SIZES = {Tensor.nonzero, torch.nonzero, torch.masked_select, torch.unique, Tensor.unique}
_SIZES |= {torch.bincount, Tensor.bincount}
_ITSELF = {Tensor.requires_grad_, Tensor.__repr__, Tensor.__format__}
_OWN = {
    "device",
    "is_cuda",
    "is_cpu",
    "requires_grad",
    "grad",
    "grad_fn",
    "is_leaf",
    "_backward_hooks",
}


class MixedDevicesError(Exception):
    """What CUDA would refuse: "Expected all tensors to be on the same device"."""


class Claimed(torch.Tensor):
    """A ``host`` tensor that claims to be on another device."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> Claimed:
        made: Claimed = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=device,
        )
        made.host = host
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MixedDevicesError("a tensor of a device is on its way to another process")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Where no mode is on: as in ``Devices``."""
        return Devices.current.run(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Claimed(args[0].host, args[0].device)
        raise NotImplementedError(f"{function} of a claimed tensor")


def _indexed(device: Any) -> torch.device:
    found = torch.device(device)
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """All that containers hold, changed."""
    if isinstance(value, list | tuple):
        found = [_map(change, one) for one in value]
        named = hasattr(value, "_fields")  # torch's own kinds of tuple take a list
        return type(value)(*found) if named else type(value)(found)
    if isinstance(value, dict):
        return {key: _map(change, one) for key, one in value.items()}
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _leaves(one)
    else:
        yield value


def _host(value: Any) -> Any:
    if isinstance(value, Claimed):
        return value.host
    return HOST if isinstance(value, torch.device) else value


def _hosts(values: Any) -> Any:
    return _map(_host, values)


# What copies for others: noted is who asks it to.
_HELPERS = {"transfer.upload", "transfer.to_device", "transfer.send", "transfer.__init__"}


def _asking() -> str:
    """The innermost function of the package on the stack, as in "verifier._verdicts"."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT):
            name = f"{Path(file).stem}.{frame.f_code.co_name}"
            if name not in _HELPERS:
                return name
        frame = frame.f_back
    return "elsewhere"


class Devices(TorchFunctionMode):
    """Computes what is asked of claimed tensors, and counts what goes between host and devices.

    ``to_device``, ``to_host`` and ``between`` count copies, ``waits`` what the host waits for: each
    by the function of the package that asks.
    """

    current: Devices

    def __init__(self) -> None:
        super().__init__()
        self.to_device, self.to_host, self.between = Counter[str](), Counter[str](), Counter[str]()
        self.waits = Counter[str]()
        self.events: list[Event] = []

    def reset(self) -> None:
        for counter in (self.to_device, self.to_host, self.between, self.waits):
            counter.clear()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.run(function, args, kwargs or {})

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(function, args, kwargs)

    def _run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in _leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if function is Tensor.pin_memory:
            return args[0]
        if function is torch._has_compatible_shallow_copy_type:
            return False
        if function is torch._C._nn._parse_to:  # what Module.to() asks
            return function(*args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if function in _MOVES and tensors:
            return self._move(function, args, kwargs)
        claimed = {t.device for t in tensors if isinstance(t, Claimed)}
        wanted = kwargs.get("device")
        if not claimed:
            if wanted is None or torch.device(wanted).type == "cpu":
                return function(*args, **kwargs)
            if function in (torch.tensor, torch.as_tensor):
                self.to_device[_asking()] += 1
                self.wait()  # from memory that is not pinned
            return self._claim(function(*args, **{**kwargs, "device": HOST}), [], _indexed(wanted))
        name = getattr(getattr(function, "__self__", None), "__name__", "")
        if (
            getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__")
            and name in _OWN
        ):
            return function(*args, **kwargs)
        if function in _ITSELF:
            return (
                function(*args, **kwargs)
                if function is Tensor.requires_grad_
                else str(_hosts(args))
            )
        if function is Tensor.copy_:
            self._count(args[1], args[0].device, bool(kwargs.get("non_blocking") or any(args[2:])))
            _hosts(args[0]).copy_(_hosts(args[1]))
            return args[0]
        if len(claimed) > 1 or any(not isinstance(t, Claimed) and t.dim() for t in tensors):
            places = ", ".join(f"{t.device}{list(t.shape)}" for t in tensors)
            raise MixedDevicesError(f"{getattr(function, '__name__', function)}: {places}")
        if function in _LOOKS:
            self.to_host[_asking()] += 1
            self.wait()
        elif function in _SIZES or (
            function in (Tensor.__getitem__, Tensor.__setitem__)
            and any(getattr(t, "dtype", None) == torch.bool for t in _leaves(args[1]))
        ):
            self.wait()
        if wanted is not None:
            kwargs["device"] = HOST
        place = _indexed(wanted) if wanted is not None else next(iter(claimed))
        return self._claim(function(*_hosts(args), **_hosts(kwargs)), (args, kwargs), place)

    def _move(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        source, *rest = args
        place = HOST if function is Tensor.cpu else source.device
        given = [*rest, kwargs.get("device"), kwargs.get("other")]
        if function is Tensor.cuda:
            place = torch.device("cuda", 0)
        for value in given:
            if isinstance(value, torch.Tensor):
                place = value.device
            elif isinstance(value, str | torch.device):
                place = _indexed(value)
        at_once = bool(kwargs.pop("non_blocking", False)) or (len(rest) > 2 and bool(rest[2]))
        self._count(source, place, at_once)
        dtype = next((v for v in (*rest, kwargs.get("dtype")) if isinstance(v, torch.dtype)), None)
        other = next((v for v in given if isinstance(v, torch.Tensor)), None)
        dtype = other.dtype if other is not None else dtype
        host = _hosts(source)
        moved = host if dtype is None else host.to(dtype)
        if kwargs.get("copy") or (place != source.device and moved is host):
            moved = moved.clone()
        if moved is host:
            return source
        return moved if place == HOST else Claimed(moved, place)

    def _count(self, source: torch.Tensor, place: torch.device, at_once: bool) -> None:
        if source.device == place:
            return
        if place == HOST:
            self.to_host[_asking()] += 1
            if not at_once:
                self.wait()
        elif source.device == HOST:
            self.to_device[_asking()] += 1
            if not at_once:
                self.wait()
        else:
            self.between[_asking()] += 1

    def wait(self) -> None:
        """The host waits for a device."""
        self.waits[_asking()] += 1

    def _claim(self, out: Any, given: Any, place: torch.device) -> Any:
        known = {id(t.host): t for t in _leaves(given) if isinstance(t, Claimed)}

        def claim(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, Claimed):
                return value
            if id(value) in known:  # in place: the very tensor that was given
                return known[id(value)]
            return value if place == HOST else Claimed(value, place)

        return _map(claim, out)


class Stream:
    def __init__(self, device: Any) -> None:
        self.device = _indexed(device)


class Event:
    """Remembers on which device's stream it was recorded."""

    def __init__(self, **_: Any) -> None:
        self.device: torch.device | None = None
        self.seconds = 0.0
        Devices.current.events.append(self)

    def record(self, stream: Stream | None = None) -> None:
        self.device = stream.device if stream is not None else torch.device("cuda", 0)
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        Devices.current.wait()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.seconds - self.seconds)


class Generator(torch.Generator):
    """Draws on the host, for a device."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made.place = _indexed(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        place: torch.device = self.place
        return place


@contextlib.contextmanager
def claimed_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """Two CUDA devices, ``cuda:0`` and ``cuda:1``; the current one is ``cuda:0``."""
    devices = Devices()
    Devices.current = devices
    cuda = torch.cuda
    for name, value in {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: Stream("cuda:0" if device is None else device),
        "Event": Event,
        "synchronize": lambda device=None: None,
        "mem_get_info": lambda device=None: (1 << 30, 1 << 30),
        "is_bf16_supported": lambda *_, **__: True,
    }.items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(torch, "Generator", Generator)
    real: Callable[..., Any] = target.load_module

    def load_module(name: str, dtype: Any, place: torch.device, **options: Any) -> Any:
        module = real(name, dtype, HOST, **options)
        if place.type == "cpu":
            return module
        return module.requires_grad_(False).to(_indexed(place))

    monkeypatch.setattr(target, "load_module", load_module)
    future = torch.__future__  # a module's parameters are replaced when it is moved, not refilled
    before = future.get_overwrite_module_params_on_conversion()
    future.set_overwrite_module_params_on_conversion(True)
    try:
        with devices:
            yield devices
    finally:
        future.set_overwrite_module_params_on_conversion(before)
