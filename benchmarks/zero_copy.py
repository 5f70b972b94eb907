"""The floor under an all-reduce in shared memory, as one more peer: the loop written by hand in zero_copy.h."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ourddp.bench import harness
from ourddp.bench.operations import Buffers

SOURCE = Path(__file__).with_name("zero_copy.cpp")


def compiler() -> str | None:
    """Return the C++ compiler to build the floor with, or None where there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build(folder: Path) -> Path:
    """Compile the floor for this machine's processor and return the library; CalledProcessError if that fails."""
    library = folder / "zero_copy.so"
    flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([str(compiler()), *flags, str(SOURCE), "-o", str(library)], check=True)
    return library


class Floor:
    """All-reduce of float32 tensors in memory that all ranks map."""

    def __init__(self, ranks: harness.Ranks, library: Path) -> None:
        """Load what build() made."""
        self._ranks = ranks
        self._all_reduce = ctypes.CDLL(str(library)).zero_copy_all_reduce
        self._all_reduce.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_size_t]

    def buffers(self, size: int) -> Buffers:
        """Return buffers of about `size` bytes, the large one in memory of all ranks. All ranks call it."""
        rank, ranks = self._ranks.rank, self._ranks.size
        buffers = Buffers.make(rank, ranks, size)
        count = len(buffers.large)
        head = ranks * harness.CACHE_LINE
        path = [""]
        if rank == 0:
            file = os.memfd_create("floor")
            os.ftruncate(file, head + ranks * 4 * count)
            path[0] = f"/proc/{os.getpid()}/fd/{file}"
        dist.broadcast_object_list(path)
        with open(path[0], "r+b") as shared:
            memory = mmap.mmap(shared.fileno(), 0)
        dist.barrier()
        if rank == 0:
            os.close(file)
        # The tensor keeps the mapping.
        whole = torch.frombuffer(memory, dtype=torch.float32)
        first = head // 4 + rank * count
        buffers.large = whole[first : first + count]
        return buffers

    def call(self, buffers: Buffers) -> Callable[[], object]:
        """Return the all-reduce, in place, of the large tensor of what buffers() returned."""
        count = len(buffers.large)
        start = buffers.large.data_ptr() - 4 * buffers.rank * count - buffers.ranks * harness.CACHE_LINE
        return partial(self._all_reduce, start, buffers.ranks, buffers.rank, count)
