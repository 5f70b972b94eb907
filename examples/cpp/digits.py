"""Writes the images of examples/train.py as text: 64 pixels from 0 to 16 and the digit on each line.

Start it as ``python examples/cpp/digits.py digits.csv``.
"""

from __future__ import annotations

import sys

import numpy
from sklearn.datasets import load_digits


def main() -> None:
    """Write the file that the command line names."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python digits.py FILE")
    digits = load_digits()
    numpy.savetxt(sys.argv[1], numpy.column_stack([digits.data, digits.target]), fmt="%d", delimiter=",")


if __name__ == "__main__":
    main()
