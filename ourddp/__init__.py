"""A c10d backend and a DistributedDataParallel reducer that make one machine fast.

Importing this package registers the backend: ``torch.distributed.init_process_group("ours")``.
"""

from __future__ import annotations

import torch

try:
    from ourddp import _build_info
except ImportError as error:
    raise ImportError(
        "ourddp has not been built here: run 'make build' in its source folder, or install it with pip."
    ) from error

if torch.__version__.partition("+")[0] != _build_info.TORCH_VERSION:
    raise ImportError(
        f"ourddp was built for torch {_build_info.TORCH_VERSION}, but torch {torch.__version__} is running. "
        "Rebuild it with 'pip install --no-build-isolation .' in its source folder, or install that torch."
    )

from ourddp.distributed import DistributedDataParallel
from ourddp.launch import Launch, init
from ourddp.registration import register
from ourddp.sync_batch_norm import SyncBatchNorm

__version__ = "0.1.0"
__all__ = ["DistributedDataParallel", "Launch", "SyncBatchNorm", "__version__", "init", "register"]

register()
