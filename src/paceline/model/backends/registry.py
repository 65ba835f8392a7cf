"""Backends by name: functions ``make(model) -> Backend | str``, the string why it cannot run a
model. Packages offer more by entry points of the group ``paceline.backends``, programs by
``register_backend``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from paceline.errors import ConfigError, PacelineError
from paceline.model.backends.base import NATIVE, REFERENCE, Adapted, Backend

AUTO = "auto"
MakeBackend = Callable[[Adapted], Backend | str]

_registered: dict[str, MakeBackend] = {}


def register_backend(name: str, make: MakeBackend) -> None:
    """Let ``backend=name`` run models by ``make``. Raises ConfigError for names of our own."""
    if name in (AUTO, NATIVE, REFERENCE):
        raise ConfigError(f"there is a backend {name!r} already; use another name")
    _registered[name] = make


def backend_names() -> tuple[str, ...]:
    """What ``backend=`` may be."""
    offered = {point.name for point in entry_points(group="paceline.backends")}
    more = sorted({*_registered, *offered} - {AUTO, NATIVE, REFERENCE})
    return (AUTO, NATIVE, REFERENCE, *more)


def make_backend(name: str, model: Adapted) -> Backend | str:
    """The backend of a model, or why it cannot run it. Raises ConfigError for an unknown name, one
    that cannot be imported, and whatever a backend of others raises."""
    if name == NATIVE:
        native: MakeBackend = import_module("paceline.model.backends.native.model").native_backend
        return native(model)
    check_backend(name)
    try:
        make = _registered.get(name) or _imported(name)
        return make(model)
    except PacelineError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"backend {name!r} fails with this model ({what}); use another backend, or report it "
            "to the backend's authors"
        ) from error


def _imported(name: str) -> MakeBackend:
    point = next(iter(entry_points(group="paceline.backends", name=name)), None)
    if point is None:
        raise ConfigError(
            f"backend {name!r} is not made for a model; use native or one of a package"
        )
    try:
        loaded: MakeBackend = point.load()
    except Exception as error:
        raise ConfigError(f"backend {name!r} cannot be imported ({error})") from None
    return loaded


def check_backend(name: str) -> None:
    """Raises ConfigError for a name that is not known."""
    if name not in backend_names():
        known = ", ".join(backend_names())
        raise ConfigError(f"backend {name!r} is not known; use one of {known}")
