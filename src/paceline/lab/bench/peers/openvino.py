"""OpenVINO GenAI, in a Python of its own choice: it and torch need not live in one environment."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.lab.bench.outcome import Ask, Contestant, TimedAnswer, TimedRun
from paceline.lab.bench.peers.children import PeerProcess
from paceline.lab.bench.peers.kinds import OwnSide, PeerDifferences, PeerFailedError, known

VARIABLE = "PACELINE_OPENVINO_PYTHON"
_WORKER = Path(__file__).with_name("openvino_worker.py")


@dataclass
class OpenVino(Contestant):
    """A contestant that hands its requests to the worker, which times them there."""

    name: str
    process: PeerProcess
    own: OwnSide
    differences: PeerDifferences

    def run(self, asks: Sequence[Ask]) -> TimedRun:
        """Raises PeerFailedError."""
        wanted = [
            {
                "ids": list(ask.prompt),
                "max_tokens": ask.params.max_tokens,
                "ignore_eos": ask.params.ignore_eos,
                "temperature": ask.params.temperature,
                "seed": ask.params.seed,
            }
            for ask in asks
        ]
        said = _said(self.process, wanted)
        answers = []
        for ask, found in zip(asks, said["answers"], strict=True):
            arrivals = tuple((float(at), int(count)) for at, count in found["arrivals"])
            if not arrivals:
                raise PeerFailedError(f"{self.name} answered without a token; try another prompt")
            answers.append(TimedAnswer(known(self.name, found["ids"], self.own), arrivals))
            self.differences.saw(ask, answers[-1], None)
        return TimedRun.told(answers, float(said["seconds"]))

    def close(self) -> None:
        self.process.close()


def open_openvino(
    name: str, folder: str, clients: int, own: OwnSide, python: str | None = None
) -> OpenVino:
    """A pipeline over a model's folder in OpenVINO's format. Raises PeerFailedError."""
    path = Path(folder).expanduser()
    if not path.exists():
        raise PeerFailedError(f"{name}: there is no folder {folder}; give one of OpenVINO's format")
    wanted = python or os.environ.get(VARIABLE) or sys.executable
    program = shutil.which(wanted)
    if program is None:
        raise PeerFailedError(f"{wanted} is no program; give a Python by --openvino-python")
    command = [program, str(_WORKER), str(path), str(own.threads), str(clients)]
    process = PeerProcess(name, command, talks=True)
    try:
        about = _said(process, None)["ready"]
    except BaseException:
        process.close()
        raise
    held = f"runs in {about['INFERENCE_PRECISION_HINT']}, cache {about['KV_CACHE_PRECISION']}"
    precision = f"weights as the folder has them, {held}; here {own.precision}"
    return OpenVino(name, process, own, PeerDifferences(precision=precision))


def _said(process: PeerProcess, wanted: Any) -> dict[str, Any]:
    """The worker's next line, after it was handed what is wanted. Raises PeerFailedError."""
    try:
        if wanted is not None:
            process.write(json.dumps(wanted))
        said = json.loads(process.readline() or "{}")
    except (OSError, ValueError):
        said = {}
    if "missing" in said:
        raise PeerFailedError(
            f"{process.name} needs the package openvino-genai, and {said['missing']} is missing "
            f"there; pip install openvino-genai, or name a Python that has it by --openvino-python "
            f"or ${VARIABLE}"
        )
    if "error" in said:
        raise PeerFailedError(f"{process.name} failed: {said['error']}")
    if not said:
        raise PeerFailedError(f"{process.name} ended: {process.last_words()}")
    return dict(said)
