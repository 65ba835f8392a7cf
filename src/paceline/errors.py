"""Every error a user can cause. The message says what is wrong, why, and what to do next."""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors raised on purpose; the CLI prints its message on one line and exits 1.
    What a damaged file says may have line ends, the message has none."""

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())


class ConfigError(PacelineError, ValueError):
    """An option or parameter has a value that makes no sense."""


class GrammarError(ConfigError):
    """A grammar is malformed, or asks for what the grammar library cannot do."""


class ModelLoadError(PacelineError):
    """A model folder or hub name cannot be read as a causal language model."""


class UnsupportedModelError(PacelineError):
    """The architecture has a layer whose state the engine cannot page or roll back."""


class VocabularyMismatchError(PacelineError):
    """Draft and target do not map the same ids to the same tokens."""


class PromptError(PacelineError, ValueError):
    """A prompt is empty, too long for the model, or not text."""


class CacheMemoryError(PacelineError):
    """The paged cache cannot be allocated or cannot hold even one sequence."""


class EngineLostError(PacelineError):
    """The engine cannot go on: every forward fails. Load the model again."""


class DataError(PacelineError):
    """Training or benchmark data is missing or malformed."""


class WriteError(ConfigError, DataError):
    """A file cannot be written: the disk is full, or the place is not writable. What was there
    before is unchanged. (Also a ConfigError and a DataError: what was raised before it existed.)"""
