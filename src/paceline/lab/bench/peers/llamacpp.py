"""llama.cpp by its own server on a port of this machine, asked at its own endpoint."""

from __future__ import annotations

import os
import shutil
import socket
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.lab.bench.outcome import Ask
from paceline.lab.bench.peers.children import PeerProcess
from paceline.lab.bench.peers.kinds import EQUAL, OwnSide, PeerDifferences, PeerFailedError
from paceline.lab.bench.peers.served import Address, Delivery, PeerRefusedError, ServedPeer
from paceline.model.gguf import read_gguf

PROGRAM, VARIABLE = "llama-server", "PACELINE_LLAMA_SERVER"
_STARTING = 300.0  # seconds in which it must have loaded its model
_ROOM = 64  # tokens of a context beyond what is asked for


class LlamaDialect:
    """``/completion``: prompts and answers as ids, nothing kept from one request for the next."""

    path = "/completion"

    def body(self, ask: Ask) -> dict[str, Any]:
        params = ask.params
        # Nothing but the temperature changes the distribution, as in what it is compared with.
        drawn = {"samplers": ["temperature"], "temperature": params.temperature}
        greedy = {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0}
        return {
            "prompt": list(ask.prompt),
            "n_predict": params.max_tokens,
            "ignore_eos": params.ignore_eos,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
            **(greedy if params.greedy else drawn),
            **({} if params.seed is None else {"seed": params.seed % 2**32}),
        }

    def delivery(self, event: Any) -> Delivery:
        if event.get("stop"):
            return Delivery(
                written=event.get("tokens_predicted"), read=event.get("tokens_evaluated")
            )
        ids = tuple(int(token) for token in event.get("tokens") or ())
        return Delivery(str(event.get("content") or ""), ids)


def find_program(given: str | None) -> str:
    """The server's binary: as given, as the variable says, or on the path. PeerFailedError."""
    wanted = given or os.environ.get(VARIABLE)
    found = shutil.which(wanted or PROGRAM)
    if found is None:
        where = f"{wanted} is no program" if wanted else f"there is no {PROGRAM} on the PATH"
        raise PeerFailedError(
            f"{where}; build llama.cpp and give its server by --llama-server or ${VARIABLE}"
        )
    return found


def open_llamacpp(
    name: str, file: str, clients: int, own: OwnSide, program: str | None = None
) -> ServedPeer:
    """A server of the file with a slot for each client. Raises PeerFailedError."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise PeerFailedError(f"{name}: there is no file {file}; give a GGUF file")
    binary, port = find_program(program), _free_port()
    context = -(-(own.longest + _ROOM) // _ROOM) * _ROOM * clients
    threads = str(own.threads)
    command = [binary, "-m", str(path), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", threads, "-tb", threads, "-np", str(clients), "-c", str(context)]
    process = PeerProcess(name, command)
    address = Address(False, "127.0.0.1", port)
    try:
        _wait(address, process)
        differences = PeerDifferences(
            ids=_vocabulary(address, own),
            ignore_eos="it forbids the end token: where the model would end, texts part",
            precision=f"{_types(path)}, cache f16; here {own.precision}",
        )
    except BaseException:
        process.close()
        raise
    return ServedPeer(name, address, LlamaDialect(), clients, own, differences, process)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait(address: Address, process: PeerProcess) -> None:
    """Until the server says that it is ready."""
    end = time.monotonic() + _STARTING
    while time.monotonic() < end:
        if process.ended:
            raise PeerFailedError(f"{process.name} ended while it started: {process.last_words()}")
        try:
            address.read("/health")
            return
        except (OSError, HTTPException, PeerRefusedError, ValueError):
            time.sleep(0.05)
    raise PeerFailedError(
        f"{process.name} was not ready after {_STARTING:g} s; look at the machine"
    )


def _vocabulary(address: Address, own: OwnSide) -> str:
    """Whether ids can mean the same to both, by how many there are."""
    try:
        size = int(address.read("/v1/models")["data"][0]["meta"]["n_vocab"])
    except (OSError, HTTPException, PeerRefusedError, ValueError, LookupError, TypeError):
        return "sent as ours; it does not tell its vocabulary"
    return EQUAL if size == own.vocabulary else f"its vocabulary has {size}, ours {own.vocabulary}"


def _types(path: Path) -> str:
    """The types of the file's tensors, the commonest first."""
    try:
        return ", ".join(read_gguf(path).types)
    except PacelineError:
        return "as the file has it"
