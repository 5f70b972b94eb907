"""Finds the MPI with which ``setup.py`` builds ``ourddp/_mpi``. It is also used before torch is installed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# The way from ourddp/ in an environment to the folder in which an MPI that came as a wheel has its libraries.
BESIDE_THE_PACKAGE = "$ORIGIN/../../.."


def flag(name: str, default: str, accepted: tuple[str, ...]) -> str:
    """Return the environment variable ``name``, or ``default``. Stop with a message if its value is not accepted."""
    value = os.environ.get(name, default)
    if value not in accepted:
        raise SystemExit(f"{name}={value!r} is not understood; accepted: {', '.join(accepted)}")
    return value


def wish_for(name: str) -> str:
    """Return whether the optional engine ``name`` is wanted: ``auto``, ``0`` or ``1``."""
    return flag(f"OURS_WITH_{name}", "auto", ("auto", "0", "1"))


def first_file(candidates: list[Path]) -> str:
    """Return the first of ``candidates`` that is a file, or an empty string."""
    return next((str(path) for path in candidates if path.is_file()), "")


@dataclass(frozen=True)
class Mpi:
    """An MPI to compile and link with."""

    version: str  # for people, such as "Open MPI 5.0.11"
    wrapper: str
    include_dirs: list[str]
    library_dirs: list[str]
    libraries: list[str]

    def __str__(self) -> str:
        return f"{self.version} ({self.wrapper})"

    def runtime_dirs(self, in_place: bool) -> list[str]:
        """Return the folders in which the library looks for MPI's libraries when it is loaded.

        A build in place is used on this machine. A wheel may go elsewhere, so it names the place of an MPI that is
        installed in the same environment, and a folder of this machine only if MPI is not in an environment.
        """
        here = [folder for folder in self.library_dirs if not is_temporary(folder)]
        own = Path(sys.prefix).resolve()
        if not in_place:
            here = [folder for folder in here if own not in Path(folder).resolve().parents]
        return [*here, BESIDE_THE_PACKAGE]


def is_temporary(folder: str) -> bool:
    """Return whether ``folder`` belongs to the environment that pip makes for a build and removes afterwards."""
    return "pip-build-env-" in folder


def find_wrapper() -> str:
    """Return MPI's compiler, on the path or in an environment, preferably not pip's temporary one; empty if missing."""
    folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders.append(str(Path(sys.prefix) / "bin"))
    return first_file([Path(folder) / "mpicxx" for folder in sorted(folders, key=is_temporary)])


def ask_mpi_wrapper(wrapper: str) -> list[str]:
    """Return the compiler command that ``wrapper`` runs; empty if it does not say."""
    # Open MPI, MPICH and Intel MPI know -show. An Intel MPI that came as a wheel has to be told where it is.
    environment = {"I_MPI_ROOT": str(Path(wrapper).parent.parent), **os.environ}
    try:
        asked = subprocess.run([wrapper, "-show"], env=environment, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return shlex.split(asked.stdout) if asked.returncode == 0 else []


def mpi_version(header: str) -> str:
    """Return the name and version of the MPI with this text of ``mpi.h``."""

    def defined(name: str) -> str:
        found = re.search(rf'^#\s*define\s+{name}\s+"?([\w.]+)', header, re.MULTILINE)
        return found[1] if found else ""

    if defined("OMPI_MAJOR_VERSION"):
        return "Open MPI " + ".".join(defined(f"OMPI_{part}_VERSION") for part in ("MAJOR", "MINOR", "RELEASE"))
    for name, macro in (("Intel MPI", "I_MPI_VERSION"), ("MPICH", "MPICH_VERSION")):
        if defined(macro):
            return f"{name} {defined(macro)}"
    return "unknown"


def find_mpi() -> Mpi | str:
    """Return the MPI to build with, or a phrase that says why there is none."""
    wrapper = find_wrapper()
    if not wrapper:
        return "found no mpicxx (OURS_WITH_MPI=1 pip install '.[mpi]' brings one)"
    words = ask_mpi_wrapper(wrapper)
    include_dirs = [word[2:] for word in words if word.startswith("-I")]
    library_dirs = [word[2:] for word in words if word.startswith("-L")]
    libraries = [word[2:] for word in words if word in ("-lmpi", "-lmpich")]
    header = first_file([Path(folder) / "mpi.h" for folder in [*include_dirs, "/usr/include"]])
    if not libraries or not header:
        why = ": Open MPI's takes the space in its path for the end of a word" if " " in wrapper else ""
        return f"{wrapper} does not say how to compile and link{why}"
    return Mpi(mpi_version(Path(header).read_text()), wrapper, include_dirs, library_dirs, libraries)
