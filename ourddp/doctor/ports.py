"""Tries whether hosts reach each other's TCP ports, as a firewall between them would prevent."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Iterable, Sequence

PATIENCE = 3.0  # seconds for a connection, and for the peer's answer
MOST_BYTES = 256


class Listener:
    """Answers whoever connects to one of this machine's addresses with a word that only this listener knows."""

    def __init__(self, addresses: Iterable[str], word: str, ports: str = "") -> None:
        """Listen at each address, at a port of the range ``ports`` such as "20000-20999", or at any free one.

        ``bound`` then has pairs of address and port, and ``error`` says why an address is not among them.
        """
        self.bound: list[tuple[str, int]] = []
        self.error = ""
        self._word = word.encode()
        self._sockets: list[socket.socket] = []
        for address in addresses:
            try:
                self._sockets.append(_listen(address, ports))
                self.bound.append((address, self._sockets[-1].getsockname()[1]))
            except OSError as error:
                self.error = f"{address}: {os.strerror(error.errno) if error.errno else error}"  # without the port
        self._wake, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for one in [*self._sockets, self._stopped]:
                selector.register(one, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._stopped:
                        return
                    self._answer(key.fileobj)  # type: ignore[arg-type]

    def _answer(self, listener: socket.socket) -> None:
        try:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(self._word)
        except OSError:
            pass  # who has left again

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._wake.close()
        self._thread.join()
        for one in [*self._sockets, self._stopped]:
            one.close()


def _listen(address: str, ports: str) -> socket.socket:
    first, _, last = ports.partition("-")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in range(int(first or 0), int(last or first or 0) + 1):
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            failure = error
    raise failure


def obstacle(places: Sequence[Sequence[object]], word: str, patience: float = PATIENCE) -> str:
    """Return why none of a listener's places, address and port, can be reached; empty if one can."""
    reasons = []
    for address, port in places:
        try:
            with socket.create_connection((str(address), int(str(port))), timeout=patience) as peer:
                answer = peer.recv(MOST_BYTES)
        except TimeoutError:
            reasons.append(f"{address}: no answer within {patience:g} s")
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
        else:
            if answer == word.encode():
                return ""
            reasons.append(f"{address}: another machine, or another program, has this address")
    return ", ".join(reasons) or "it has no address to connect to"
