"""An optimizer that steps along gradients of all ranks, by Horovod's name, over this package's reducer."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ourddp import _C
from ourddp.compression import Average, Compression, Reduction, Sum

__all__ = ["DistributedOptimizer"]

_MIB = 1024 * 1024


class DistributedOptimizer(torch.optim.Optimizer):
    """``optimizer``, with gradients that are averaged over all ranks while backward runs.

    The result is an instance of the class of ``optimizer``, and shares its parameters and its state. Parameters that
    require gradients when it is made are reduced in buckets of ``bucket_cap_mb`` MiB by the reducer of
    :class:`ourddp.DistributedDataParallel`, so that gradients have the same bits as with that class; the model itself
    is not wrapped. The ranks' parameters have to be equal at first: see :func:`ourddp.broadcast_parameters`.

    - ``named_parameters`` gives the parameters names for error messages, as ``model.named_parameters()`` does.
    - ``compression`` is the precision in which gradients travel.
    - ``backward_passes_per_step`` backward passes add up gradients before these are reduced. To get an average over
      them, divide the loss.
    - ``op`` is :data:`ourddp.Average` or :data:`ourddp.Sum`.
    - ``process_group`` has the ranks that take part; by default all.

    Gradients are averages when the last backward of a step returns, if each parameter has got one in each of its
    passes. Otherwise :meth:`synchronize`, which :meth:`step` calls, reduces the rest: a parameter without a gradient
    counts as having zeros, so that ranks may use different parameters. Such ranks must not call other collectives
    between backward and ``synchronize()``.

    Raises:
        ValueError: If an argument does not fit; names are missing, or not unique; or a parameter is on another device.
        RuntimeError: If the ranks' parameters differ; the message names the first one, both shapes and the ranks. In
            backward, if a parameter gets more gradients than ``backward_passes_per_step`` before a step.

    """

    def __new__(cls, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> DistributedOptimizer:
        """Make the object, of a class between this one and that of ``optimizer``."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("the optimizer is a DistributedOptimizer already; wrap it once")
        kind = type(optimizer)
        return object.__new__(type(kind.__name__, (DistributedOptimizer, kind), {"__doc__": cls.__doc__}))

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        compression: Compression = Compression.none,
        backward_passes_per_step: int = 1,
        op: dist.ReduceOp.RedOpType = Average,
        *,
        bucket_cap_mb: float = 25,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        # What torch's constructor made is shared. A learning-rate schedule may have put its own step() into the object.
        self.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
        if not isinstance(compression, Compression):
            raise ValueError(f"compression must be Compression.none, .fp16 or .bf16; got {compression!r}")
        if op not in (Average, Sum):
            raise ValueError(f"op must be ourddp.Average or ourddp.Sum; got {op!r}")
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb must be positive; got {bucket_cap_mb!r}")
        group = process_group or dist.group.WORLD
        if group is None:
            raise RuntimeError("there is no process group: call ourddp.init() first")
        named = _named(self, named_parameters)
        trained = {parameter: name for parameter, name in named.items() if parameter.requires_grad}
        self._reducer = _make_reducer(trained, group, round(bucket_cap_mb * _MIB))
        if op == Sum or compression is not Compression.none:
            self._reducer._register_comm_hook(None, Reduction(group, compression, average=op == Average))
        self.set_backward_passes_per_step(backward_passes_per_step)
        self._is_synchronized = False
        self._may_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Have this many backward passes make a step. Raises RuntimeError between backward and ``step()``."""
        if not isinstance(passes, int) or passes < 1:
            raise ValueError(f"backward_passes_per_step must be an int of at least 1; got {passes!r}")
        self._reducer._set_passes(passes)
        self.backward_passes_per_step = passes
        self._reducer.prepare_for_backward([])

    def synchronize(self) -> None:
        """Reduce what backward has not reduced yet; afterwards each gradient is that of all ranks.

        ``step()`` does so by itself. Call it before gradients are clipped, or before a GradScaler unscales them::

            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()

        All ranks have to call it. A rank that has run no backward takes part with the gradients that it has.
        """
        self._reducer._reduce_missing()
        self._reducer._rebuild_buckets()
        self._reducer.prepare_for_backward([])
        self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have ``step()`` take the gradients as they are, after :meth:`synchronize`."""
        self._may_synchronize = False
        try:
            yield
        finally:
            self._may_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what has not been reduced, and let the optimizer make its step.

        Gradients that :meth:`synchronize` has reduced are not reduced again. Those of ``closure`` are reduced each time
        that the optimizer calls it. An optimizer that looks at the loss, as LBFGS does, needs the same one on all
        ranks.

        Raises RuntimeError in :meth:`skip_synchronize` if there are gradients that have not been synchronized.
        """
        if closure is not None:
            closure = functools.partial(self._synchronized_result, closure)
        elif self._may_synchronize:
            self._synchronize_rest()
        elif not self._is_complete():
            raise RuntimeError(
                "step() was called in skip_synchronize(), but there are gradients of this rank alone: call "
                "synchronize() after backward() and before skip_synchronize()"
            )
        result = super().step(closure)
        self._is_synchronized = False
        return result

    # torch wraps the step() of an optimizer's class to call hooks, and has done so with the one that is called here.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients; RuntimeError between ``backward()`` and ``step()`` or ``synchronize()``."""
        if self._reducer._has_gradients():
            raise RuntimeError(
                "zero_grad() was called after backward(), and before step() or synchronize(), which would lose "
                "gradients. Call it before backward(). Call synchronize() after backward() if a step may be left out, "
                "as GradScaler.step() may"
            )
        self._is_synchronized = False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise RuntimeError: the reducer knows the parameters that there were when it was made."""
        raise RuntimeError(
            "parameters cannot be added to a DistributedOptimizer: add the group to the optimizer that it was made of, "
            "and make a new DistributedOptimizer"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer belongs to its process group and can be neither copied nor pickled: save its "
            "state_dict(), and load that into another one"
        )

    def _is_complete(self) -> bool:
        """Return whether synchronize() has reduced the gradients of this step, and none have come since."""
        return self._is_synchronized and not self._reducer._has_gradients()

    def _synchronize_rest(self) -> None:
        if not self._is_complete():
            self.synchronize()

    def _synchronized_result(self, closure: Callable[[], Any]) -> Any:
        self._is_synchronized = False
        loss = closure()
        self._synchronize_rest()
        return loss


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return the optimizer's parameters, in its order, with their names."""
    owned = {
        parameter: f"parameter {index} of group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    }
    if named_parameters is None:
        return owned
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError("named_parameters must be pairs of a name and a parameter, as model.named_parameters() gives")
    twice = [name for name, count in collections.Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"names in named_parameters must be unique; found several of {', '.join(twice)}")
    names = {parameter: name for name, parameter in named}
    unnamed = [
        f"{name} (shape {tuple(parameter.shape)})" for parameter, name in owned.items() if parameter not in names
    ]
    if unnamed:
        raise ValueError(
            f"named_parameters leaves out parameters of the optimizer: {', '.join(unnamed)}; name all or none"
        )
    return {parameter: names[parameter] for parameter in owned}


def _make_reducer(trained: dict[torch.Tensor, str], group: dist.ProcessGroup, cap: int) -> _C.Reducer:
    parameters, names = list(trained), list(trained.values())
    if not parameters:
        raise ValueError("none of the optimizer's parameters requires a gradient")
    if len({parameter.device for parameter in parameters}) > 1:
        where = ", ".join(f"{name} on {parameter.device}" for parameter, name in trained.items())
        raise ValueError(f"all parameters of a DistributedOptimizer must be on one device; got {where}")
    _C.check_same_model(group, parameters, names)
    options = _C.ReducerOptions()
    options.parameter_names = names
    options.bucket_bytes_cap = cap
    options.first_bucket_bytes_cap = min(options.first_bucket_bytes_cap, cap)
    # One bucket at first, since the order in which gradients arrive is not known before the first backward.
    dense = [False] * len(parameters)
    options.bucket_indices = _C.assign_parameters(parameters, [sys.maxsize], dense)[::-1]
    return _C.Reducer(parameters, group, options)
