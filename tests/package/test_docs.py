"""The documents: the files that they name exist, they are short enough, and generated ones are up to date."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import ourddp
from ourddp import info

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOK = ROOT / "examples" / "learn.ipynb"
MOST_LINES = {"README.md": 200}
MOST_LINES_OF_A_PAGE = 200  # in docs/architecture
# What a build makes.
GENERATED = {"ourddp/_build_info.py", "dist/"}

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# A path of a file in a folder, wherever it stands, but not a part of a longer one.
FILE = re.compile(r"(?<![\w./<>*:-])((?:[\w.-]+/)+[\w.-]+\.(?:cpp|h|cuh?|pyi?|md|json|png|sh|toml))(?![\w*<])")
# A folder in backquotes.
FOLDER = re.compile(r"`((?:[\w.-]+/)+)`|`((?:csrc|tests|docs|benchmarks|examples|ourddp)(?:/\w+)+)`")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, in the form that GitHub gives them."""
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text)]
    return {heading.strip().replace(" ", "-") for heading in plain}


def missing(text: str, folder: Path) -> list[str]:
    """Return what a document in ``folder`` names but does not exist. Paths in prose may leave out ``csrc/``."""
    found = []
    for target in LINK.findall(text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        page = (folder / name).resolve() if name else None
        if page is not None and not page.exists():
            found.append(target)
        elif anchor and anchor not in anchors(page.read_text() if page else text):
            found.append(f"{target}: there is no such heading")
    prose = re.sub(r"\]\([^)\s]+\)|https?://\S+", "", text)
    named = set(FILE.findall(prose)) | {a or b for a, b in FOLDER.findall(prose)}
    found += [
        name for name in sorted(named - GENERATED) if not any((top / name).exists() for top in (ROOT, ROOT / "csrc"))
    ]
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_files_that_a_document_names_exist(document: Path) -> None:
    assert missing(document.read_text(), document.parent) == []


def test_the_files_that_the_notebook_names_exist() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert missing(text, NOTEBOOK.parent) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](docs/gone.md)", ["docs/gone.md"]),
        ("[a](docs/glossary.md#gone)", ["docs/glossary.md#gone: there is no such heading"]),
        ("[a](https://example.org/gone.md), [b](#here)\n# Here", []),
        ("`csrc/common/gone.cpp` and `common/error.h`", ["csrc/common/gone.cpp"]),
        ("common/gone.h --> transport/tcp", ["common/gone.h"]),
        ("`csrc/gone`, `gone/`, `csrc/common`, `common/`", ["csrc/gone", "gone/"]),
        ("/usr/gone.py, https://example.org/a/gone.py, common/*.cpp, tests/<folder>/test_x.py", []),
    ],
)
def test_missing_files_are_found(text: str, found: list[str]) -> None:
    assert missing(text, ROOT) == found


def test_options_md_is_up_to_date() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == info.options_markdown() + "\n", "run: python -m ourddp options --markdown > docs/options.md"


def test_documents_are_short() -> None:
    for document in DOCUMENTS:
        name = document.relative_to(ROOT).as_posix()
        most = MOST_LINES_OF_A_PAGE if name.startswith("docs/architecture/") else MOST_LINES.get(name)
        lines = len(document.read_text().splitlines())
        assert most is None or lines <= most, f"{name} has {lines} lines; {most} are allowed"


def test_every_page_is_linked_and_every_picture_shown() -> None:
    linked = {
        (document.parent / target.partition("#")[0]).resolve()
        for document in DOCUMENTS
        for target in LINK.findall(document.read_text())
    }
    top = {ROOT / "README.md"}
    assert {*DOCUMENTS, *(ROOT / "benchmarks" / "results").glob("*.png")} - linked <= top


def test_the_api_reference_has_all_public_names() -> None:
    text = (ROOT / "docs/api.md").read_text()
    elsewhere = {"MisuseError", "Average", "Sum", "__version__"}
    assert set(ourddp.__all__) - elsewhere <= set(re.findall(r"^::: ourddp\.(\w+)$", text, re.MULTILINE))
    assert "`ourddp.MisuseError`" in text
