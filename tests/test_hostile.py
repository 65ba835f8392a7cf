"""Arguments that mean harm: one clear error before a step, or an answer. Nothing else, ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import LLM, Grammar, PromptError, SamplingParams
from paceline.errors import ConfigError
from support.engine_models import write_pair

NESTED: list[Any] = []
for _ in range(5000):
    NESTED = [NESTED]
CIRCLE: dict[str, Any] = {}
CIRCLE["again"] = CIRCLE
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    5,
    10**40,
    10**5000,
    -(10**5000),
    0.5,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    -float("inf"),
    1j,
    "",
    "5",
    "x",
    "\ud800",
    "a\udfffb",
    "\x00",
    "\u202e\u0665\U0001f600",
    b"x",
    bytearray(b"x"),
    (),
    [],
    {},
    set(),
    (5,),
    (None,),
    ("x", 5),
    ("\ud800",),
    ("",),
    [[]],
    [True],
    [-1],
    [10**40],
    [float("nan")],
    [0.5],
    {5: "a"},
    {"5": 1},
    {True: 1},
    {-1: 1},
    {10**40: 1},
    {5: float("nan")},
    {5: float("inf")},
    {5: 10**400},
    {5: None},
    {"role": "user"},
    [{"role": 5, "content": None}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": NESTED}],
    [[{"role": "user", "content": "x"}], 5],
    NESTED,
    CIRCLE,
    object(),
    int,
    range(3),
    [1] * 10**6,
    ["x"] * 1000 + [5],
)
NAMES = [item.name for item in fields(SamplingParams)]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folders = write_pair(Path(tmp_path_factory.mktemp("hostile")))
    engine = LLM(folders[0], folders[1], dtype="float32", draft_length=2, max_batch_size=4)
    yield engine
    assert not engine.engine.has_work
    assert engine.engine.cache.pool.available == engine.engine.cache.num_blocks


def refused(error: Exception) -> None:
    assert isinstance(error, (ConfigError, PromptError)), repr(error)
    assert str(error) and "\n" not in str(error) and len(str(error)) < 400


def tried(llm: LLM, asked: dict[str, Any]) -> None:
    """Refused before a step, or decoded to the end."""
    try:
        params = SamplingParams(**asked)
    except Exception as error:
        refused(error)
        return
    if params.n > 8:
        return
    try:
        stream = llm.stream(PROMPT, params)
    except Exception as error:
        refused(error)
        return
    assert any(event.completion is not None for event in stream)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter(llm: LLM, name: str) -> None:
    for value in HOSTILE:
        tried(llm, {"max_tokens": 3, name: value})


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(HOSTILE), min_size=2, max_size=4))
def test_parameters_together(llm: LLM, asked: dict[str, Any]) -> None:
    tried(llm, {"max_tokens": 3, **asked})


@pytest.mark.parametrize("place", range(len(HOSTILE)))
def test_every_argument(llm: LLM, place: int) -> None:
    value, short = HOSTILE[place], SamplingParams(max_tokens=2)
    calls = (
        lambda: llm.generate(value, short),
        lambda: llm.generate([value], short),
        lambda: llm.generate([PROMPT, value], short),
        lambda: llm.generate(PROMPT, value),
        lambda: llm.generate(PROMPT, [value]),
        lambda: list(llm.stream(value, short)),
        lambda: llm.chat(value, short),
        lambda: llm.chat([value], short),
        lambda: llm.chat([{"role": "user", "content": "x"}], value),
    )
    for call in calls:
        try:
            assert call()
        except (ConfigError, PromptError) as error:
            refused(error)
    assert not llm.engine.has_work


@pytest.mark.parametrize("place", range(len(HOSTILE)))
def test_every_grammar(llm: LLM, place: int) -> None:
    value = HOSTILE[place]
    for make in (
        lambda: Grammar.json(value),
        lambda: Grammar(value, "x"),
        lambda: Grammar("json", value),
        lambda: Grammar("regex", value),
        lambda: Grammar("lark", value),
    ):
        try:
            llm.generate(PROMPT, SamplingParams(grammar=make(), max_tokens=2))
        except (ConfigError, PromptError) as error:
            assert "\n" not in str(error)


def test_the_issue(llm: LLM) -> None:
    for asked in ({"stop": (5,)}, {"logit_bias": {5: "a"}}, {"logprobs": True}):
        with pytest.raises(ConfigError):
            SamplingParams(**asked)  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="half a surrogate pair"):
        llm.generate("a\ud800b")
    with pytest.raises(PromptError):
        llm.chat([{"role": "user", "content": "a\ud800b"}])
