"""A rank that has joined and then sends what no rank sends ends the others' calls with an error that names it."""

from __future__ import annotations

import datetime
import os
import socket
import struct
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from own_pages import pages
from probes import backend_of, is_to_store, tcp_connections
from ranks import run_ranks

HOSTILE = 0
HEADER_BYTES = 120  # FrameHeader in csrc/transport/tcp/tcp_wire.h
DATA = 1
PATIENCE_S = 20
MOST_GROWN = 64 << 20


def header_of_data(connection: socket.socket) -> bytes:
    """Return the beginning of what a peer has sent to this rank, if that is data of a collective."""
    try:
        words = connection.recv(HEADER_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""
    return words if len(words) == HEADER_BYTES and words[4] == DATA else b""


def await_data() -> tuple[socket.socket, bytes]:
    """Return a connection for data, and the header that a peer has sent there."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for connection in tcp_connections():
            if not is_to_store(connection) and (header := header_of_data(connection)):
                return connection, header
        time.sleep(0.01)
    raise AssertionError("no data has come")


def with_lengths(header: bytes, total: int, here: int) -> bytes:
    """Return the header of a message of other lengths."""
    return header[:24] + struct.pack("<2Q", total, here) + header[40:]


def rubbish(connection: socket.socket, header: bytes) -> None:
    connection.sendall(os.urandom(1 << 16))


def oversized(connection: socket.socket, header: bytes) -> None:
    connection.sendall(with_lengths(header, 1 << 60, 1 << 60) + bytes(1 << 16))


def longer_than_the_whole(connection: socket.socket, header: bytes) -> None:
    connection.sendall(with_lengths(header, 400, 1 << 60) + bytes(1 << 16))


def cut_short_and_ended(connection: socket.socket, header: bytes) -> None:
    connection.sendall(header[:50])
    connection.shutdown(socket.SHUT_RDWR)


def cut_short(connection: socket.socket, header: bytes) -> None:
    connection.sendall(header[:50])


def end_of_rank(rank: int, world: int, acts: Callable[[socket.socket, bytes], None], timeout: float) -> tuple[str, int]:
    """Return the error of this rank, and how its memory grew; or turn hostile."""
    dist.all_reduce(data := torch.ones(200_000))
    store = dist.distributed_c10d._get_default_store()
    if rank == HOSTILE:
        store.set("out of the call", "")  # in which it would take what comes next
        acts(*await_data())
        store.wait([f"ended/{other}" for other in range(1, world)])
        return "", 0
    store.wait(["out of the call"])
    before = pages()["VmRSS"]
    backend_of().set_timeout(datetime.timedelta(seconds=timeout))
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(data)
    store.set(f"ended/{rank}", "")
    return str(caught.value), pages()["VmRSS"] - before


@pytest.mark.parametrize(("world", "nodes"), [(3, 3), (4, 2)])
@pytest.mark.parametrize(
    ("acts", "timeout", "told"),
    [
        (rubbish, PATIENCE_S, "what makes no sense: it does not begin as a message does"),
        (oversized, PATIENCE_S, "what makes no sense: a part of a message is not the one that follows"),
        (longer_than_the_whole, PATIENCE_S, "what makes no sense: a part is longer than the whole"),
        (cut_short_and_ended, PATIENCE_S, "broke a connection during all_reduce number 2"),
        (cut_short, 2, "Timed out waiting 2000ms"),
    ],
)
def test_the_others_end_with_an_error_that_names_it(
    acts: Callable[[socket.socket, bytes], None], timeout: float, told: str, world: int, nodes: int
) -> None:
    for error, grown in run_ranks(world, end_of_rank, acts, timeout, nodes=nodes)[1:]:
        assert f"rank {HOSTILE} (" in error
        assert told in error
        assert grown < MOST_GROWN
