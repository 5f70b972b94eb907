"""The notebook for learners: all its cells run, and show what the text around them says."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest
from example_programs import EXAMPLES
from programs import warm_folder

TIMEOUT = 200  # seconds for all cells; it takes 40 on two cores
SHORTER = {"compare.py --steps 60": "compare.py --steps 16", "train.py --epochs 4": "train.py --epochs 1"}


@pytest.mark.timeout(TIMEOUT)
def test_the_notebook_runs(tmp_path: Path) -> None:
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__", "cpp"))
    before = sorted(path.name for path in folder.iterdir())
    notebook = nbformat.read(EXAMPLES / "learn.ipynb", as_version=4)
    for cell in notebook.cells:
        for long, short in SHORTER.items():
            cell.source = cell.source.replace(long, short)
        cell.source = cell.source.replace("Path(sys.executable).parent", repr(str(warm_folder())))
    nbclient.NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()  # raises CellExecutionError if a cell fails

    printed = "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream"
    )
    for rank in range(4):
        assert f"rank {rank} of 4: 1111" in printed
    assert "the gradients of one process, by hand and by DistributedDataParallel are the same" in printed
    assert printed.count("held-out accuracy") == 3
    assert "| fully sharded | " in printed
    assert "rank 1" in printed.rpartition("| local SGD, gossip | ")[2]
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == before
