"""A process's place in its job by Horovod's names, and what was built."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from programs import run_programs
from ranks import in_ranks

import ourddp
from ourddp import _build_info

REPORT = """
import ourddp
assert not ourddp.is_initialized()
ourddp.shutdown()  # nothing to leave
ourddp.init()
assert ourddp.is_initialized()
print(ourddp.rank(), ourddp.size(), ourddp.local_rank(), ourddp.local_size())
ourddp.shutdown()
assert not ourddp.is_initialized()
"""


@in_ranks(3, nodes=3)
def test_places_are_those_of_the_group(rank: int, world: int) -> None:
    assert ourddp.is_initialized()
    assert (ourddp.rank(), ourddp.size()) == (rank, world)
    # What these tests' launcher says; the nodes are only played.
    assert (ourddp.local_rank(), ourddp.local_size()) == (rank, world)


@in_ranks(2, fresh=True, env=[{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}] * 2)
def test_places_on_the_node_come_from_the_launcher(rank: int, world: int) -> None:
    assert (ourddp.local_rank(), ourddp.local_size()) == (0, 1)


@in_ranks(2, fresh=True)
def test_an_environment_of_another_job_is_noticed(rank: int, world: int) -> None:
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert (ourddp.rank(), ourddp.size()) == (rank, world)
    for ask in (ourddp.local_rank, ourddp.local_size):
        with pytest.raises(RuntimeError, match=f"rank 0 of 1, but this process is rank {rank} of 2.*set RANK"):
            ask()
    os.environ["RANK"] = str(rank)
    with pytest.raises(RuntimeError, match="place on its node is not known: RANK is set, but not WORLD_SIZE"):
        ourddp.local_rank()


@in_ranks(1, fresh=True)
def test_a_process_may_leave_its_job_and_make_another(rank: int, world: int) -> None:
    ourddp.shutdown()
    for ask in (ourddp.rank, ourddp.size, ourddp.local_rank, ourddp.local_size):
        with pytest.raises(RuntimeError, match=r"has not joined a job: call ourddp\.init\(\) first"):
            ask()
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    ourddp.init()
    assert (ourddp.rank(), ourddp.size(), ourddp.local_rank(), ourddp.local_size()) == (0, 1, 0, 1)
    assert dist.get_backend() == "ours"


def test_a_process_without_a_launcher_is_alone() -> None:
    [done] = run_programs(REPORT, [{}])
    assert (done.stdout, done.stderr) == ("0 1 0 1\n", "")


def test_what_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ourddp.gloo_built() == dist.is_gloo_available()
    for wish, expected in (("off, as asked", False), ("on: a version", True)):
        monkeypatch.setattr(_build_info, "ENGINES", {"MPI": wish, "CUDA": wish})
        assert ourddp.mpi_built() == ourddp.cuda_built() == expected
        assert ourddp.nccl_built() == (expected and dist.is_nccl_available())
    monkeypatch.setattr("torch.version.hip", None)
    assert not ourddp.rocm_built()
    monkeypatch.setattr("torch.version.hip", "6.0")
    assert ourddp.rocm_built()
