"""What ``setup.py`` builds with ninja: files, the commands that make them, and the files that these need."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CXX = [*shlex.split(os.environ.get("CXX", "c++")), *shlex.split(os.environ.get("CPPFLAGS", ""))]
CXXFLAGS = shlex.split(os.environ.get("CXXFLAGS", ""))
LDFLAGS = shlex.split(os.environ.get("LDFLAGS", ""))


class BuildError(Exception):
    """A command of the build failed. Its output has been printed."""


def sources(*patterns: str) -> list[Path]:
    """Return the files under ``csrc`` that match any of the patterns, sorted."""
    return sorted({path for pattern in patterns for path in (ROOT / "csrc").glob(pattern)})


def _ninja() -> str:
    beside = Path(sys.executable).with_name("ninja")
    found = shutil.which("ninja") or (str(beside) if beside.is_file() else "")
    if not found:
        raise SystemExit("ourddp is compiled by ninja, which is not here. Install it: pip install ninja")
    return found


def _escaped(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


class Build:
    """Files to make in ``folder``. ninja runs a command again if the command or a file that it reads has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._text = "rule run\n  command = $command\n  description = $says\n"
        self._text += "rule compile\n  command = $command\n  description = $says\n  depfile = $out.d\n  deps = gcc\n"

    def add(self, made: Path, command: Sequence[str], needs: Sequence[Path], reads_headers: bool = False) -> Path:
        """Add a file that ``command`` makes from the files in ``needs``. Return it."""
        # The compiler writes the headers that it has read into a file beside its output.
        more = ["-MF", f"{made}.d"] if reads_headers else []
        shown = needs[0].relative_to(ROOT) if reads_headers and needs[0].is_relative_to(ROOT) else made.name
        rule = "compile" if reads_headers else "run"
        self._text += f"build {_escaped(made)}: {rule} {' '.join(map(_escaped, needs))}\n"
        self._text += f"  command = {shlex.join([*command, *more]).replace('$', '$$')}\n  says = {shown}\n"
        return made

    def compile(self, files: Sequence[Path], command: Sequence[str], needs: Sequence[Path] = ()) -> list[Path]:
        """Add the objects of ``files``. ``command`` lacks only the names. Return the objects."""
        made = []
        for path in files:
            name = self._folder / path.relative_to(ROOT).with_suffix(f"{path.suffix}.o")
            whole = [*command, "-MMD", "-c", str(path), "-o", str(name)]
            made.append(self.add(name, whole, [path, *needs], reads_headers=True))
        return made

    def archive(self, made: Path, objects: Sequence[Path]) -> Path:
        """Add a static library of ``objects``. Return it."""
        # An existing library is removed, since it would keep the objects of files that are gone.
        quoted = shlex.join(["ar", "rcs", str(made), *map(str, objects)])
        return self.add(made, ["sh", "-c", f"rm -f {shlex.quote(str(made))} && {quoted}"], objects)

    def make(self, made: Path) -> None:
        """Make one file, and everything that it needs. Raises BuildError, and then leaves no such file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        made.parent.mkdir(parents=True, exist_ok=True)
        script = self._folder / f"{made.name}.ninja"
        script.write_text(f"builddir = {_escaped(self._folder)}\n{self._text}")
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        command = [_ninja(), "-f", str(script), "-j", jobs, str(made)]
        if subprocess.run(command).returncode != 0:
            made.unlink(missing_ok=True)
            raise BuildError(f"a command that makes {made.name} failed; its output is above")
