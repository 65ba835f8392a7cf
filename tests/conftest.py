"""What all tests share: no network, and a pair of tiny random models on disk."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache, wraps
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from paceline import build
from paceline.core.costs import CostCurve, TargetCosts
from paceline.files import cache_folder
from support.tiny_models import TinyPair, write_tiny_model

# Before anything imports the libraries that read them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Whatever the shell says: each of the many processes of the suite would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What a developer has pulled, or names as a default, changes no test. The tests on the real model
# ask support/real_model.py for it, which looks into the cache of before.
os.environ.setdefault("PACELINE_TEST_CACHE", str(cache_folder()))
# The kernels are built once, not by each process; their name says what they were made from.
os.environ.setdefault("PACELINE_NATIVE_CACHE", str(cache_folder() / "native"))
os.environ["PACELINE_CACHE"] = str(Path(tempfile.gettempdir()) / f"no-paceline-cache-{os.getpid()}")
os.environ["PACELINE_MODEL"] = "paceline/tiny"


@pytest.fixture(scope="session", autouse=True)
def few_prices() -> Iterator[None]:
    """Start-up measures the ends of each curve, once, for one sequence and for all.

    All that it measures took half a second of every engine whose draft length adapts. Which
    lengths it chooses is tested with prices that are given; tests of measuring itself take
    ``__wrapped__``.
    """
    from paceline.model import measure as measuring

    real = measuring.measure

    @wraps(real)
    def ends(
        run: Callable[[int], None], counts: Sequence[int], device: Any, *_: object, **__: object
    ) -> CostCurve:
        found = real(run, sorted({counts[0], counts[-1]}), device, rounds=1, budget=0.0)
        return CostCurve(tuple(counts), tuple(map(found, counts)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.model.measure.measure", ends)
        patch.setattr("paceline.build.measure", ends)
        patch.setattr("paceline.build._MEASURING_SECONDS", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def prices_measured_once() -> Iterator[None]:
    """Engines of one target share what its forwards cost; each measured a tenth of a second."""
    from paceline.model.paged.cache import PagedCache
    from paceline.model.target import CausalModel

    real = build.measure_costs
    known = WeakKeyDictionary[CausalModel, dict[object, TargetCosts]]()

    @wraps(real)
    def once(target: CausalModel, cache: PagedCache, max_batch_size: int) -> TargetCosts:
        found = known.setdefault(target, {})
        key = target.backend.name, max_batch_size, cache.num_blocks
        if key not in found:
            found[key] = real(target, cache, max_batch_size)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.build.measure_costs", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def caches_of_untouched_pages() -> Iterator[None]:
    """A cache's zeros are pages that nobody has touched: an engine of the embedded model writes
    100 MB otherwise, of which a test uses a few tokens."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        yield
        return

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def zeros(*shape: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
            count = prod(shape)
            if torch.device(device).type != "cpu" or not 0 < count * dtype.itemsize < 1 << 32:
                return torch.zeros(*shape, dtype=dtype, device=device)
            pages = mmap.mmap(
                -1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.model.paged.cache.torch", Torch())
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_made_once() -> Iterator[None]:
    """Typer makes all commands anew for each that is run; they keep nothing of a run."""
    from typer import main, testing

    made = cache(main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "get_command", made)
        patch.setattr(testing, "_get_command", made)
        yield


@pytest.fixture(scope="module")
def no_collector() -> Iterator[None]:
    """For those who read the package's syntax: the collector would look at it again and again."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    root = tmp_path_factory.mktemp("models")
    others = ["Ein kleines Modell rät die Wörter.", "Das große prüft sie alle auf einmal." * 3]
    return TinyPair(
        target=str(write_tiny_model(root / "target", layers=3, seed=1)),
        draft=str(write_tiny_model(root / "draft", layers=1, seed=2)),
        foreign=str(write_tiny_model(root / "foreign", sentences=others, layers=1, seed=3)),
    )


@pytest.fixture(scope="session")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a random target and of a draft that is often right. Nobody writes into them."""
    from support.engine_models import write_pair

    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair_room(
    random_pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """A folder for heads of the random pair's target, and the pair's folders by name."""
    return tmp_path_factory.mktemp("heads"), dict(
        zip(("target", "draft"), random_pair, strict=True)
    )


def pytest_configure() -> None:
    """A suite in the background of a shell ignores Ctrl-C, and so would the commands it tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Rooms whose modules share what takes long to make (a trained head, the pulled model), and the
# longest tests: whoever is idle first takes tests from the end, and makes what they share again.
_FIRST = ("soak", "real", "train")
_SLOW = ("soak", "real")  # rooms of which all tests are slow
# Parts of the names of tests that need the kernels, numpy's backend, copies in fewer bits, or a
# device that is only claimed.
_FOR_PROCESSORS = (
    "quantized",
    "[native",
    "test_native",
    "test_frequent",
    "test_forced",
    "test_third_backend",
    "test_offload",
    "test_kept",
    "test_events",
    "test_other_precisions",
    "test_gguf.py::test_doctor",
    "test_a_grammar_follows_the_draft",
)


def _room(item: pytest.Item) -> str:
    """The first folder below tests/; of a file beside this one, its name."""
    return item.nodeid.partition("/")[2].partition("/")[0]


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The rooms above come first; all else stays in its order."""
    without_kernels = torch.cuda.is_available()
    for item in items:
        if _room(item) in _SLOW:
            item.add_marker(pytest.mark.slow)
        if without_kernels and any(name in item.nodeid for name in _FOR_PROCESSORS):
            item.add_marker(pytest.mark.skip("kernels and quantised copies are for processors"))
    order = {room: number for number, room in enumerate(_FIRST)}
    items.sort(key=lambda item: order.get(_room(item), len(_FIRST)))


_LONGEST = 20.0  # seconds of the processor, for a test that is not slow
_LONG_FORMS = ("EVENTS", "FUZZ_SECONDS", "SCHEMA_EXAMPLES")  # which CONTRIBUTING.md names


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that computes for long has the marker, so that `make test` stays a matter of minutes.
    Seconds of this thread: a busy machine does not count."""
    began = time.thread_time()
    result = yield
    seconds = time.thread_time() - began
    long = item.get_closest_marker("slow") or not os.environ.keys().isdisjoint(_LONG_FORMS)
    if seconds > _LONGEST and not long:
        pytest.fail(f"{seconds:.0f} s of the processor; shorten it, or mark it slow")
    return result


def pytest_collection_finish() -> None:
    """Libraries, modules and tests stay to the end: the collector need not look at them again
    whenever a test leaves something behind."""
    gc.collect()
    gc.freeze()
