"""A process group for torchft, which trains on when ranks die or come. It needs ``pip install torchft-nightly``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ourddp import _C

try:
    from torchft.process_group import ProcessGroupWrapper
except ImportError as error:
    raise ImportError("ourddp.torchft needs torchft: pip install torchft-nightly") from error

__all__ = ["ProcessGroupOurs"]


class ProcessGroupOurs(ProcessGroupWrapper):
    """A group of this backend for a ``torchft.Manager``, in the place of torchft's ``ProcessGroupGloo``.

    When the ranks change, torchft has it make a new group of those that are there. The error that a rank has died comes
    at once, so that the step that fails costs no timeout:

        manager = Manager(pg=ProcessGroupOurs(timeout=timedelta(seconds=30)), ...)

    ``timeout`` is that of making a group, and of each operation. From torch 2.15 on, torchft also takes a native group,
    ``init_process_group("ours", enable_reconfigure=True)``, which stays the same object.
    """

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        # What new_group() does. It cannot be called here, as there is no default group, whose ranks could not change.
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, world_size
        options.timeout, options.global_ranks_in_group = self._timeout, list(range(world_size))
        group = dist.ProcessGroup(store, rank, world_size)
        custom = dist.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(custom)
        backend = _C.create_backend(options)
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), custom, backend)
        return group

    def getBackendName(self) -> str:
        """Return the name under which torchft knows the group."""
        return "torchft-ours"
