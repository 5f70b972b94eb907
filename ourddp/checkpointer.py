"""Checkpoints of a training in a folder, by torch.distributed.checkpoint: the last ones, and the best one."""

from __future__ import annotations

import operator
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ourddp.checkpoint_folder import CheckpointFolder
from ourddp.objects import allgather_object, broadcast_object, raise_on_all

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves checkpoints into ``folder`` and loads them; all ranks of ``process_group`` call each method.

    Models may be plain ones, a DistributedDataParallel, or sharded by ``fully_shard``; a checkpoint can be loaded into
    any of these, and by another number of ranks. The ranks write it together, so they have to share the file system.
    A checkpoint is a folder ``step-N`` in the format of torch.distributed.checkpoint. It appears under this name when
    it is whole and on the disk: whatever dies meanwhile, the ones before it stay. Rank 0 decides what is saved, loaded
    and removed. Only one job at a time may save into a folder; others can load from it meanwhile.

    - ``keep`` is the number of the last checkpoints that stay; None: all. The best one stays as well, and
      the one just saved.
    - With ``save_best_only`` only a checkpoint whose metric is better than those of all others is saved.
    - ``mode`` says which metric is better: "min" or "max".

    Raises:
        ValueError: If an argument does not fit.
        RuntimeError: On all ranks, if the folder cannot be made on rank 0; or before ``ourddp.init()``.

    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = None,
        save_best_only: bool = False,
        mode: str = "min",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, or None to keep all; got {keep}")
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max'; got {mode!r}")
        if not dist.is_initialized():
            raise RuntimeError("a Checkpointer needs a process group: call ourddp.init() first")
        self._keep = keep
        self._best_only = save_best_only
        self._group = process_group
        self._folder = CheckpointFolder(Path(folder), 1 if mode == "max" else -1)
        self._on_rank_0(f"the folder {folder} cannot be used", self._folder.make)

    def steps(self) -> dict[int, float | None]:
        """Return the steps of the checkpoints in the folder, ascending, with their metrics. Not collective."""
        return self._folder.steps()

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        metric: float | None = None,
        **others: Any,
    ) -> Path | None:
        """Save the state after ``step``, and return the checkpoint's folder; None if it would not be the best.

        ``metric`` decides which checkpoint is the best; that of rank 0 counts. ``others`` are objects with
        ``state_dict()`` and ``load_state_dict()``, such as a learning-rate schedule, with equal states on all ranks. If
        one has a true attribute ``differs_by_rank``, as a ``RandomState`` has, the state of each rank is saved; with
        ``rank_0_knows``, as a ``ResumableSampler`` has, that of rank 0. A checkpoint of the same step is replaced.

        Raises RuntimeError, on all ranks, if anything fails on one of them, or they pass different steps; the message
        gives the ranks, and checkpoints from before stay. If only the removal of older ones fails, it says so.
        """
        import torch.distributed.checkpoint as dcp  # takes longer to load than the rest of the package

        step = operator.index(step)
        plans = allgather_object((step, self._plan(step, metric)), process_group=self._group)
        if len({other for other, _ in plans}) > 1:
            steps = ", ".join(f"rank {rank} passes {other}" for rank, (other, _) in enumerate(plans))
            raise RuntimeError(f"the ranks save different steps: {steps}; save() is for all ranks at once")
        what = f"the checkpoint of step {step} was not saved"
        wanted, error = plans[0][1]
        if error is not None:
            raise RuntimeError(f"{what}: rank 0: {error}")
        if not wanted:
            return None
        temporary = self._folder.temporary(step)
        try:
            self._on_rank_0(what, lambda: self._folder.begin(step))
            state = self._together(what, lambda: _state(model, optimizer, others))
            state |= self._of_rank_0(what, {name: state[name] for name in _with(others, "rank_0_knows")})
            state |= self._of_each_rank(what, {name: state[name] for name in _differing(others)})
            self._by_dcp(what, lambda: dcp.save(state, checkpoint_id=temporary, process_group=self._group))
            self._on_rank_0(what, lambda: self._folder.commit(step, _as_number(metric)))
        except RuntimeError:
            if dist.get_rank(self._group) == 0:
                self._folder.discard(step)
            raise
        if self._keep is not None:
            keep = self._keep
            what = f"the checkpoint of step {step} was saved, but not all older ones could be removed"
            self._on_rank_0(what, lambda: self._folder.prune(keep, step))
        return self._folder.of(step)

    def load(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        which: str | int = "latest",
        **others: Any,
    ) -> int | None:
        """Load the "latest" checkpoint, the "best" one, or that of a step; return its step, or None if there is none.

        ``others`` are what :meth:`save` got under the same names; fewer will do. A rank that the checkpoint does not
        know leaves those that differ by rank as they are.

        Raises RuntimeError, on all ranks, if anything fails on one of them, if the checkpoint lacks something, or if
        there is none of the step that ``which`` names.
        """
        import torch.distributed.checkpoint as dcp

        found: Any = None
        if dist.get_rank(self._group) == 0:
            found = self._find(which)
        step, error = broadcast_object(found, process_group=self._group)
        if error is not None:
            raise RuntimeError(f"no checkpoint was loaded from {self._folder.path}: {error}")
        if step is None:
            return None
        what = f"the checkpoint of step {step} was not loaded from {self._folder.path}"
        path = self._folder.source(step)
        state = self._together(what, lambda: _state(model, optimizer, others)) | dict.fromkeys(_differing(others), b"")
        self._by_dcp(what, lambda: dcp.load(state, checkpoint_id=path, process_group=self._group))
        rank = dist.get_rank(self._group)
        self._together(what, lambda: _set_state(model, optimizer, others, state, rank))
        return step

    def _plan(self, step: int, metric: float | None) -> tuple[bool, str | None]:
        """Return whether to save the checkpoint, and an error; only those of rank 0 count. Writes nothing."""
        if dist.get_rank(self._group) != 0:
            return False, None
        if step < 0:
            return False, f"steps are numbers from 0; got {step}"
        if not self._best_only:
            return True, None
        if metric is None:
            return False, "with save_best_only a checkpoint needs a metric: pass metric="
        try:
            return self._folder.would_be_best(float(metric)), None
        except Exception as error:  # the others wait to hear of any
            return False, f"{type(error).__name__}: {error}"

    def _find(self, which: str | int) -> tuple[int | None, str | None]:
        """Return the step to load, or None if there is no checkpoint, and an error."""
        try:
            steps = list(self._folder.steps())
            if which == "latest":
                return (steps[-1] if steps else None), None
            if which == "best":
                best = self._folder.best()
                return best, "none has a metric; load the latest" if steps and best is None else None
        except Exception as error:  # the others wait to hear of any
            return None, f"{type(error).__name__}: {error}"
        if which in steps:
            return int(which), None
        has = f"it has {', '.join(map(str, steps))}" if steps else "it is empty"
        return None, f"there is none of step {which!r}; {has}. which is 'latest', 'best' or a step"

    def _of_rank_0(self, what: str, own: dict[str, Any]) -> dict[str, Any]:
        """Return the states that rank 0 has by name."""
        try:
            return broadcast_object(own, process_group=self._group) if own else {}
        except ValueError as error:
            raise RuntimeError(f"{what}: {error}") from error

    def _of_each_rank(self, what: str, own: dict[str, Any]) -> dict[str, bytes]:
        """Return the states of all ranks by name: one value each, which another number of ranks can load as well."""
        try:
            of_all = allgather_object(own, process_group=self._group)
        except ValueError as error:
            raise RuntimeError(f"{what}: {error}") from error
        return {name: pickle.dumps([each[name] for each in of_all]) for name in own}

    def _on_rank_0(self, what: str, action: Callable[[], None]) -> None:
        self._together(what, action if dist.get_rank(self._group) == 0 else lambda: None)

    def _together(self, what: str, action: Callable[[], Any]) -> Any:
        """Run ``action`` and return its result. Raise RuntimeError on all ranks if it fails on any."""
        result, failure = None, None
        try:
            result = action()
        except Exception as error:  # the others wait to hear of any
            failure = error
        raise_on_all(what, failure, self._group)
        return result

    def _by_dcp(self, what: str, action: Callable[[], Any]) -> None:
        """Run a function of torch.distributed.checkpoint, which raises the errors of all ranks on all of them."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            action()
        except CheckpointException as error:
            causes = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items())]
            raise RuntimeError(f"{what}: {'; '.join(causes)}") from error


def _as_number(metric: float | None) -> float | None:
    return None if metric is None else float(metric)


def _differing(others: dict[str, Any]) -> list[str]:
    return _with(others, "differs_by_rank")


def _with(others: dict[str, Any], attribute: str) -> list[str]:
    return [name for name, other in others.items() if getattr(other, attribute, False)]


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
    from torch.distributed.checkpoint.stateful import Stateful

    for name, other in others.items():
        if name in ("model", "optimizer") or not isinstance(other, Stateful):
            raise TypeError(
                f"{name} is of type {type(other).__name__}; what goes into a checkpoint must have state_dict() and "
                "load_state_dict(), and another name than model and optimizer"
            )
    # torch.distributed.checkpoint would ask them as well, but not tell the other ranks if one fails.
    states = {name: other.state_dict() for name, other in others.items()}
    if optimizer is None:
        return {"model": get_model_state_dict(model), **states}
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, **states}


def _set_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    others: dict[str, Any],
    state: dict[str, Any],
    rank: int,
) -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_state_dict

    if optimizer is None:
        set_model_state_dict(model, state["model"])
    else:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name in _differing(others):
        of_ranks = pickle.loads(state.pop(name))
        if rank < len(of_ranks):
            state[name] = of_ranks[rank]
    for name, other in others.items():
        if name in state:
            other.load_state_dict(state[name])
