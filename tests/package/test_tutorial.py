"""The programs of the tutorial do what its pages say, and print what they show."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from programs import job, run_file, run_module, run_programs

from ourddp import _C

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial"
TRAIN = ROOT / "ourddp" / "example" / "train.py"
# What the tutorial's program waits for, and what the test lets it wait for: in the program, and in its errors.
WAIT, WAIT_SHOWN = ("seconds=10)", "seconds=4)"), ("10000ms", "4000ms")
# Runs the program that argv names, beside a thread that asks for its stack. Rank 2 is asked when it is in the barrier,
# and the others when they are in backward after that.
WATCHED = """
    import os, runpy, signal, sys, threading, time

    def innermost():
        frame = sys._current_frames()[threading.main_thread().ident]
        return frame.f_code.co_name

    def watch(mark, mine):
        while not (innermost() == mine and (mine == "barrier" or os.path.exists(mark))):
            time.sleep(0.01)
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGUSR1)

    mine = "barrier" if os.environ["RANK"] == "2" else "_engine_run_backward"
    threading.Thread(target=watch, args=(sys.argv[1], mine), daemon=True).start()
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_ranks(path: Path, world: int) -> list[tuple[int, str]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_file(path, each=job(world, store))


def shown(page: str, name: str) -> list[str]:
    """Return the lines of the output that a page shows under ``<!-- output: name -->``, with broken ones joined."""
    found = re.search(rf"<!-- output: {name} -->\n```\n(.*?)```", (TUTORIAL / page).read_text(), re.DOTALL)
    assert found is not None
    text = found[1]
    if "[rank" in text:
        text = re.sub(r"\n {4}", " ", text)
    return [line for line in text.splitlines() if line]


def plain(text: str) -> str:
    """Return output without what differs from run to run: processes, hosts, folders, and who waits for whom."""
    text = re.sub(r"\[rank\d\]: ", "", text)
    text = re.sub(r'File "[^"]*?([^/"]+)"', r'File "\1"', text)
    text = re.sub(r"\(host \S+, pid \d+\)", "(host)", text)
    text = re.sub(r"rank \d \(host\) left", "a rank left", text)
    return re.sub(r"(on|noticed by) rank \d", r"\1 rank", text)


def accuracy(output: str) -> float:
    found = re.search(r"([\d.]+)% of the held-out images are right", output)
    assert found is not None, output
    return float(found[1])


def test_several_ranks_are_as_accurate_as_one_process():
    ((code, alone),) = run_file(TUTORIAL / "one_process.py")
    assert code == 0, alone
    done = run_ranks(TRAIN, 2)  # four, as the tutorial has it, are in tests/package/test_snippets.py
    assert [code for code, _ in done] == [0] * 2, done
    assert accuracy(done[0][1]) == pytest.approx(accuracy(alone), abs=1)
    assert accuracy(alone) > 95


def test_the_lines_that_make_it_parallel_are_marked():
    (lines,) = re.findall(r'title="train.py" hl_lines="([\d ]+)"', (TUTORIAL / "ddp.md").read_text())
    train = TRAIN.read_text().splitlines()
    marks = ["import ourddp", "ourddp.init(", "ourddp.DistributedDataParallel(", "tensor_split("]
    assert [train[int(line) - 1].count(mark) for line, mark in zip(lines.split(), marks, strict=True)] == [1] * 4


def test_the_package_prints_its_example():
    done = run_module("ourddp.example")
    assert (done.returncode, done.stdout) == (0, TRAIN.read_text()), done.stderr


def test_the_reports_show_one_bucket_and_several():
    (code, output), (other, _) = run_ranks(TUTORIAL / "buckets.py", 2)
    assert (code, other) == (0, 0), output
    reports = output.strip().split("\n\n")
    assert [len(re.findall(r"^ +\d+ ", report, re.MULTILINE)) for report in reports] == [1, 4], output


def test_the_hang_ends_as_the_tutorial_shows(tmp_path):
    """It waits for a shorter time than the tutorial does."""
    program = tmp_path / "hang.py"
    text = (TUTORIAL / "hang.py").read_text()
    assert text.count(WAIT[0]) == 1
    program.write_text(text.replace(*WAIT))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    each = [{**rank, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight_"} for rank in job(4, store)]
    done = run_programs(WATCHED, each, argv=[str(program), str(tmp_path / "rank 2 has left")])
    assert [rank.returncode for rank in done] == [1] * 4, done
    output = "\n".join(rank.stdout + rank.stderr for rank in done)
    for rank in (0, 1, 3):
        assert "for rank 2 (" in done[rank].stderr
    for line in shown("hang.md", "hang"):
        line = line.replace(*WAIT_SHOWN)
        assert plain(line) in plain(output), f"{line}\n\n{output}"
    for line in shown("hang.md", "stacks"):  # those of torch differ from version to version
        assert "<torch>" in line or plain(line) in plain(output), f"{line}\n\n{output}"
    if _C.records_flights():
        files = sorted(str(file) for file in tmp_path.glob("flight_*"))
        ((code, calls),) = run_file(TUTORIAL / "last_calls.py", *files)
        assert (code, calls.splitlines()) == (0, shown("hang.md", "last calls"))


def test_the_mended_program_ends_after_as_many_steps_as_the_tutorial_shows():
    done = run_ranks(TUTORIAL / "hang_mended.py", 4)
    assert [code for code, _ in done] == [0] * 4, done
    assert done[0][1].strip() in (TUTORIAL / "hang.md").read_text()


def test_the_drawings_are_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import draw

    monkeypatch.delitem(sys.modules, "draw")
    drawn = {name: make() for name, make in draw.DRAWINGS.items()}
    assert drawn == {file.name: file.read_text() for file in draw.FOLDER.glob("*.svg")}, "run docs/site/draw.py"
