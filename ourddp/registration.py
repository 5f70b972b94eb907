"""Makes ``torch.distributed.init_process_group("ours")`` work.

``import ourddp`` registers the backend. Where torch looks for backends among the installed packages, it finds
:func:`register` by itself, and no import is needed.
"""

from __future__ import annotations

import torch.distributed as dist

from ourddp import _C

BACKEND = "ours"


def register() -> None:
    """Register the backend under the name ``ours`` for CPU tensors. Further calls change nothing."""
    if not dist.is_available():
        raise RuntimeError("This torch was built without torch.distributed, which the backend 'ours' plugs into.")
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _C.create_backend, extended_api=True, devices=["cpu"])
