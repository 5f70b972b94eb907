"""Disturb a job of real ranks at random moments, and print what held.

    python tests/faults/make_faults.py                       # each injection some times in each place: minutes
    python tests/faults/make_faults.py --minutes 60          # random injections for an hour
    python tests/faults/make_faults.py --only SIGKILL --place "one node" --trials 100
    python tests/faults/make_faults.py --only SIGKILL --place "one node" --seed 7 --first 31 --trials 1  # one again

The exit status is 1 if something did not hold.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(_TESTS)
    sys.path.insert(1, str(_TESTS / "support"))

if __name__ == "__main__":
    # For the process whose forks the ranks are.
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], str(_TESTS.parent)])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from faults.program import main

    sys.exit(main())
