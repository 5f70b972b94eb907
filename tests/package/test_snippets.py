"""The commands and the programs that the documents show: each runs here, or says above it why it does not.

A line ``<!-- not run: WHY -->`` above a block is for what needs more machines, minutes, or software that is not there.
If WHY names a file of tests, that file must know the program; and the program must know the flags that it is shown
with. A block without a language below a block is what that prints; its numbers may differ by one. Blocks that show a
whole file are of files with tests of their own (tests/package/test_tutorial.py).
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from probes import HAS_HOOKS
from programs import environment, job, path_with_python, run_programs, warm_folder

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md", *(ROOT / "docs").rglob("*.md")]
FENCE = re.compile(
    r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w+)[^\n]*\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
PROGRAM = re.compile(r"(?<![\w./-])((?:\w+/)*\w+\.py)((?:[^\n\\]|\\\n)*)")
NUMBER = re.compile(r"\d+(?:\.\d+)?")

# What comes before a fragment of Python: the names that it uses.
CONTEXTS = {
    "docs/report.md": "import ourddp; ourddp.init(); import torch; model = torch.nn.Linear(4, 4)",
    "docs/timeline.md": """
        import torch, ourddp
        ourddp.init()
        images, model = torch.ones(2, 4), ourddp.DistributedDataParallel(torch.nn.Linear(4, 4))
    """,
    "docs/training.md": """
        import torch, ourddp
        from torch.nn.functional import cross_entropy
        launch = ourddp.init()
        model = torch.nn.Embedding(10, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(10, (2, 5 + launch.rank))
        loader = [(tokens, tokens.where(tokens > 2, -100))] * 2
        labels, loss, accuracy = torch.zeros(8), torch.tensor(1.0), 0.5
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        epochs, metrics = 2, {"accuracy": 0.5}
    """,
    "docs/surprises.md": """
        import torch, ourddp
        from torch.nn import functional
        ourddp.init()
        model = ourddp.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        images, labels = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
        loader, epoch, checkpointer = [(images, labels)] * 2, 0, ourddp.Checkpointer("checkpoints")
    """,
    "docs/recovery.md": """
        import torch, ourddp
        from torch.utils.data import DataLoader
        ourddp.init()
        dataset, epochs, model = torch.ones(8, 4), 1, torch.nn.Linear(4, 4)
        dataset = list(zip(dataset, dataset))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    """,
    "docs/parallel/data-parallel.md": """
        import torch, ourddp
        from torch.nn import functional
        network = torch.nn.Linear(4, 3)
        images, labels = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    """,
    "docs/parallel/model-parallel.md": """
        import torch, ourddp
        ourddp.init()
        layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
        example_inputs, loss_fn = torch.randn(8, 4), torch.nn.functional.mse_loss
        loader = [(torch.randn(8, 4), torch.zeros(8, 4))] * 2
    """,
}

# The documents about what torch has from 2.15 on only.
RECENT = {"docs/symmetric-memory.md"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    text: str
    why_not: str | None
    prints: str | None = None

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(text: str, document: str) -> list[Block]:
    return [
        Block(document, text[: found.start()].count("\n") + 1, found[2], found[3], found[1], found[4])
        for found in FENCE.finditer(text)
        if found[2] in ("python", "sh", "bash") and not found[3].startswith("--8<--")
    ]


BLOCKS = [
    block
    for document in sorted(DOCUMENTS)
    for block in blocks_of(document.read_text(), document.relative_to(ROOT).as_posix())
]
SHOWN_ONLY = [block for block in BLOCKS if block.why_not is not None]
PYTHON = [block for block in BLOCKS if block.why_not is None and block.language == "python"]
SHELL = [block for block in BLOCKS if block.why_not is None and block.language != "python"]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_fragment_of_python_runs_on_two_ranks(block: Block, tmp_path: Path) -> None:
    if block.document in RECENT and not HAS_HOOKS:
        pytest.skip("it needs torch 2.15")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = "import textwrap\nexec(textwrap.dedent({!r}))\nexec({!r})".format(
        CONTEXTS.get(block.document, ""), block.text
    )
    for done in run_programs(code, job(2, store), tmp_path):
        assert done.returncode == 0, f"{block}, with what CONTEXTS has for it: {done.stderr}"


@pytest.mark.parametrize("block", SHELL, ids=str)
@pytest.mark.timeout(300)
def test_commands_run(block: Block, tmp_path: Path) -> None:
    """Run them in a folder with what a checkout has, and with the tutorial's programs."""
    for path in [*ROOT.iterdir(), *(ROOT / "docs" / "tutorial").glob("*.py")]:
        if not path.name.startswith(".") and path.name != "ourddp":
            (tmp_path / path.name).symlink_to(path)
    around = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    around["PATH"] = os.pathsep.join([str(warm_folder()), path_with_python()])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], cwd=tmp_path, env=around, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"
    if block.prints is not None:
        assert same(done.stdout, block.prints), f"{block} prints {done.stdout}"


def same(one: str, other: str) -> bool:
    """Return whether two outputs have the same words, and numbers that differ by no more than one."""
    numbers, others = ([float(number) for number in NUMBER.findall(text)] for text in (one, other))
    return NUMBER.sub("", one) == NUMBER.sub("", other) and numbers == pytest.approx(others, abs=1)


def unknown(block: Block) -> list[str]:
    """Return what is wrong with a block that does not run: tests that do not know its programs, and flags."""
    found = []
    tests = re.findall(r"tests/[\w/]+\.py", block.why_not or "")
    for program, words in PROGRAM.findall(re.sub(r"#.*", "", block.text)):
        if (ROOT / "docs" / "tutorial" / program).exists():
            path = ROOT / "docs" / "tutorial" / program
        elif "/" in program:
            path = ROOT / program
        else:
            continue  # the reader's own
        if not path.exists():
            found.append(f"there is no {program}")
            continue
        if tests and not any(path.stem in (ROOT / test).read_text() for test in tests):
            found.append(f"{tests} do not run {program}")
        # Flags may be in what it imports.
        files = [*path.parent.glob("*.py"), *(ROOT / "ourddp" / "bench").glob("*.py")]
        sources = "\n".join(file.read_text() for file in files)
        for flag in re.findall(r"--[a-z][\w-]*", words):
            if f'"{flag}"' not in sources and f'"--{flag.removeprefix("--no-")}"' not in sources:
                found.append(f"{program} has no {flag}")
    return found


@pytest.mark.parametrize("block", SHOWN_ONLY, ids=str)
def test_what_does_not_run_is_tested_elsewhere_and_up_to_date(block: Block) -> None:
    assert len(block.why_not or "") > 10, "say why it does not run"
    assert unknown(block) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("examples/gone.py --epochs 3\n", ["there is no examples/gone.py"]),
        ("torchrun examples/train.py --epoch 3\n", ["examples/train.py has no --epoch"]),
        ("examples/train.py --no-scale-lr \\\n  --gone # --more\n", ["examples/train.py has no --gone"]),
        ("examples/train.py --epochs 3", []),
        ("python train.py --mine", []),
        ("python buckets.py", ["['tests/package/test_examples.py'] do not run buckets.py"]),
        ("examples/sweep.py", ["['tests/package/test_examples.py'] do not run examples/sweep.py"]),
    ],
)
def test_what_is_out_of_date_is_found(text: str, found: list[str]) -> None:
    assert unknown(Block("x.md", 1, "sh", text, "tests/package/test_examples.py runs it")) == found


def test_blocks_are_found_with_their_marks() -> None:
    text = "<!-- not run: why -->\n```sh\na\n```\n\n```python\nb\n```\n\n```\nc\n```\n"
    assert blocks_of(text, "x.md") == [
        Block("x.md", 1, "sh", "a\n", "why"),
        Block("x.md", 6, "python", "b\n", None, "c\n"),
    ]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("4 ranks: 96.1%\n", "4 ranks: 95.6%\n", True),
        ("4 ranks: 96.1%\n", "4 ranks: 94.6%\n", False),
        ("4 ranks: 96.1%\n", "4 nodes: 96.1%\n", False),
        ("4 ranks: 96.1%\n", "4 ranks\n", False),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(one: str, other: str, expected: bool) -> None:
    assert same(one, other) == expected
