"""Finds the installed package when the source folder that Python found has not been built and cannot be used."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent


def is_built(package: Path) -> bool:
    """Return whether a package's folder has the record of a build, which is the last file that a build writes."""
    return (package / "_build_info.py").is_file()


def load() -> None:
    """Import the package that is installed elsewhere as ``ourddp``, in the place of the one that is being imported.

    Python looks in the folder of a script, or in the current one, before it looks at what is installed. Raises
    ImportError, which says what to do, if none is installed.
    """
    spec = _find()
    if spec is None or spec.loader is None:
        raise ImportError(
            f"ourddp has not been built in {HERE.parent}, and is not installed elsewhere: "
            "run 'make build' or 'pip install .' in that folder."
        )
    module = module_from_spec(spec)
    sys.modules["ourddp"] = module
    del sys.modules[__name__]  # the other package has its own
    spec.loader.exec_module(module)


def _find() -> ModuleSpec | None:
    found = [PathFinder.find_spec("ourddp", [folder]) for folder in sys.path]
    # Editable installs have finders of their own.
    found += [finder.find_spec("ourddp", None) for finder in sys.meta_path if finder is not PathFinder]
    for spec in found:
        folder = Path(spec.origin).resolve().parent if spec is not None and spec.origin else HERE
        if folder != HERE and is_built(folder):
            return spec
    return None
