"""Says where this process is in its program, for the errors of ranks that wait for it.

A timeout or a mismatch names the ranks to blame. The backend then asks each of those processes, where a thread of its
own calls :func:`describe`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType

import torch

_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(torch.__file__),
        os.path.dirname(__file__),
    }
)


def describe(thread: int) -> str:
    """Return the place in the program at which a thread is, as the end of a sentence.

    The place is a line of the program's own, with the line of a library that it has called, if any; if there is no such
    thread, that of the main thread: ``is at train.py:41 in load (in /usr/lib/python3.12/threading.py:327 in wait)``.
    """
    frames = sys._current_frames()
    innermost = frames.get(thread) or frames[threading.main_thread().ident or 0]
    own: FrameType | None = innermost
    while own is not None and _is_library(own.f_code.co_filename):
        own = own.f_back
    if own is None or own is innermost:
        return f"is at {_place(innermost)}"
    return f"is at {_place(own)} (in {_place(innermost)})"


def _is_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, "<frozen"))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
