"""The rules of docs/architecture that can be checked in the source: who includes whom, and the length of files."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
LAYERS = ["common", "kernels", "device", "transport", "collectives", "engines"]
LAYERS += ["backend", "operators", "reducer", "cpp", "python"]
# A library of its own, which no other layer includes.
ASIDE = "cuda"
KNOWN_TO_ASIDE = {"common", "kernels", "device", "transport", "collectives", ASIDE}
WITH_TORCH = ("engines/c10d/", "backend/", "operators/", "reducer/", "cpp/", "python/")
# The reducer and torch.ops.ours run over any process group, so they must not know this backend.
FORBIDDEN_PAIRS = {
    (layer, other) for layer in ("operators", "reducer") for other in ("backend", "collectives", "transport")
}
TORCH = re.compile(r"^(torch|ATen|c10|pybind11|Python\.h)\b")
DEVICE = re.compile(r"^(cuda\w*|nccl)\.h$")
MPI = re.compile(r"^(mpi\.h|engines/mpi/)")
# The folders of the same layer that each sub-folder may include, besides the top of the layer, which all may include.
KNOWN_IN_LAYER = {
    "collectives/device": set(),
    "collectives/hierarchical": {"collectives/messages", "collectives/node", "collectives/tcp"},
    "collectives/messages": set(),
    "collectives/node": {"collectives/messages"},
    "collectives/solo": {"collectives/messages"},
    "collectives/tcp": {"collectives/messages"},
    "transport/node": set(),
    "transport/tcp": set(),
}
FRIEND = re.compile(r"^\s*friend\s+(?:class|struct)\s+(\w+)", re.MULTILINE)
TYPE = re.compile(r"^\s*(?:class|struct)\s+(\w+)[^;(]*\{", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
MAX_LINES = 400


def layer_of(path: str) -> str:
    return path.split("/")[0]


def is_above(other: str, layer: str) -> bool:
    """Return whether files of ``layer`` must not include those of ``other``."""
    if layer == ASIDE:
        return other not in KNOWN_TO_ASIDE
    return other == ASIDE or LAYERS.index(other) > LAYERS.index(layer)


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def strange_friends(path: str, text: str, defined: dict[str, str]) -> list[str]:
    """Return the classes of other folders that a file befriends. ``defined`` says in which file each class is."""
    return [
        f"{path} befriends {name}, which is of {defined[name]}"
        for name in FRIEND.findall(text)
        if name in defined and folder_of(defined[name]) != folder_of(path)
    ]


def violations(path: str, text: str, known: set[str]) -> list[str]:
    """Return what is wrong with the file at ``path`` (relative to csrc). ``known`` are the paths of all files."""
    layer = layer_of(path)
    found = []
    folder = folder_of(path)
    beside = {other for other in KNOWN_IN_LAYER if layer_of(other) == layer and other != folder}
    for other in {folder_of(included) for included in INCLUDE.findall(text) if included in known}:
        if other in beside - KNOWN_IN_LAYER.get(folder, beside):
            found.append(f"{path} includes files of {other}, which its folder must not know")
    for included in INCLUDE.findall(text):
        other = layer_of(included)
        if included in known and is_above(other, layer):
            found.append(f"{path} includes {included}, which is of a higher layer")
        if (layer, other) in FORBIDDEN_PAIRS and included in known:
            found.append(f"{path} includes {included}, which its layer must not know")
        if other in [*LAYERS, ASIDE] and included not in known:
            found.append(f"{path} includes {included}, which does not exist")
        if TORCH.match(included) and not path.startswith(WITH_TORCH):
            found.append(f"{path} includes {included}, but its folder has to build without torch and Python")
        if DEVICE.match(included) and layer != ASIDE:
            found.append(f"{path} includes {included}, which only {ASIDE}/ may")
        # setup.py puts that folder into a library of its own, which is loaded when MPI is wanted.
        if MPI.match(included) and not path.startswith("engines/mpi/"):
            found.append(f"{path} includes {included}, which has to stay in engines/mpi/")
    if re.search(r"\bgetenv\b", text) and path != "common/options.cpp":
        found.append(f"{path} reads the environment, which only common/options.cpp may")
    if path.endswith(".h") and not text.startswith("#pragma once"):
        found.append(f"{path} does not start with #pragma once")
    if text.count("\n") > MAX_LINES:
        found.append(f"{path} has {text.count(chr(10))} lines; {MAX_LINES} are allowed")
    if re.search(r"\b(TODO|FIXME)\b", text):
        found.append(f"{path} has unfinished business")
    return found


def source_files() -> dict[str, str]:
    paths = [path for pattern in ("*.h", "*.cpp", "*.cu", "*.cuh") for path in CSRC.rglob(pattern)]
    return {path.relative_to(CSRC).as_posix(): path.read_text() for path in sorted(paths)}


def test_sources_keep_the_rules():
    files = source_files()
    assert len(files) > 10
    assert {layer_of(path) for path in files} <= {*LAYERS, ASIDE}
    found = [line for path, text in files.items() for line in violations(path, text, set(files))]
    defined = {name: path for path, text in files.items() for name in TYPE.findall(text)}
    found += [line for path, text in files.items() for line in strange_friends(path, text, defined)]
    assert not found, "\n".join(found)


def test_no_two_files_have_the_same_name():
    names = Counter(
        path.name for folder in ("csrc", "tests") for path in (ROOT / folder).rglob("*.*") if is_source(path)
    )
    assert [name for name, count in names.items() if count > 1 and name not in ("__init__.py", "conftest.py")] == []


def is_source(path: Path) -> bool:
    return path.suffix in {".h", ".cpp", ".cu", ".cuh", ".py"} and "build" not in path.parts


def test_cpp_tests_are_in_the_folders_of_what_they_test():
    tests = [path.relative_to(ROOT / "tests" / "cpp") for path in (ROOT / "tests" / "cpp").rglob("*_test.cpp")]
    assert len(tests) > 10
    assert {path.parent.as_posix() for path in tests} - {"cuda/gpu"} <= {folder_of(path) for path in source_files()}


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("common/fd.h", '#pragma once\n#include "kernels/reduce.h"\n', "higher layer"),
        ("kernels/reduce.cpp", "#include <torch/csrc/x.h>\n", "without torch"),
        ("transport/a.cpp", "#include <Python.h>\n", "without torch"),
        ("reducer/a.cpp", '#include "backend/work.h"\n', "must not know"),
        ("backend/a.cpp", "#include <nccl.h>\n", "only cuda/ may"),
        ("backend/a.cpp", "#include <cuda_runtime.h>\n", "only cuda/ may"),
        ("cuda/a.cpp", "#include <torch/csrc/x.h>\n", "without torch"),
        ("cuda/a.cpp", '#include "backend/work.h"\n', "higher layer"),
        ("python/a.cpp", '#include "cuda/cuda_device.h"\n', "higher layer"),
        ("device/a.cpp", '#include "transport/node/channel.h"\n', "higher layer"),
        ("engines/a.cpp", "#include <mpi.h>\n", "stay in engines/mpi"),
        ("kernels/a.cpp", 'auto x = std::getenv("A");\n', "reads the environment"),
        ("kernels/a.h", "#include <vector>\n", "#pragma once"),
        ("kernels/a.cpp", "//\n" * 401, "lines"),
        ("kernels/a.cpp", '#include "kernels/gone.h"\n', "does not exist"),
        ("collectives/node/a.cpp", '#include "collectives/hierarchical/rail.h"\n', "its folder must not know"),
    ],
)
def test_each_rule_finds_its_violation(path, text, complaint):
    known = {"collectives/hierarchical/rail.h", "kernels/reduce.h", "backend/work.h", "cuda/cuda_device.h"}
    known |= {"transport/node/channel.h", path}
    found = violations(path, text, known)
    assert len(found) == 1
    assert complaint in found[0]


def test_a_friend_from_another_folder_is_found():
    befriends = "class A {\n  friend class B;\n};\n"
    assert strange_friends("transport/tcp/a.h", befriends, {"B": "transport/tcp/b.h"}) == []
    found = strange_friends("transport/tcp/a.h", befriends, {"B": "collectives/tcp/b.h"})
    assert found == ["transport/tcp/a.h befriends B, which is of collectives/tcp/b.h"]


# --- Python -----------------------------------------------------------------------------------------------------------

PACKAGE = CSRC.parent / "ourddp"


def imports_of(module: str, text: str, known: set[str]) -> set[str]:
    """Return the ``known`` modules of the package that ``module`` imports, including imports in functions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {re.sub(r"^ourddp(\.|$)", "", alias.name) or "__init__" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = re.sub(r"^ourddp(\.|$)", "", node.module)
            found |= {within, *(f"{within}.{alias.name}".lstrip(".") for alias in node.names)}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{module} has a relative import"
    return found & known


def module_of(path: Path) -> str:
    """Return a module's name within the package, such as "report", or "doctor.facts"."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, or an empty list."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for module in sorted(imports[path[-1]] - done):
            if module in path:
                return [*path[path.index(module) :], module]
            if found := search([*path, module]):
                return found
        done.add(path[-1])
        return []

    return next((found for module in sorted(imports) if (found := search([module]))), [])


def test_no_python_modules_import_each_other():
    texts = {module_of(path): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert len(texts) > 10
    imports = {module: imports_of(module, text, set(texts)) for module, text in texts.items()}
    assert imports["distributed"] >= {"report", "tuning"}
    assert "__init__" in imports["info"]
    assert imports["doctor.checks"] >= {"doctor.words", "doctor.node_checks"}
    assert not circle(imports)


def test_circles_are_found():
    known = {"a", "b", "c"}
    texts = {
        "a": "from ourddp import b\nimport os\n",
        "b": "def f():\n    from ourddp.c import x\n",
        "c": "if TYPE_CHECKING:\n    import ourddp.a\n",
    }
    imports = {module: imports_of(module, text, known) for module, text in texts.items()}
    assert circle(imports) == ["a", "b", "c", "a"]
    assert circle({**imports, "c": set()}) == []
