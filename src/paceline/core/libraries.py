"""Sets up the libraries in use, before a command or a server loads a model."""

from __future__ import annotations

import os
import warnings

from paceline.core.memory import processors
from paceline.errors import debugging


def quiet_libraries() -> None:
    """Suppress the progress bars and warnings of the libraries in use."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not debugging():
        warnings.filterwarnings("ignore")


def set_threads(threads: int | None) -> None:
    """Use this many threads (None: torch's default), but at most one per processor, since more
    would only wait for each other."""
    if threads is not None:
        import torch

        torch.set_num_threads(min(threads, processors()))
