"""A c10d backend and a DistributedDataParallel reducer for fast training on one machine or several.

Importing this package registers the backend: ``torch.distributed.init_process_group("ours")``.
"""

from __future__ import annotations

from ourddp import _elsewhere

__version__ = "0.1.0"
__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "Launch",
    "MisuseError",
    "ModelParallel",
    "Stats",
    "SyncBatchNorm",
    "Trial",
    "__version__",
    "init",
    "register",
    "serve_metrics",
    "stats",
    "sweep",
]

if _elsewhere.is_built(_elsewhere.HERE):
    import torch

    from ourddp import _build_info

    if torch.__version__.partition("+")[0] != _build_info.TORCH_VERSION:
        raise ImportError(
            f"ourddp was built for torch {_build_info.TORCH_VERSION}, but torch {torch.__version__} is running. "
            "Rebuild it with 'pip install --no-build-isolation .' in its source folder, or install that torch."
        )

    from ourddp._C import MisuseError
    from ourddp.data_parallel import DataParallel
    from ourddp.distributed import DistributedDataParallel
    from ourddp.launch import Launch, init
    from ourddp.metrics import serve_metrics
    from ourddp.model_parallel import ModelParallel
    from ourddp.registration import register
    from ourddp.stragglers import Stats, stats
    from ourddp.sweeps import sweep
    from ourddp.sync_batch_norm import SyncBatchNorm
    from ourddp.trials import Trial

    register()
else:
    _elsewhere.load()
