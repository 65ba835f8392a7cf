"""Attributes that were renamed: their former names work for one release, with a warning."""

from __future__ import annotations

import pytest

from paceline import LLM, AsyncLLM
from paceline.core.keywords import renamed


@renamed(old="new", old_method="method")
class Renamed:
    new = 1

    @classmethod
    def method(cls) -> str:
        return cls.__name__


def test_former_names_are_read_and_set() -> None:
    thing = Renamed()
    with pytest.warns(DeprecationWarning, match=r"Renamed\.old is new now"):
        assert thing.old == 1  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="old_method is method now"):
        assert Renamed.old_method() == "Renamed"  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning):
        thing.old = 2  # type: ignore[attr-defined]
    assert thing.new == 2 and Renamed.new == 1


def test_former_names_are_overridden() -> None:
    with pytest.warns(DeprecationWarning, match=r"Derived\.old is new now"):

        class Derived(Renamed):
            old = 3

    assert Derived.new == Derived().new == 3 and Renamed.new == 1


def test_calls_by_former_names() -> None:
    with pytest.warns(DeprecationWarning):
        assert AsyncLLM.over == AsyncLLM.from_llm  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning):
        assert LLM.beside is LLM.with_draft  # type: ignore[attr-defined]
