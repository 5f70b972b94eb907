"""A page of memory that a rank's process and the campaign share: what the rank does, and when it is to end."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_SIZE = 4096
_TIME = struct.Struct("d")
_DOING = slice(64, 128)


class Page:
    """The page in the file ``path``, which both processes open."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)
            self._bytes = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)

    @property
    def doing(self) -> str:
        """What the rank does."""
        return self._bytes[_DOING].split(b"\0")[0].decode()

    @doing.setter
    def doing(self, what: str) -> None:
        self._bytes[_DOING] = what.encode().ljust(64, b"\0")

    @property
    def ends(self) -> bool:
        """Whether the job is to end after the current step. The page of rank 0 says so for all."""
        return self._bytes[0] != 0

    @ends.setter
    def ends(self, whether: bool) -> None:
        self._bytes[0] = whether

    @property
    def hit_at(self) -> float:
        """When the rank disturbed itself, by the monotonic clock; 0 if it has not."""
        return _TIME.unpack_from(self._bytes, 8)[0]

    @hit_at.setter
    def hit_at(self, seconds: float) -> None:
        _TIME.pack_into(self._bytes, 8, seconds)
