"""An engine that has served five thousand requests keeps no more than one that has served some."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sized
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from support.scripted_model import scripted, write_scripted

SOME, MANY, AT_ONCE = 1_000, 5_000, 250


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_scripted(tmp_path_factory.mktemp("models"))


def lengths(things: object, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Of the containers that are reached through objects of ours, by attribute."""
    if id(things) in seen or isinstance(things, str | bytes | type):
        return
    seen.add(id(things))
    inner: list[tuple[str, object]] = []
    if type(things).__module__.startswith("paceline."):
        names = [*vars(things)] if hasattr(things, "__dict__") else []
        names += [n for kind in type(things).__mro__ for n in getattr(kind, "__slots__", ())]
        inner = [(f"{path}.{name}", getattr(things, name, None)) for name in names]
    elif isinstance(things, dict):
        inner = [(f"{path}[]", value) for value in [*things.values()][:100]]
    elif isinstance(things, list | tuple | set):
        inner = [(f"{path}[]", value) for value in [*things][:100]]
    if isinstance(things, Sized):
        yield path, len(things)
    for name, value in inner:
        yield from lengths(value, name, seen)


def serve(llm: LLM, count: int, chooser: random.Random) -> Counter[str]:
    """Tiny requests; what the LLM holds afterwards."""
    for _ in range(count // AT_ONCE):
        prompts = [[chooser.randrange(3, 300) for _ in range(chooser.randrange(1, 6))]] * AT_ONCE
        prompts = [[*prompt, number % 300] for number, prompt in enumerate(prompts)]
        params = SamplingParams(max_tokens=chooser.randrange(1, 4), ignore_eos=True)
        if chooser.random() < 0.5:
            params = SamplingParams(max_tokens=2, temperature=1.0, seed=chooser.randrange(9))
        llm.generate(prompts, params)
    held: Counter[str] = Counter()
    for path, length in lengths(llm, "llm", set()):
        held[path] += length
    return held


@pytest.mark.broad
@pytest.mark.parametrize(
    "draft", ["suffix:max_tokens=400", pytest.param("model", marks=pytest.mark.slow)]
)
def test_nothing_grows_with_the_requests(folders: tuple[str, str], draft: str) -> None:
    how: dict[str, Any] = {"max_batch_size": 16, "kv_cache_memory": 1 << 19}
    llm = scripted(folders[0]).with_draft(folders[1] if draft == "model" else draft, **how)
    chooser = random.Random(1)
    some, many = serve(llm, SOME, chooser), serve(llm, MANY - SOME, chooser)
    assert some["llm.owner._engine.scheduler.running"] == 0 and len(some) > 50
    grown = {path: (some[path], n) for path, n in many.items() if n > some[path] + 200}
    assert not grown
