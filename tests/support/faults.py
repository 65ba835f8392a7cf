"""Failures planted into the steps of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline import LLM


class Fault:
    """Stands in for a function and fails in some of its calls."""

    def __init__(self, owner: Any, name: str, when: Callable[..., bool], error: BaseException):
        self.calls = self.raised = 0
        self._real, self._when, self._error = getattr(owner, name), when, error
        setattr(owner, name, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self._when(self, *args):
            self.raised += 1
            raise self._error
        return self._real(*args, **kwargs)


# Where a step may fail, in order: owner and name of what is called.
STAGES: dict[str, Callable[[LLM], tuple[Any, str]]] = {
    "plan": lambda llm: (llm.engine.scheduler, "plan"),
    "allocation": lambda llm: (llm.engine.cache.pool, "allocate"),
    "reserve": lambda llm: (llm.engine.cache, "reserve"),
    "lengths": lambda llm: (llm.engine.controller, "lengths"),
    "propose": lambda llm: (llm.engine.drafter, "propose"),
    "batch": lambda llm: (llm.engine.cache, "batch_of"),
    "forward": lambda llm: (llm.engine, "target"),
    "verify": lambda llm: (llm.engine, "verifier"),
    "move": lambda llm: (llm.engine.cache, "move"),
    "observe": lambda llm: (llm.engine.drafter, "observe"),
    "account": lambda llm: (llm.engine.controller, "observe"),
}
