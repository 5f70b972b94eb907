"""Makes the backends of torch.distributed that move data between nodes (``OURS_INTERNODE``), by their names."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ourddp import _C

# The first would need itself, and the second stands for the default.
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

    Other ranks reach this one at ``address``. Waits for the others, at most ``timeout``. Raises what the backend
    raises.
    """
    # Gloo comes first, as it can be told its address; a plugin of that name may be another.
    if name == "gloo":
        return _make_gloo(store, rank, size, timeout, address)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is not None:
        return _make_plugin(plugin, store, rank, size, timeout)
    from torch._C._distributed_c10d import ProcessGroupUCC

    return ProcessGroupUCC(store, rank, size, timeout=timeout)


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
    # By default this is the network over which ranks reach each other anyway. Gloo would choose by the host's name.
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    places = [{"interface": name} for name in interfaces] or ([{"hostname": address}] if address else [])
    # Ranks connect at once. A connection made with the first message would wait for its receiver, which may itself wait
    # for another message that announces it.
    devices = [dist.ProcessGroupGloo.create_device(**place, lazy_init=False) for place in places]
    options._devices = devices or [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]
    options._timeout = timeout
    options._threads = 1  # for collectives, which are not used
    return dist.ProcessGroupGloo(store, rank, size, options)
