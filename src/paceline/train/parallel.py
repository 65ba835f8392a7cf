"""Several processes train one head or draft together: each learns a share of every batch.

Most operations of a small head are too short for several threads to share. Gradients are summed
before every step: the result is that of a single process, up to rounding.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.core.memory import processors
from paceline.core.stages import info, stage
from paceline.errors import ConfigError, PacelineError
from paceline.files.ownership import force
from paceline.parallel.group import rank_environment

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer

_FOREVER = timedelta(days=365)  # the others wait while the first process measures and writes


@contextmanager
def together(trainer: Trainer, processes: int, threads: int | None = None) -> Iterator[None]:
    """Train with so many processes of ``threads`` threads each (None: the cores dealt out).

    ``trainer`` is the first of them; the others are built as it was, and end with the block.
    Raises ConfigError for a device or a run that cannot be shared, PacelineError when a process
    ends early.
    """
    if processes == 1:
        yield
        return
    if trainer.device.type != "cpu":
        raise ConfigError(
            f"--processes {processes} is for processors and the device is {trainer.device}; leave "
            "it out"
        )
    if trainer.alone:
        raise ConfigError(f"--processes {processes}: {trainer.alone}")
    before = torch.get_num_threads()
    threads = min(threads or max(1, before // processes), processors())
    kind: Callable[..., Trainer] = type(trainer)
    build = partial(kind, trainer.config, trainer.out, str(trainer.device), trainer.compiled)
    others: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="paceline-train-") as folder:
        store = str(Path(folder) / "store")
        try:
            for rank in range(1, processes):
                process: BaseProcess = multiprocessing.get_context("spawn").Process(
                    target=_learn,
                    args=(build, rank, processes, store, threads),
                    name=f"process {rank + 1} of {processes}",
                    daemon=True,
                )
                process.start()
                others.append(process)
            torch.set_num_threads(threads)
            with stage(f"starting {processes} processes"):
                while not all(Path(f"{store}.{rank}").exists() for rank in range(1, processes)):
                    _check_alive(others)
                    time.sleep(0.05)
                _join(0, processes, store)
            trainer.ranks = processes
            info(f"{processes} processes of {threads} thread{'s' if threads > 1 else ''} each")
            yield
        except RuntimeError:  # of a sum that lacks a process
            time.sleep(0.5)  # its end is seen a little later
            _check_alive(others)
            raise
        finally:
            trainer.ranks = 1
            torch.set_num_threads(before)
            for process in others:  # they have nothing to write
                process.kill()
                process.join()
            if dist.is_initialized():
                dist.destroy_process_group()


def _check_alive(others: Sequence[BaseProcess]) -> None:
    """Raises PacelineError when a process has ended: it would be waited for without end."""
    for process in others:
        if process.exitcode is not None:
            raise PacelineError(
                f"{process.name} of the training ended (exit code {process.exitcode}; -9 often "
                "means out of memory); run the same command again to go on from the last "
                "checkpoint, or with fewer --processes"
            )


def _join(rank: int, ranks: int, store: str) -> None:
    with rank_environment(rank):
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=ranks,
            timeout=_FOREVER,
        )


def _learn(build: Callable[[], Trainer], rank: int, ranks: int, store: str, threads: int) -> None:
    """What a further process does."""
    for sent in (signal.SIGINT, signal.SIGTERM):  # the first one ends us, where weights are whole
        signal.signal(sent, signal.SIG_IGN)
    torch.set_num_threads(threads)
    force(lambda line: None)  # the first one has checked what is there, and alone writes
    try:
        trainer = build()
        Path(f"{store}.{rank}").touch()
        _join(rank, ranks, store)
        trainer.rank, trainer.ranks = rank, ranks
        while trainer.step < trainer.config.steps:
            trainer.train_step()
    except PacelineError as error:
        sys.exit(f"error: process {rank + 1}: {error}")
    except RuntimeError:
        first = multiprocessing.parent_process()
        if first is None or first.is_alive():  # else it has been killed, and said so
            raise
