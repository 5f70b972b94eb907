"""Makes the backends of torch.distributed that move data between nodes (``OURS_INTERNODE``), by their names."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ourddp import _C

# One that would need itself, and one that stands for whatever is the default.
REFUSED = ("ours", "undefined")


def register() -> None:
    """Tell the C++ core how to make them. Further calls change nothing."""
    _C.set_backend_maker(obstacle, make)


def obstacle(name: str) -> str:
    """Return why the backend ``name`` cannot move CPU memory between nodes, or an empty string if it can."""
    known = sorted(set(dist.Backend.backend_capability) - set(REFUSED))
    if name not in known:
        return f"torch.distributed knows no such backend, only {', '.join(known)}. Is the package that has it imported?"
    devices = dist.Backend.backend_capability[name]
    if "cpu" not in devices:
        return f"the backend {name} cannot send from CPU memory, only from that of {', '.join(devices)}"
    return "" if _is_available(name) else f"this build of torch has no backend {name}"


def make(name: str, store: dist.Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """Return the backend ``name`` for the ranks that meet through ``store``, which must be for it alone.

    ``address`` is what other ranks reach this one by. Waits for the others, at most ``timeout``. Raises whatever the
    backend raises.
    """
    # Gloo first: it can be told its address, and what stands for it among the plugins may be another.
    if name == "gloo":
        return _make_gloo(store, rank, size, timeout, address)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is not None:
        return _make_plugin(plugin, store, rank, size, timeout)
    if name == "ucc":
        from torch._C._distributed_c10d import ProcessGroupUCC

        return ProcessGroupUCC(store, rank, size, timeout=timeout)
    raise ValueError(f"torch says of the backend {name} neither that it is one of its own nor how to make it")


def _is_available(name: str) -> bool:
    own = {"gloo": dist.is_gloo_available, "ucc": dist.is_ucc_available}
    return name.upper() in dist.Backend._plugins or (name in own and own[name]())


def _make_plugin(plugin: Any, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store = store
    options.group_rank = rank
    options.group_size = size
    options.timeout = timeout
    options.group_id = "engine"
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)


def _make_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # By default the network that ranks reach each other by anyway; Gloo's own choice is where the host's name leads to.
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    places = [{"interface": name} for name in interfaces] or ([{"hostname": address}] if address else [])
    # Connected at once: a first message that waited for its receiver would wait for the one that announces it.
    devices = [dist.ProcessGroupGloo.create_device(**place, lazy_init=False) for place in places]
    options._devices = devices or [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]
    options._timeout = timeout
    options._threads = 1  # these run collectives, of which there are none
    return dist.ProcessGroupGloo(store, rank, size, options)
