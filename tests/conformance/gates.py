"""Open the gates that the suite closes for a backend's or a GPU's name; leave every other gate as it is.

Has to run before the suite is imported: its decorators are applied then. What stays closed: tests that PyTorch disabled
with a link to an issue (``unittest.skip``), tests that need a larger world or an even one, torchvision, another system.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Test = TypeVar("_Test", bound=Callable[..., Any])

_KEPT_REASONS = ("no torchvision", "Requires file://", "Kineto in fbcode", "MacOS", "mac/windows")


def _keep(test: _Test) -> _Test:
    return test


def _open(*_: Any, **__: Any) -> Callable[[_Test], _Test]:
    return _keep


def open_named_gates() -> None:
    """Replace torch's skipping decorators in this process; call before ``distributed_test`` is imported."""
    from torch.testing._internal import common_distributed, common_utils

    conditional = common_utils.skip_but_pass_in_sandcastle_if

    def skip_unless_named(condition: Any, reason: str) -> Callable[[_Test], _Test]:
        return conditional(condition, reason) if reason.startswith(_KEPT_REASONS) else _keep

    unconditional = common_utils.skip_but_pass_in_sandcastle

    def skip_unless_for_backend(reason: str) -> Callable[[_Test], _Test]:
        return _keep if reason.startswith("Test requires backend") else unconditional(reason)

    for module in (common_utils, common_distributed):
        module.skip_but_pass_in_sandcastle_if = skip_unless_named
        module.skip_but_pass_in_sandcastle = skip_unless_for_backend
    for name in ("skip_if_no_gpu", "skip_if_small_worldsize"):
        setattr(common_distributed, name, _keep)
    for name in (
        "skip_if_lt_x_gpu",
        "nccl_skip_if_lt_x_gpu",
        "require_n_gpus_for_nccl_backend",
        "requires_nccl_version",
    ):
        setattr(common_distributed, name, _open)
    common_distributed.DistTestCases.backend_feature["plugin"] = {"nccl"}
