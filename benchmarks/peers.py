"""The peers of collectives.py: how each is found, how its ranks are started, and how they call its collectives.

Two MPIs cannot live in one process, and what one peer leaves behind in a process must not help or harm another: so the
ranks of each peer are processes of their own. The MPIs are called through mpi4py, one build of which serves those that
have MPICH's binary interface, and another Open MPI.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zero_copy

from ourddp.bench import collectives, harness
from ourddp.bench.operations import OPERATIONS, OWN, Buffers, Operation

BARE = OWN + "all_reduce"
FAKE = "torch.testing._internal.distributed.fake_pg"  # which registers the backend
ALL_REDUCES = (OPERATIONS["all_reduce"], OPERATIONS[BARE])
DEEPSPEED = "deepspeed_shm_comm"  # as DeepSpeed names the library
# Where DeepSpeed's all-reduce has its memory, which it does not remove.
DEEPSPEED_MEMORY = "/dev/shm/deepspeed_allreduce_buffer_{user}_{address}_{port}_{rank}"


@dataclass(frozen=True)
class MpiPeer:
    """An MPI, and the settings that make it what it is here."""

    package: str  # of PyPI
    folder: str | None = None  # the prefix under --rivals; None for the Open MPI that harness.find_mpirun finds
    environment: Mapping[str, str] = field(default_factory=dict)


MPICH_RELEASE_GATHER = {
    f"MPIR_CVAR_{name}": value
    for collective in ("ALLREDUCE", "BCAST", "REDUCE", "BARRIER")
    for name, value in (
        (f"{collective}_POSIX_INTRA_ALGORITHM", "release_gather"),
        (f"{collective}_COMPOSITION", "1"),  # the one that leaves the work within a node to shared memory
    )
    if name != "BARRIER_COMPOSITION"
}
MPIS = {
    "openmpi": MpiPeer("openmpi"),
    "openmpi_sm": MpiPeer("openmpi", environment={"OMPI_MCA_coll_sm_priority": "100"}),
    "mpich": MpiPeer("mpich", "mpich"),
    "mpich_rg": MpiPeer("mpich", "mpich", MPICH_RELEASE_GATHER),
    "impi": MpiPeer("impi-rt", "impi", {"I_MPI_PIN": "0", "I_MPI_FABRICS": "shm"}),
}
TWO_NODES = "ours_nodes"  # ranks that play two nodes, the first half of them one
SHARED = "ours_shared"  # tensors that all ranks map (ourddp.shared_tensors)
NOTHING = "nothing"  # torch's backend `fake`, which talks to nobody
DEFAULT = ("ours", "gloo", *MPIS, "deepspeed", "floor")
C10D = "openmpi_c10d"  # Open MPI, each of whose calls comes after a barrier of `nothing`, one of torch's shortest calls
MPIS[C10D] = MPIS["openmpi"]  # after DEFAULT: it takes part only if it is named
NAMES = (*DEFAULT, TWO_NODES, SHARED, NOTHING, C10D)


def why_not(name: str, rivals: Path | None) -> str:
    """Return why the peer cannot take part, or nothing where it can."""
    if name in (NOTHING, C10D) and importlib.util.find_spec(FAKE) is None:
        return "this torch has no backend `fake`"
    if name in ("ours", TWO_NODES, SHARED, NOTHING):
        return ""
    if name == "gloo":
        return "" if dist.is_gloo_available() else "this torch has no Gloo"
    if name == "floor":
        return "" if zero_copy.compiler() else "there is no C++ compiler"
    if name == "deepspeed":
        if importlib.util.find_spec("deepspeed") is None:
            return "there is no deepspeed: pip install --no-deps --target RIVALS deepspeed"
        return "" if zero_copy.compiler() and shutil.which("ninja") else "it is built by a C++ compiler and ninja"
    if importlib.util.find_spec("mpi4py") is None:
        return "there is no mpi4py: pip install --no-deps --target RIVALS mpi4py"
    peer = MPIS[name]
    if peer.folder is None:
        return "" if harness.find_mpirun() else f"there is no mpirun of Open MPI: pip install {peer.package}"
    if rivals is None or not (rivals / peer.folder / "bin" / "mpiexec.hydra").exists():
        return f"pip install --no-deps --ignore-installed --prefix RIVALS/{peer.folder} {peer.package}"
    return ""


def launch_of(name: str, rivals: Path | None, ranks: int) -> harness.Mpi | None:
    """Return the MPI that starts the peer's ranks, or None where they are plain processes."""
    if name not in MPIS:
        return None
    peer = MPIS[name]
    if peer.folder is None:
        mpi = harness.open_mpi(ranks)
        return harness.Mpi(mpi.command, {**mpi.environment, **peer.environment})
    assert rivals is not None
    prefix = (rivals / peer.folder).resolve()
    fabric = prefix / "opt" / "mpi" / "libfabric" / "lib"  # Intel MPI needs it even if it does not use it
    environment = {
        "MPI4PY_MPIABI": "mpich",
        "LD_LIBRARY_PATH": os.pathsep.join([str(prefix / "lib"), str(fabric), os.environ.get("LD_LIBRARY_PATH", "")]),
        "I_MPI_ROOT": str(prefix),
        **peer.environment,
    }
    return harness.Mpi((str(prefix / "bin" / "mpiexec.hydra"), "-launcher", "fork"), environment)


def build(name: str, folder: Path) -> str:
    """Return the library that the peer's ranks need, built in `folder` or once for all runs; nothing if none."""
    if name == "floor":
        return str(zero_copy.build(folder))
    if name == "deepspeed":
        from torch.utils import cpp_extension  # which looks for CUDA, and says so

        (package,) = importlib.util.find_spec("deepspeed").submodule_search_locations
        source = Path(package) / "ops" / "csrc" / "cpu" / "comm"
        files = [str(source / file) for file in ("shm_interface.cpp", "shm.cpp")]
        # The flags are those of DeepSpeed's own builder, which needs all that DeepSpeed depends on.
        return str(cpp_extension.load(DEEPSPEED, files, extra_cflags=["-O2", "-fopenmp"]).__file__)
    return ""


class Joined:
    """A peer in one of its ranks: makes buffers and calls. All ranks construct it."""

    def __init__(self, ranks: harness.Ranks, name: str, library: str, rivals: str) -> None:
        """Join the peer's other ranks."""
        self._ranks, self._name, self._shares = ranks, name, name == SHARED
        self._before: Callable[[], object] | None = None
        if rivals:
            sys.path.append(rivals)  # for mpi4py; last, so that it hides nothing
        if name == "floor":
            self.group: Any = zero_copy.Floor(ranks, Path(library))
        elif name == "deepspeed":
            self.group = _join_deepspeed(ranks, library)
        else:
            if name == TWO_NODES:
                os.environ["OURS_NODE_ID"] = f"node {2 * ranks.rank // ranks.size}"
            if name in (NOTHING, C10D):
                importlib.import_module(FAKE)
            kinds = {**dict.fromkeys(MPIS, "mpi"), TWO_NODES: "ours", SHARED: "ours", NOTHING: "fake"}
            self._name = kinds.get(name, name)
            self.group = collectives.group_of(ranks, self._name)
        if name == C10D:
            barrier = OPERATIONS[OWN + "barrier"].torch
            self._before = barrier(Buffers.make(ranks.rank, ranks.size, 4), collectives.group_of(ranks, "fake"))

    def buffers(self, size: int) -> Buffers:
        """Return buffers of about `size` bytes. All ranks call it."""
        if self._name == "floor":
            return self.group.buffers(size)
        if not self._shares:
            return Buffers.make(self._ranks.rank, self._ranks.size, size)
        from ourddp import shared_tensors

        with shared_tensors(self.group, least=0):
            return Buffers.make(self._ranks.rank, self._ranks.size, size)

    def call_of(self, operation: Operation, buffers: Buffers) -> Callable[[], object]:
        """Return the call of the collective; NotImplementedError where the peer has none."""
        if self._name not in ("floor", "deepspeed"):
            call = collectives.call_of(self._name, operation, buffers, self.group)
            before = self._before
            if before is None:
                return call
            return (lambda: (before(), before(), call())) if operation.half else (lambda: (before(), call()))
        if operation not in ALL_REDUCES:
            raise NotImplementedError
        if self._name == "floor":
            return self.group.call(buffers)
        # DeepSpeed's Python calls the former, which looks for the overload.
        call = self.group if operation is OPERATIONS["all_reduce"] else self.group.default
        return partial(call, buffers.large)


def _join_deepspeed(ranks: harness.Ranks, library: str) -> Any:
    """Return DeepSpeed's all-reduce, in place."""
    place = {"address": "benchmark", "port": Path(os.environ[harness.FOLDER]).name}
    os.environ.update(LOCAL_SIZE=str(ranks.size), MASTER_ADDR=place["address"], MASTER_PORT=place["port"])
    spec = importlib.util.spec_from_file_location(DEEPSPEED, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.initialize(ranks.size, ranks.rank)
    dist.barrier()
    os.unlink(DEEPSPEED_MEMORY.format(user=os.getuid(), rank=ranks.rank, **place))
    return torch.ops.deepspeed.inference_all_reduce_
