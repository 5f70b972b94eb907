"""What strangers do at the ports of a rank: each kind says something at once, and something to the challenge.

The doors know the secrets, as only the ranks do. With those the handshakes are made that strangers have overheard, and
the one of a rank, by which a test shows that it would notice a stranger that is let in.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

CHALLENGE_BYTES = 24  # magic, version, and a number of 16 bytes
HELLO_BYTES = 48
QUESTION = struct.pack("<2I", 0x6572656F, 1)  # as in csrc/transport/tcp/tcp_whereabouts_wire.h
MASK = (1 << 64) - 1
Question = Callable[[bytes], bytes]  # made with the key of the process that is asked


@dataclass
class Door:
    """A port at which a rank waits, and what only its peers know."""

    port: int
    rank: int
    size: int
    mesh: int  #: the number of its group's mesh there
    secret: bytes
    earlier: bytes  #: the secret of an earlier attempt
    overheard: bytes = b""  #: the last challenge of somebody else


@dataclass(frozen=True)
class Kind:
    """What strangers of a kind do. What they do not say at once is the answer to the challenge."""

    name: str
    greets: Callable[[], bytes] = bytes
    answers: Callable[[Door, bytes], bytes] | None = None
    slowly: bool = False  #: a byte now and then
    ends: str = ""  #: "close" or "reset": at once
    times: int = 1


def siphash(key: bytes, data: bytes) -> int:
    """Return SipHash-2-4, as csrc/common/siphash.cpp does."""
    k0, k1 = struct.unpack("<2Q", key)
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def rotate(word: int, bits: int) -> int:
        return (word << bits | word >> (64 - bits)) & MASK

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0] = (v[0] + v[1]) & MASK
            v[1] = rotate(v[1], 13) ^ v[0]
            v[0] = rotate(v[0], 32)
            v[2] = (v[2] + v[3]) & MASK
            v[3] = rotate(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & MASK
            v[3] = rotate(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & MASK
            v[1] = rotate(v[1], 17) ^ v[2]
            v[2] = rotate(v[2], 32)

    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 255])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 255
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def hello(door: Door, challenge: bytes, secret: bytes) -> bytes:
    """Return what a rank answers that knows this secret. It is one that the door's rank never speaks with otherwise."""
    nonce = os.urandom(16)
    sender = door.size - 1 - door.rank
    words = challenge[:8] + struct.pack("<4I16s", sender, door.rank, random.randrange(2), door.mesh, nonce)
    return words + struct.pack("<Q", siphash(secret, challenge[8:] + nonce + words + bytes(8)))


def right(door: Door, challenge: bytes) -> bytes:
    """Return what only a rank can answer."""
    return hello(door, challenge, door.secret)


def replayed(door: Door, challenge: bytes) -> bytes:
    """Return what a rank has answered to another challenge of this door."""
    before, door.overheard = door.overheard or challenge[:8] + os.urandom(16), challenge
    return hello(door, before, door.secret)


def random_fields(door: Door, challenge: bytes) -> bytes:
    """Return a hello of which only the first word makes sense."""
    return challenge[: random.choice([4, 8])].ljust(8, b"\xff") + os.urandom(HELLO_BYTES - 8)


def wrong_proof(door: Door, challenge: bytes) -> bytes:
    """Return a hello of which only the proof is wrong: by one bit, or altogether."""
    words = right(door, challenge)
    flip = 1 << random.randrange(64) if random.random() < 0.5 else 1 + random.getrandbits(63)
    return words[:-8] + struct.pack("<Q", struct.unpack("<Q", words[-8:])[0] ^ flip)


def frames(challenge: bytes) -> bytes:
    """Return headers of messages that promise a terabyte."""
    return (challenge[:4] + struct.pack("<BBHII3Q", 1, 0, 0, 0, 0, 1, 1 << 40, 1 << 40) + bytes(80)) * 20


KINDS = (
    Kind("port scan: close", ends="close"),
    Kind("port scan: reset", ends="reset"),
    Kind("silence", times=4),
    Kind("HTTP", lambda: b"GET / HTTP/1.1\r\nHost: node1:20000\r\nUser-Agent: scanner\r\n\r\n"),
    Kind("HTTP, a byte at a time", lambda: b"GET / HTTP/1.1\r\nHost: node1:20000\r\n" * 20, slowly=True),
    Kind("TLS", lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(506)),
    Kind("SSH", lambda: b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"),
    Kind("random bytes", lambda: os.urandom(random.randrange(1, 5000))),
    Kind("a megabyte", lambda: bytes(1 << 20)),
    Kind("the challenge sent back", answers=lambda _, challenge: challenge * 2),
    Kind("hello, random fields", answers=random_fields),
    Kind("hello, cut short", answers=lambda door, it: right(door, it)[: random.randrange(1, HELLO_BYTES)]),
    Kind("hello, a byte at a time", answers=wrong_proof, slowly=True),
    Kind("hello, wrong proof", answers=wrong_proof),
    Kind("hello, wrong secret", answers=lambda door, it: hello(door, it, os.urandom(16))),
    Kind("hello, earlier secret", answers=lambda door, it: hello(door, it, door.earlier)),
    Kind("hello, replayed", answers=replayed),
    Kind(
        "hello, replayed from earlier",
        answers=lambda door, it: hello(door, it[:8] + os.urandom(16), door.earlier),
    ),
    Kind("hello, no secret, and frames", answers=lambda door, it: wrong_proof(door, it) + frames(it)),
)


def question(key: bytes) -> bytes:
    """Return the question by which the ranks ask a process where it is, with the key of that process."""
    words = QUESTION + os.urandom(16) + bytes(8)
    return words + struct.pack("<Q", siphash(key, words + bytes(8)))


# What strangers send to the port at which a process says where it is in its program.
QUESTIONS: dict[str, Question] = {
    "UDP: wrong key": lambda _: question(os.urandom(16)),
    "UDP: cut short": lambda key: question(key)[: random.randrange(40)],
    "UDP: too long": lambda key: question(key) + os.urandom(random.randrange(1, 2000)),
    "UDP: random bytes": lambda _: os.urandom(40),
}
