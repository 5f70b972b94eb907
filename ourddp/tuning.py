"""``bucket_cap_mb="auto"``, the Python part; ``csrc/reducer/bucket_tuning.h`` tells how the size is chosen."""

from __future__ import annotations

import logging
import weakref
from collections.abc import MutableMapping
from typing import Any

from ourddp import _C
from ourddp.report import Tuning

_logger = logging.getLogger("ourddp")


def take_auto(arguments: MutableMapping[str, Any]) -> bool:
    """Return whether ``arguments`` ask for ``bucket_cap_mb="auto"``, and replace that by the default.

    Raises:
        ValueError: If ``bucket_cap_mb`` is another text than "auto", or is "auto" beside a ``bucket_cap_mb_list``.

    """
    cap = arguments.get("bucket_cap_mb")
    if not isinstance(cap, str):
        return False
    if cap != "auto":
        raise ValueError(f'bucket_cap_mb is a number of MiB or "auto", not {cap!r}.')
    if arguments.get("bucket_cap_mb_list"):
        raise ValueError('bucket_cap_mb="auto" chooses the size of all buckets: leave bucket_cap_mb_list out.')
    arguments["bucket_cap_mb"] = None
    return True


def watch(model: Any) -> None:
    """Set and log (on rank 0) the bucket size of ``model``, a DistributedDataParallel, when its reducer chooses one."""
    if _settle(model):
        return
    reference = weakref.ref(model)

    def rebuild_buckets() -> bool:
        model = reference()
        assert model is not None, "the reducer's buckets are rebuilt by the model's forward"
        rebuilt = _C.Reducer._rebuild_buckets(model.reducer)
        if rebuilt and _settle(model):
            del model.reducer._rebuild_buckets  # the class's own again
        return rebuilt

    model.reducer._rebuild_buckets = rebuild_buckets


def _settle(model: Any) -> bool:
    tuning = model.reducer._get_bucket_tuning()
    if tuning.cap == 0:
        return False
    model.bucket_bytes_cap = tuning.cap
    if model.process_group.rank() == 0:
        _logger.info("%s", Tuning.of(tuning))
    return True
