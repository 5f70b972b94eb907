"""What ranks share is out of reach of the other users of the machine."""

from __future__ import annotations

import os
import stat

import pytest
import torch
import torch.distributed as dist
from probes import backend_of
from ranks import in_ranks

NOBODY = 65534


def as_nobody(names: list[str]) -> list[str]:
    """Return those of the files that a process of another user can open, or whose folder it can list."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        opened = []
        for name in names:
            for flags in (os.O_RDONLY, os.O_RDWR):
                try:
                    os.open(name, flags | os.O_NONBLOCK)
                    opened.append(name)
                except (PermissionError, IsADirectoryError):  # the latter only says that one does not write to those
                    pass
        os.write(writer, "\n".join(opened).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        opened = file.read().split()
    assert os.waitpid(child, 0)[1] == 0
    return opened


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@in_ranks(2)
def test_other_users_can_open_nothing_that_ranks_share(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(1000))
    tensor = backend_of().allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu"))
    if rank == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(4), 0)
    folder = f"/proc/{os.getpid()}/fd"
    shared = {}
    for number in os.listdir(folder):
        if os.path.lexists(f"{folder}/{number}"):
            shared[number] = os.readlink(f"{folder}/{number}")
    memory = [number for number, target in shared.items() if target.startswith("/memfd:ours")]
    assert memory
    assert any(target.startswith("pipe:") for target in shared.values())
    for number in memory:
        assert stat.S_IMODE(os.fstat(int(number)).st_mode) == 0o600, shared[number]
    around = [f"/proc/{os.getpid()}/{name}" for name in ("mem", "maps", "environ", "fd", "map_files")]
    assert as_nobody([f"{folder}/{number}" for number in shared] + around) == []
    assert tensor.is_cpu  # it has kept the heap's file


@in_ranks(2)
def test_what_ranks_share_has_no_name_in_a_file_system(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(1000))
    assert not [name for name in os.listdir("/dev/shm") if "ours" in name]
