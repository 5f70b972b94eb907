"""Import the suite with the patches in place and make its test class, whose ranks are forks of this warm process."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = "ourddp"


def _init_file() -> Path:
    """The file by which some tests form a second group: one of this process, removed after each test."""
    return Path(tempfile.gettempdir()) / f"conformance-{os.getpid()}"


def prepare_environment(world_size: int, timeout_s: int) -> None:
    """Set the variables that the suite reads while it is imported."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(world_size),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(timeout_s),
        INIT_METHOD=f"file://{_init_file()}",  # opens the tests that need file://
        TEMP_DIR=tempfile.gettempdir(),
    )


def load(world_size: int, timeout_s: int, backend: str, ddp: str) -> ModuleType:
    """Import the suite patched for ``backend``, a registered name, and ``ddp``, "torch" or "ours"."""
    prepare_environment(world_size, timeout_s)
    import torch

    from conformance import devices, gates, standin

    gates.open_named_gates()
    devices.install(device_count=8)
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    common_distributed.TIMEOUT_OVERRIDE.clear()
    common_distributed.TIMEOUT_OVERRIDE.update({"test_ddp_uneven_inputs": 3 * timeout_s})  # many models in one test
    if "ours" in (backend, ddp):
        importlib.import_module(_PACKAGE)  # registers the backend where the package is built in place, not installed
    if backend != "gloo":
        standin.stand_in_for_gloo(backend)
        standin.relabel_profiler_events(distributed_test, backend)
    standin.read_nccl_as_gloo()
    ddp_class = standin.replace_ddp(_PACKAGE) if ddp == "ours" else torch.nn.parallel.DistributedDataParallel
    devices.patch_ddp(ddp_class)
    if backend != "gloo":
        standin.relabel_logging_data(ddp_class)
    return distributed_test


def _forked_ranks(log_path: Path, node_of_rank: list[str]) -> type:
    """A mixin for torch's MultiProcessTestCase: ranks are forks, write to ``log_path``, and none outlives its test.

    Rank r plays a rank of the node ``node_of_rank[r]``, where there is one.
    """
    import torch

    class ForkedRanks:
        processes: list[Any]

        def _spawn_processes(self) -> None:
            sys.stdout.flush()
            sys.stderr.flush()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)  # type: ignore[attr-defined]

        def tearDown(self) -> None:
            ranks = list(self.processes)
            super().tearDown()  # type: ignore[misc]
            for rank in ranks:
                rank.join(5)
                if rank.exitcode is None:
                    rank.kill()
                    rank.join()
            Path(self.file_name).unlink(missing_ok=True)  # type: ignore[attr-defined]
            _init_file().unlink(missing_ok=True)  # a rank that died leaves it behind, and the next test would read it

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            super()._check_return_codes(fn, elapsed_time)  # type: ignore[misc]
            killed = [f"rank {rank} by signal {-p.exitcode}" for rank, p in enumerate(self.processes) if p.exitcode < 0]
            if killed:
                raise RuntimeError("killed: " + ", ".join(killed))

        @classmethod
        def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            if rank < len(node_of_rank):
                os.environ["OURS_NODE_ID"] = node_of_rank[rank]
            super()._run(rank, *args, **kwargs)  # type: ignore[misc]

    return ForkedRanks


def make_test_classes(suite: ModuleType, log_path: Path, node_of_rank: list[str]) -> list[type]:
    """Concrete classes: DistributedTest, and the tests of DDP under RPC, which bring world sizes of their own."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as under_rpc
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

    forked = _forked_ranks(log_path, node_of_rank)

    class Distributed(forked, suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    class _UnderRpc(forked, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):  # type: ignore[misc,valid-type]
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    class DdpUnderDistAutograd(under_rpc.DdpUnderDistAutogradTest, _UnderRpc):
        pass

    class DdpComparison(under_rpc.DdpComparisonTest, _UnderRpc):
        pass

    return [Distributed, DdpUnderDistAutograd, DdpComparison]
