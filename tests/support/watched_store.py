"""A store of a process group, of which tests see each call."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist


class WatchedStore(dist.Store):
    """A store that calls ``before`` with the name and the key of each of its calls."""

    def __init__(self, inner: dist.Store, before: Callable[[str, str], object]) -> None:
        super().__init__()
        self._inner, self._before = inner, before

    def set(self, key: str, value: bytes) -> None:
        self._before("set", key)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._before("get", key)
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        self._before("add", key)
        return self._inner.add(key, value)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._before("compare_set", key)
        return self._inner.compare_set(key, expected, value)

    def check(self, keys: list[str]) -> bool:
        self._before("check", keys[0])
        return self._inner.check(keys)

    def has_extended_api(self) -> bool:
        return self._inner.has_extended_api()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._before("multi_get", keys[0])
        return self._inner.multi_get(keys)
