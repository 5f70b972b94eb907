"""Runs the example programs inside ranks that have loaded torch already."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import RankPool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT = 120  # seconds

Run = Callable[..., str]


def run_main(rank: int, world: int, port: int, name: str, flags: tuple[str, ...]) -> str:
    """Run an example like `python name flags`, and return what it prints."""
    os.environ["MASTER_PORT"] = str(port)  # of this run's own store
    sys.argv = [name, *flags]
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return output.getvalue()


def runner(rank_pool: Callable[..., RankPool]) -> Run:
    """Return a function: `run(name, ranks, *flags)` returns what rank 0 prints."""

    def run(name: str, ranks: int, *flags: str) -> str:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        outputs = rank_pool(ranks, None).run(run_main, store.port, name, flags, timeout=TIMEOUT)
        assert outputs[1:] == [""] * (ranks - 1)  # only rank 0 prints
        return outputs[0]

    return run


def import_example(name: str) -> Any:
    with pytest.MonkeyPatch.context() as context:
        context.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)
