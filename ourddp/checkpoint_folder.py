"""The folder of a Checkpointer: which checkpoints are in it, and changes to it that are whole or not made at all.

Only rank 0 changes it. A checkpoint is a folder ``step-N``; a name that begins with a dot is that of one that is not
whole yet, or no longer.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path

__all__ = ["CheckpointFolder"]

FACTS = "checkpoint.json"
NAME = re.compile(r"step-(\d+)|\.step-(\d+)\.replaced")


class CheckpointFolder:
    """Finds, adds and removes checkpoints; OSError if the file system refuses."""

    def __init__(self, path: Path, sign: int) -> None:
        """``sign`` is 1 if a larger metric is better, and otherwise -1."""
        self.path = path
        self._sign = sign
        self._is_tidy = False

    def make(self) -> None:
        """Make the folder. What is in it may be another process's, which is writing it."""
        self.path.mkdir(parents=True, exist_ok=True)

    def _tidy(self) -> None:
        """End what a process that died has left half done."""
        for left in self.path.glob(".step-*"):
            step, _, kind = left.name[1:].partition(".")
            if kind == "replaced" and not (self.path / step).exists():
                left.rename(self.path / step)
            else:
                shutil.rmtree(left)

    def steps(self) -> dict[int, float | None]:
        """Return the steps of all checkpoints, ascending, with their metrics."""
        found = {}
        replaced = self.path.glob(f".step-*.replaced/{FACTS}")
        for file in (*replaced, *self.path.glob(f"step-*/{FACTS}")):
            name = NAME.fullmatch(file.parent.name)
            if name is None:
                continue
            step = int(name[1] or name[2])
            try:
                found[step] = json.loads((self.source(step) / FACTS).read_text())["metric"]
            except FileNotFoundError:
                continue  # the job that saves has just removed it
        return dict(sorted(found.items()))

    def of(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self.path / f"step-{step}"

    def source(self, step: int) -> Path:
        """Return the path to load it from: a process that died may have moved it aside, but not yet replaced it."""
        final, replaced = self.of(step), self._aside(step, "replaced")
        return replaced if replaced.exists() and not final.exists() else final

    def best(self) -> int | None:
        """Return the step with the best metric, the last one of several; None if no checkpoint has a metric."""
        merits = self._merits()
        return max(merits, key=lambda step: (merits[step], step), default=None)

    def would_be_best(self, metric: float) -> bool:
        """Return whether the metric is better than those of all checkpoints. NaN never is."""
        return not math.isnan(metric) and all(self._sign * metric > other for other in self._merits().values())

    def temporary(self, step: int) -> Path:
        """Return the path of the folder that the checkpoint is written into."""
        return self._aside(step, "temporary")

    def begin(self, step: int) -> None:
        """Make that folder, empty. The first time, end what a process that died has left."""
        if not self._is_tidy:
            self._tidy()
            self._is_tidy = True
        self.discard(step)
        self.temporary(step).mkdir()

    def discard(self, step: int) -> None:
        """Remove what was written since begin(), as far as possible."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def commit(self, step: int, metric: float | None) -> None:
        """Let the checkpoint appear under its name."""
        temporary, final, replaced = self.temporary(step), self.of(step), self._aside(step, "replaced")
        with (temporary / FACTS).open("w") as file:
            json.dump({"step": step, "metric": metric}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(temporary)
        if final.exists():
            final.rename(replaced)
        try:
            temporary.rename(final)
        except OSError:
            if replaced.exists():
                replaced.rename(final)
            raise
        _sync(self.path)
        shutil.rmtree(replaced, ignore_errors=True)

    def prune(self, keep: int, saved: int) -> None:
        """Remove all checkpoints but the last ``keep`` ones, the best one, and the one just saved."""
        spared = {self.best(), saved}
        for old in list(self.steps())[:-keep]:
            if old not in spared:
                self._remove(old)

    def _merits(self) -> dict[int, float]:
        """Return the steps that have a metric, ascending, each with a number that is larger for a better one."""
        rated = {step: metric for step, metric in self.steps().items() if metric is not None}
        return {step: self._sign * metric for step, metric in rated.items() if not math.isnan(metric)}

    def _remove(self, step: int) -> None:
        removed = self._aside(step, "removed")
        self.of(step).rename(removed)
        shutil.rmtree(removed)

    def _aside(self, step: int, kind: str) -> Path:
        return self.path / f".step-{step}.{kind}"


def _sync(folder: Path) -> None:
    """Have the names in a folder written to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
