"""Keeps PyTorch's compiler out of the traces that are written when a group fails.

To name the lines of generated code in a trace, PyTorch looks at ``torch._inductor``, and by that alone imports it: nine
hundred modules, for which all threads wait in turn just when the ranks that are left want to go on. Where the compiler
has not been loaded, there is no generated code.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

NAME = "_inductor"


class NotLoaded:
    """Stands in for the compiler's module, of which it has all but what a trace asks for."""

    def __getattr__(self, name: str) -> Any:
        if name == "codecache" and "torch._inductor.codecache" not in sys.modules:
            raise AttributeError(name)
        return getattr(importlib.import_module("torch._inductor"), name)


STAND_IN = NotLoaded()


def keep_compiler_out() -> None:
    """Let PyTorch find the stand-in, unless the compiler is there. An import of the compiler replaces it."""
    if "torch._inductor" not in sys.modules:
        vars(torch).setdefault(NAME, STAND_IN)


def let_compiler_in() -> None:
    """Remove the stand-in."""
    if vars(torch).get(NAME) is STAND_IN:
        delattr(torch, NAME)
