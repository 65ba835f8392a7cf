"""The prompts of the demo: real questions for a real model, and what the built-in toy can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.model.defaults import EMBEDDED

if TYPE_CHECKING:
    from paceline import LLM

_LEAST_CONTEXT = 2048  # tokens that a model must see to be asked the real questions


@dataclass(frozen=True)
class Scene:
    """One prompt of the demo; ``chat`` puts it into the chat template."""

    name: str
    prompt: str
    chat: bool = False


SCENES = (
    Scene(
        "story",
        "Once upon a time, there was a little girl named Lily. She loved to play in the garden. "
        "One day, she found a shiny",
    ),
    Scene("arithmetic", "Nina has 36 pencils and buys 14 more. How many does she have?", True),
    Scene("code", "def factorial(n):\n"),
    Scene("chat", "How do I copy a folder to another machine?", True),
)

_CODE = """def average(numbers):
    total = 0
    for number in numbers:
        total += number
    return total / len(numbers)
"""
_TEXT = (
    "Honeybees live in colonies of up to 60,000 insects. A colony has one queen, who lays all the "
    "eggs, a few hundred males called drones, and thousands of worker bees. The workers clean the "
    "hive, feed the young, collect nectar and pollen from flowers, and guard the entrance. When a "
    "worker finds a good patch of flowers, she returns to the hive and performs a waggle dance, "
    "which tells the others how far away the flowers are and in which direction they must fly."
)
REAL_SCENES = (
    Scene("fact", "What is the capital of France, and what is it known for?", True),
    Scene(
        "code",
        "Change this Python function so that it returns 0 for an empty list:\n\n"
        f"```python\n{_CODE}```",
        True,
    ),
    Scene("summary", f"Summarize the following text in two sentences.\n\n{_TEXT}", True),
    Scene(
        "list",
        "List the twelve months of the year, one a line, with the number of days of each.",
        True,
    ),
    Scene(
        "story",
        "Write a short story about a lighthouse keeper who finds a message in a bottle.",
        True,
    ),
)


def scenes_for(model: str, llm: LLM) -> tuple[Scene, ...]:
    """Questions that the model can take; those of a chat only where it has a chat template."""
    real = model != EMBEDDED and llm.max_model_len >= _LEAST_CONTEXT
    chats = llm.tokenizer.chat_template is not None
    if real and chats:
        return REAL_SCENES
    return tuple(scene for scene in SCENES if chats or not scene.chat)
