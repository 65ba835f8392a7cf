"""From a method's spec to another engine that runs, and all of them ended together."""

from __future__ import annotations

from contextlib import ExitStack

from paceline.tools.bench.methods import Method
from paceline.tools.bench.outcome import Contestant
from paceline.tools.bench.peers.kinds import LLAMACPP, OPENVINO, OwnSide, PeerDifferences, PeerTools
from paceline.tools.bench.peers.llamacpp import LlamaServer, open_llamacpp
from paceline.tools.bench.peers.openvino import OpenVino, open_openvino
from paceline.tools.bench.peers.served import ServedPeer
from paceline.tools.bench.peers.url import open_url


class Peers:
    """The other engines of a run. Those of one number of clients live at the same time, as every
    one takes memory and, while it waits, next to no processor."""

    def __init__(self, tools: PeerTools) -> None:
        self._tools = tools
        self._open = ExitStack()
        self._clients = 0
        self._differences: dict[str, PeerDifferences] = {}

    def open(self, method: Method, clients: int, own: OwnSide) -> Contestant:
        """Raises PeerFailedError."""
        if clients != self._clients:
            self.close()
            self._clients = clients
        peer = self._started(method, clients, own)
        if isinstance(peer, (LlamaServer, OpenVino)):
            self._open.callback(peer.close)
        # What was seen of it at other numbers of clients still counts.
        known = self._differences.setdefault(method.name, peer.differences)
        peer.differences = known
        return peer

    def _started(self, method: Method, clients: int, own: OwnSide) -> ServedPeer | OpenVino:
        assert method.peer is not None
        name, where, tools = method.name, method.peer, self._tools
        if method.variant == LLAMACPP:
            return open_llamacpp(name, where, clients, own, tools.llama_server)
        if method.variant == OPENVINO:
            return open_openvino(name, where, clients, own, tools.openvino_python)
        return open_url(name, where, clients, own)

    def differences(self) -> dict[str, dict[str, str]]:
        """By method: what could not be made equal, in words."""
        return {name: found.record() for name, found in self._differences.items()}

    def close(self) -> None:
        """End those that were started here."""
        self._open.close()
