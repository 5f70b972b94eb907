"""Prints the program, so that a user has a file to start with and to change."""

from __future__ import annotations

from pathlib import Path

print(Path(__file__).with_name("train.py").read_text(), end="")
