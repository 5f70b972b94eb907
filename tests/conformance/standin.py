"""Let another c10d backend answer wherever the suite asks for Gloo, and another class where it asks for DDP."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel


def _plugins() -> dict[str, Any]:
    ensure_registered = getattr(dist.Backend, "_ensure_backend_registered", None)
    if ensure_registered is not None:
        ensure_registered("gloo")
    plugins: dict[str, Any] = getattr(dist.Backend, "_plugins", {})
    if "GLOO" not in plugins:
        raise RuntimeError(
            f"torch {torch.__version__} builds Gloo without Backend._plugins; run the suite with torch 2.15 or later"
        )
    return plugins


def read_nccl_as_gloo() -> None:
    """Build groups that the suite asks for as "nccl" by what is registered for "gloo", for CPU tensors too."""
    plugins = _plugins()
    plugins["NCCL"] = plugins["GLOO"]
    dist.Backend.backend_capability["nccl"] = ["cpu", "cuda"]


def stand_in_for_gloo(name: str) -> None:
    """Replace the plugin that torch looks up for "gloo" by the one registered as ``name``.

    Raises:
        RuntimeError: this torch does not construct Gloo through ``Backend._plugins`` or ``name`` is not registered.
    """
    plugins = _plugins()
    dist.Backend._ensure_backend_registered(name)
    if name.upper() not in plugins:
        raise RuntimeError(f"no c10d backend {name!r} is registered; install the package that brings it and try again")
    plugins["GLOO"] = plugins[name.upper()]
    # As for every backend that is not torch's own. A group of type GLOO makes torch's DDP logger take the backend for a
    # ProcessGroupGloo and read its number of threads from memory that is laid out otherwise.
    dist.Backend.backend_type_map["gloo"] = dist.ProcessGroup.BackendType.CUSTOM


def relabel_profiler_events(suite: ModuleType, name: str) -> None:
    """Let the suite find events labelled ``name:op`` as the ``gloo:op`` that it asks for; all else in them stays."""
    find = suite.get_profiling_event

    def find_relabelled(event_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        if not event_name.startswith("gloo:"):
            return find(event_name, *args, **kwargs)
        events = find(event_name.replace("gloo:", f"{name}:", 1), *args, **kwargs)
        for event in events:
            event.name = event.name.replace(f"{name}:", "gloo:", 1)
        return events

    suite.get_profiling_event = find_relabelled


def relabel_logging_data(ddp_class: type) -> None:
    """Let DDP's logging data name the backend as the suite asked for it, with the fields that are Gloo's alone."""
    get_data = ddp_class._get_ddp_logging_data

    def get_relabelled(self: Any) -> dict[str, Any]:
        data: dict[str, Any] = get_data(self)
        if data.get("backend_name") == "custom":
            names = ("gloo_socket_ifname", "gloo_device_transport")
            settings = {name: os.environ.get(name.upper(), "N/A") for name in names}
            data = {**data, **settings, "backend_name": "gloo", "gloo_num_threads": 2}
        return data

    ddp_class._get_ddp_logging_data = get_relabelled


def replace_ddp(module_name: str) -> type:
    """Put ``module_name``'s DistributedDataParallel and SyncBatchNorm where loaded modules refer to torch's classes.

    The package that defines the replacements keeps its own references, since its classes derive from torch's. Returns
    the replacement of DistributedDataParallel.
    """
    package = importlib.import_module(module_name)
    _replace(torch.nn.SyncBatchNorm, package.SyncBatchNorm)
    _replace(TorchDistributedDataParallel, package.DistributedDataParallel)
    replacement: type = package.DistributedDataParallel
    return replacement


def _replace(original: type, replacement: type) -> None:
    package = replacement.__module__.split(".")[0]
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.split(".")[0] in (package, "conformance"):
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                setattr(module, attribute, replacement)
