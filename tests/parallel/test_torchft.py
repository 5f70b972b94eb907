"""torchft over this backend: its own tests of process groups and of quorums, with `ours` in Gloo's place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from programs import job, run_programs, run_python

# A program that runs tests of torchft. Nothing in them is changed, but for the classes that make groups.
SUITE = """
    import datetime, sys, unittest
    import torch.distributed as dist
    from ourddp import _C
    from ourddp.torchft import ProcessGroupOurs
    from torchft import {module} as suite

    def native(store, rank, size, enable_reconfigure):
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, size
        options.timeout, options.enable_reconfigure = datetime.timedelta(seconds=60), enable_reconfigure
        return _C.create_backend(options)

    suite.ProcessGroupGloo = ProcessGroupOurs
    dist.ProcessGroupGloo = native

    {more}

    load = unittest.TestLoader().loadTestsFromName
    tests = unittest.TestSuite(load(name, suite) for name in {names!r})
    result = unittest.TextTestRunner(verbosity=2).run(tests)
    assert result.testsRun >= {least}, result.testsRun
    sys.exit(not result.wasSuccessful())
"""

# What torchft leaves out for Gloo, but for tests that do nothing on a CPU.
LEFT_OUT = """
    class LeftOut(suite.MultiPgBaseTest):
        WORLD_SIZE = 3

        def test_left_out(self):
            self._run_parallel("alltoall_base")

    suite.LeftOut = LeftOut
"""

NATIVE = """
    import os
    import ourddp
    from torchft.reconfigure_test import _resize_worker

    _resize_worker(int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]), "ours")
    print("resized")
"""


@pytest.fixture
def torchft() -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: pip install torchft-nightly")
    pytest.importorskip("parameterized", reason="torchft's tests need it: pip install parameterized")


def check(module: str, names: list[str], least: int, folder: Path, more: str = "") -> str:
    """Run tests of torchft, of which there are at least so many, and return what is printed about them."""
    code = SUITE.format(module=module, names=names, least=least, more=more.strip())
    done = run_python(code, folder, RUST_LOG="warn", OMP_NUM_THREADS="1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stderr


def test_its_tests_of_process_groups_pass(tmp_path: Path, torchft: None) -> None:
    names = ["ProcessGroupTest.test_gloo_apis_0_cpu", "ProcessGroupTest.test_gloo_timeout", "NormalGlooMultiPgTest"]
    check("process_group_test", [*names, "LeftOut"], 19, tmp_path, LEFT_OUT)


def test_its_tests_of_quorums_and_recovery_pass(tmp_path: Path, torchft: None) -> None:
    """Among them some that kill a replica, which comes back with the weights of another."""
    printed = check("manager_integ_test", ["ManagerIntegTest"], 8, tmp_path)
    for skipped in re.findall(r"skipped '(.*)'", printed):
        assert re.search(r"torchcomms|GPU|native", skipped), skipped


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "reconfigure"), reason="torch has reconfigure() from 2.15 on")
def test_a_native_group_is_resized_and_recovers(tmp_path: Path, torchft: None) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_programs(NATIVE, job(3, store), tmp_path)
    assert [(rank.returncode, rank.stdout) for rank in ranks] == [(0, "resized\n")] * 3, ranks


def test_without_torchft_an_error_says_what_to_install(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules["torchft"] = sys.modules["torchft.process_group"] = None
        try:
            import ourddp.torchft
        except ImportError as error:
            print(error)
    """
    assert run_python(code, tmp_path).stdout == "ourddp.torchft needs torchft: pip install torchft-nightly\n"
