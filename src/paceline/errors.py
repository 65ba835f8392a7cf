"""The errors that users can cause. A message says what is wrong, why, and what to do next."""

from __future__ import annotations

import errno
import os


class PacelineError(Exception):
    """Base class of all errors raised on purpose. The CLI prints the message on one line and exits
    with 1. Line ends, as from the content of a damaged file, are removed from the message."""

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())


class ConfigError(PacelineError, ValueError):
    """An option or parameter has an invalid value."""


class GrammarError(ConfigError):
    """A grammar is malformed, or needs a feature that the grammar library lacks."""


class ModelLoadError(PacelineError):
    """A model folder or hub name cannot be read as a causal language model."""


class UnsupportedModelError(PacelineError):
    """The architecture has a layer whose state the engine can neither page nor roll back."""


class VocabularyMismatchError(PacelineError):
    """Draft model and target do not map the same ids to the same tokens."""


class PromptError(PacelineError, ValueError):
    """A prompt is empty, too long for the model, or not text."""


class CacheMemoryError(PacelineError):
    """The paged cache cannot be allocated or cannot hold even one sequence."""


class EngineLostError(PacelineError):
    """The engine cannot continue because every forward fails. Load the model again."""


class DataError(PacelineError):
    """Training or benchmark data is missing or malformed."""


class WriteError(ConfigError, DataError):
    """A file cannot be written: the disk is full, or the location is not writable. An existing file
    is unchanged. (Derived from ConfigError and DataError, which were raised before this class
    existed.)"""


def debugging() -> bool:
    """Whether to show tracebacks and warnings of libraries (--debug)."""
    return os.environ.get("PACELINE_DEBUG", "0") != "0"


def error_line(error: Exception) -> str:
    """The message of the line with which a failing command ends."""
    if isinstance(error, PacelineError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # stdout is a file
        return f"the output cannot be written: {error.strerror}; free some space and run it again"
    return f"unexpected {type(error).__name__}: {error}; run again with --debug for the traceback"
