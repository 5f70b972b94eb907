"""Lets all ranks of a job stop in the same step after one of them has been asked to: :func:`preempted`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch.distributed as dist

from ourddp import _C
from ourddp.stragglers import backend_of

__all__ = ["preempted", "watch_preemption"]

_watched: set[int] = set()
# The handlers that were there before, by the signals that are watched and have not come yet.
_before: dict[int, Any] = {}


def watch_preemption(signals: Iterable[int] = (signal.SIGTERM,)) -> None:
    """Have these signals ask the job to stop, instead of ending this process. :func:`preempted` tells all ranks of it.

    The first call of :func:`preempted` does this for SIGTERM; call this one before, on all ranks, for other signals
    (Slurm's ``--signal=USR1@60`` sends SIGUSR1), or for a process that may be asked to stop before its first step. The
    second signal of a kind does what it would have done without this: the handler that was there before is back by
    then. Forked children, such as the workers of a DataLoader, keep that handler as well. Raises ValueError for a
    signal that cannot be caught, and RuntimeError outside of the main thread, where Python sets no handlers.
    """
    for number in signals:
        if number in _watched:
            continue
        # Known before the signal can come. None stands for a handler that Python did not set, and could not set again.
        _before[number] = signal.getsignal(number) or signal.SIG_DFL
        try:
            signal.signal(number, _ask)
        except ValueError as error:  # not for a number that is no signal: getsignal() has refused that
            del _before[number]
            raise RuntimeError("call ourddp.watch_preemption() on the main thread, before the training") from error
        except OSError as error:
            del _before[number]
            raise ValueError(f"{signal.Signals(number).name} cannot be caught; choose SIGTERM or SIGUSR1") from error
        _watched.add(number)


def preempted(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether any rank of ``group`` has been asked to stop, by SIGTERM: the same on all ranks in the same step.

    Call it once in a step, on all ranks at the same place, and save a checkpoint and end if it is true::

        loss.backward()
        optimizer.step()
        if ourddp.preempted():
            save_checkpoint()
            break

    It costs no communication: the all-reduces and barriers that the program calls anyway carry the news, those of
    ``DistributedDataParallel`` included. The answer depends on those before this call alone, which are the same on all
    ranks. It waits for those that are under way, and stays true once it has been. A program that calls none, as with
    ``no_sync()``, hears nothing until it does. ``group`` is a group of the backend ``ours``, by default the one of all
    ranks; each group only has its own calls. Without a process group, this process alone counts. Collectives that NCCL
    runs carry nothing: with CUDA tensors that it reduces, call ``dist.barrier()`` now and then.

    The first call has SIGTERM watched (see :func:`watch_preemption`). Raises ValueError if another backend serves the
    group's CPU tensors, and RuntimeError if the first call is made outside of the main thread.
    """
    backend = backend_of(group or dist.distributed_c10d._get_default_group()) if dist.is_initialized() else None
    if dist.is_initialized() and backend is None:
        raise ValueError(
            "preempted() needs the backend 'ours' for the group's CPU tensors, because its collectives carry the news; "
            "make one with dist.new_group(backend='ours'), call dist.barrier(group) in each step, and pass it here"
        )
    if not _watched:
        watch_preemption()
    return _C.stop_requested() if backend is None else backend.heard_stop()


def _ask(number: int, _frame: FrameType | None) -> None:
    _C.request_stop()
    # Another signal of the kind may interrupt this function, and does the rest then: both count as the first.
    handler = _before.pop(number, None)
    if handler is not None:
        signal.signal(number, handler)


def _forget() -> None:
    """Go back to the state at the import: the handlers from before, and nobody was asked to stop."""
    while _before:
        signal.signal(*_before.popitem())
    _watched.clear()
    _C.forget_stop_request()


os.register_at_fork(after_in_child=_forget)
