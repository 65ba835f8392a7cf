"""Several processes train one head or draft together: each learns a share of every batch.

Most operations of a small head are too short for several threads to share, so on a processor one
process a core is faster than one process with as many threads. Gradients are summed before
every step in the order of the processes: weights, checkpoints and results are those of a single
process, up to rounding.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from multiprocessing import connection
from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.core.cgroup import processors
from paceline.core.stages import info, stage
from paceline.errors import ConfigError, PacelineError
from paceline.files.ownership import force
from paceline.train.group import ProcessGroup

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from paceline.train.trainer import Trainer

_READY, _GO = b"ready", b"go"


class _SharedGroup(ProcessGroup, ABC):
    """One of several processes; ``table`` float32 ``[size, parameters + 1]`` is shared memory."""

    def __init__(self, rank: int, table: torch.Tensor) -> None:
        self.rank, self.size = rank, len(table)
        self._table = table

    def add_up(self, parameters: Sequence[nn.Parameter], loss: float) -> float:
        row, places = self._table[self.rank], _places(parameters)
        for parameter, begin in zip(parameters, places, strict=True):
            if parameter.grad is None:  # a process without a share of this batch
                row[begin] = 0
            else:
                row[begin] = parameter.grad.flatten().float()
        row[-1] = loss
        self._wait_for_sum()
        total = self._table[0]
        for parameter, begin in zip(parameters, places, strict=True):
            parameter.grad = total[begin].view_as(parameter).to(parameter.dtype, copy=True)
        loss = float(total[-1])
        self._wait_for_readers()
        return loss

    @abstractmethod
    def _wait_for_sum(self) -> None:
        """Wait until the first row of the table holds the sum of all."""

    @abstractmethod
    def _wait_for_readers(self) -> None:
        """Wait until all have read it."""


def _places(parameters: Sequence[nn.Parameter]) -> list[slice]:
    """Where each parameter's gradient stands in a row."""
    ends = accumulate((p.numel() for p in parameters), initial=0)
    return [slice(start, end) for start, end in pairwise(ends)]


class _FirstRank(_SharedGroup):
    """The process that reports, measures and writes."""

    def __init__(self, table: torch.Tensor, others: Sequence[tuple[Connection, BaseProcess]]):
        super().__init__(0, table)
        self._others = others

    def _wait_for_sum(self) -> None:
        self._receive()
        for row in self._table[1:]:
            self._table[0].add_(row)
        self._send()

    def _wait_for_readers(self) -> None:
        self._receive()
        self._send()

    def _receive(self) -> None:
        """Raises PacelineError when a process has ended: it would be waited for without end."""
        for pipe, process in self._others:
            if pipe not in connection.wait([pipe, process.sentinel]):
                process.join()
                raise _lost(process)
            try:
                pipe.recv_bytes()
            except (EOFError, OSError):  # closed, or reset by a kill
                process.join()
                raise _lost(process) from None

    def _send(self) -> None:
        for pipe, process in self._others:
            try:
                pipe.send_bytes(_GO)
            except OSError:
                process.join()
                raise _lost(process) from None


def _lost(process: BaseProcess) -> PacelineError:
    return PacelineError(
        f"{process.name} of the training ended (exit code {process.exitcode}; -9 often means out "
        "of memory); run the same command again to go on from the last checkpoint, or with fewer "
        "--processes"
    )


class _OtherRank(_SharedGroup):
    """A process that only learns its share; it ends when the first one does."""

    def __init__(self, rank: int, table: torch.Tensor, pipe: Connection) -> None:
        super().__init__(rank, table)
        self._pipe = pipe

    def _wait_for_sum(self) -> None:
        self._pipe.send_bytes(_READY)
        self._pipe.recv_bytes()

    _wait_for_readers = _wait_for_sum


def check_processes(processes: int, device: torch.device) -> None:
    """Raises ConfigError."""
    if processes < 1:
        raise ConfigError(f"--processes is {processes}; use 1 or more")
    if processes > 1 and device.type != "cpu":
        raise ConfigError(
            f"--processes {processes} is for processors and the device is {device}; leave it out"
        )


@contextmanager
def together(trainer: Trainer, processes: int, threads: int | None = None) -> Iterator[None]:
    """Train with so many processes of ``threads`` threads each (None: the cores dealt out).

    ``trainer`` is the first of them; the others are built as it was, and end with the block.
    Raises ConfigError for a device or a run that cannot be shared, PacelineError when a process
    ends early.
    """
    check_processes(processes, trainer.device)
    if processes == 1:
        yield
        return
    if trainer.alone:
        raise ConfigError(f"--processes {processes}: {trainer.alone}")
    before = torch.get_num_threads()
    threads = min(threads or max(1, before // processes), processors())
    context = multiprocessing.get_context("spawn")
    numbers = sum(p.numel() for p in trainer.learnt())
    table = torch.zeros(processes, numbers + 1).share_memory_()  # type: ignore[no-untyped-call]
    kind: Callable[..., Trainer] = type(trainer)
    build = partial(kind, trainer.config, trainer.out, str(trainer.device), trainer.compiled)
    others: list[tuple[Connection, BaseProcess]] = []
    try:
        for rank in range(1, processes):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=_learn,
                args=(build, rank, table, theirs, threads),
                name=f"process {rank + 1} of {processes}",
                daemon=True,
            )
            process.start()
            theirs.close()
            others.append((ours, process))
        torch.set_num_threads(threads)
        first = _FirstRank(table, others)
        with stage(f"starting {processes} processes"):
            first._receive()
        trainer.group = first
        info(f"{processes} processes of {threads} thread{'s' if threads > 1 else ''} each")
        yield
    finally:
        trainer.group = ProcessGroup()
        torch.set_num_threads(before)
        for pipe, process in others:
            pipe.close()
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _learn(
    build: Callable[[], Trainer],
    rank: int,
    table: torch.Tensor,
    pipe: Connection,
    threads: int,
) -> None:
    """What a further process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one ends us, where weights are whole
    torch.set_num_threads(threads)
    force(lambda line: None)  # the first one has checked what is there, and alone writes
    try:
        trainer = build()
        trainer.group = _OtherRank(rank, table, pipe)
        pipe.send_bytes(_READY)
        while trainer.step < trainer.config.steps:
            trainer.train_step()
    except (EOFError, OSError, KeyboardInterrupt):  # the first one has ended
        return
    except PacelineError as error:
        sys.exit(f"error: process {rank + 1}: {error}")
