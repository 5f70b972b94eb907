"""``python -m ourddp report``: what it makes of timelines, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import warm_python

from ourddp import trace_analysis, trace_file
from ourddp.__main__ import main

STEP = 10_000.0  # microseconds


def event(rank: int, name: str, category: str, begin: float, duration: float, **facts: Any) -> dict[str, Any]:
    tid = 1 if category in ("step", "bucket") else 100
    return {
        "ph": "X", "name": name, "pid": rank, "tid": tid, "cat": category, "ts": begin, "dur": duration, "args": facts
    }  # fmt: skip


def write(path: Path, ranks: list[float], steps: int = 6, end: str = "]\n", local: int = 0) -> Path:
    """Write the timeline of ranks that compute for so many microseconds of a step.

    The last one waits for none, and a bucket takes a millisecond more, of which half is hidden. ``local`` is the number
    of ranks on a node, if there are several: the last one there then waits for the other nodes on the wire.
    """
    last = max(ranks)
    lines = []
    for rank, compute in enumerate(ranks):
        here = max(ranks[rank // local * local :][:local]) if local else last
        lines.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        lines.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": 100, "args": {"name": "main"}})
        for i in range(1, steps + 1):
            began = i * STEP
            done = began + last + 500
            lines += [
                event(rank, "forward", "step", began, compute / 2, iteration=i),
                event(rank, "backward", "step", began + compute / 2, done - began - compute / 2, iteration=i),
                event(rank, "exposed communication", "step", began + compute, done - began - compute, iteration=i),
                event(rank, "reduction", "bucket", done - 1000, 1000, iteration=i, bucket=0),
                event(rank, "wait for peers", "phase", began + compute, here - compute),
            ]
            if local and here == compute:
                lines.append(event(rank, "wire", "phase", began + compute, done - began - compute))
            # What is left of the step is computed as well: an optimizer, say.
    path.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n" + end)
    return path


def report(*paths: Path) -> trace_analysis.TraceReport:
    return trace_analysis.analyse(trace_file.load(paths))


def test_the_report_says_who_is_late_and_what_that_costs(tmp_path):
    found = report(write(tmp_path / "trace.json", [6000, 6200, 8000]))
    assert found.steps == 4  # without the first, and the last, of which the end is not known
    assert [one.step for one in found.ranks] == pytest.approx([10, 10, 10])
    assert [one.exposed for one in found.ranks] == pytest.approx([2.5, 2.3, 0.5])
    assert [one.peers for one in found.ranks] == pytest.approx([2.0, 1.8, 0.0])
    assert [one.compute for one in found.ranks] == pytest.approx([7.5, 7.7, 9.5])
    assert found.last.rank == 2
    assert found.lateness == pytest.approx(1.8)
    assert found.imbalance == pytest.approx(9.5 / (24.7 / 3) - 1)
    text = str(found)
    assert "Ranks compute for 82% of it: 3 ranks do the work of 2.5." in text
    assert "without its lateness a step would take 1.80 ms (18%) less" in text
    assert "Rank 2 computes 15% more than the mean." in text


def test_ranks_that_are_equal_are_not_blamed(tmp_path):
    found = report(write(tmp_path / "trace.json", [6000, 6000]))
    assert len(found.sentences()) == 2
    assert "50% of the reductions hide behind the computation" in found.sentences()[1]


def test_a_timeline_that_was_cut_off_is_read(tmp_path):
    whole = write(tmp_path / "whole.json", [6000, 7000])
    cut = write(tmp_path / "cut.json", [6000, 7000], end='{"ph":"X","na')
    assert report(cut) == report(whole)


def test_the_timelines_of_several_machines_are_read_as_one_which_blames_nobody(tmp_path):
    # Each rank is the last one of its machine, and rank 1 the one that all wait for.
    lines = write(tmp_path / "both.json", [6000, 7000], local=1).read_text().splitlines()
    files = []
    for rank in (0, 1):
        file = tmp_path / f"{rank}.json"
        file.write_text("\n".join(line for line in lines if f'"pid": {rank}' in line or line == "["))
        files.append(file)
    found = report(*files)
    assert found == report(tmp_path / "both.json")
    assert [one.peers for one in found.ranks] == [0, 0]
    assert (found.last, found.lateness) == (None, None)
    text = str(found)
    assert "10% moving and reducing data, and waiting for other nodes, 0% waiting for later ranks of the same" in text
    assert "arrives last" not in text
    assert "ourddp.stats() knows" in text


def test_without_a_model_the_calls_of_the_main_thread_are_exposed(tmp_path):
    path = tmp_path / "trace.json"
    lines = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 100, "args": {"name": "main"}},
        event(0, "all_reduce", "collective", 0, 1000),
        event(0, "wait for peers", "phase", 100, 200),
        event(0, "all_reduce", "collective", 3000, 1000),
    ]
    path.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines))
    [one] = report(path).ranks
    assert (one.step, one.compute, one.exposed, one.peers, one.busy) == pytest.approx((4, 2, 2, 0.2, 0))


def named(rank: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 100, "args": {"name": "main"}},
    ]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines))
    return path


def test_the_steps_of_an_optimizer_are_told_apart_by_their_backwards(tmp_path):
    lines = named(0)
    for i in range(1, 6):  # as a DistributedOptimizer records it: each backward begins where the last one ended
        began = i * STEP
        lines += [
            event(0, "backward", "step", began, STEP, iteration=i),
            event(0, "exposed communication", "step", began + 8000, 2000, iteration=i),
            event(0, "all_reduce", "collective", began + 1000, 500),
        ]
    found = report(write_lines(tmp_path / "trace.json", lines))
    assert found.steps == 3
    [one] = found.ranks
    assert (one.step, one.exposed, one.compute) == pytest.approx((10, 2.5, 7.5))


def test_ranks_without_a_step_in_common_are_no_report(tmp_path):
    lines = [*named(0), *named(1), event(1, "forward", "step", STEP, 4000, iteration=1)]
    lines += [event(0, "forward", "step", i * STEP, 4000, iteration=i) for i in range(1, 4)]
    with pytest.raises(ValueError, match=r"no step in common \(rank 1 recorded no two steps of a model\): let all"):
        report(write_lines(tmp_path / "trace.json", lines))


def test_a_step_lasts_until_the_next_one_that_was_recorded(tmp_path):
    lines = named(0)
    for i in range(2, 12, 2):  # two forwards for each backward
        lines += [event(0, "forward", "step", i * STEP, 4000, iteration=i)]
    found = report(write_lines(tmp_path / "trace.json", lines))
    assert (found.steps, found.step) == (3, pytest.approx(20))


def test_of_two_models_the_first_one_tells_when_steps_begin(tmp_path):
    lines = named(0)
    for i in range(1, 6):
        lines += [event(0, "forward", "step", i * STEP, 1000, iteration=i)]
        lines += [event(0, "forward", "step", i * STEP + 5000 + 100 * i, 1000, iteration=i)]
    assert report(write_lines(tmp_path / "trace.json", lines)).step == pytest.approx(10)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), "-m", "ourddp", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_the_command_prints_and_writes_the_report(tmp_path):
    pytest.importorskip("matplotlib")
    trace, page, picture = write(tmp_path / "trace.json", [6000, 8000]), tmp_path / "r.html", tmp_path / "r.png"
    done = run(trace, "--json", "--html", page, "--png", picture)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["last"] == 1
    assert found["lateness"] == pytest.approx(2)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "without its lateness a step would take 2.00 ms" in text
    assert "data:image/png;base64," in text


@pytest.mark.parametrize("way", ["--html", "--png", "--tensorboard"])
def test_files_that_cannot_be_written_are_named_in_a_sentence(tmp_path, way, capsys):
    if way != "--html":
        pytest.importorskip({"--png": "matplotlib", "--tensorboard": "tensorboard"}[way])
    (tmp_path / "file").touch()
    trace, target = write(tmp_path / "trace.json", [6000, 8000]), tmp_path / "file" / "below"
    assert main(["report", str(trace), way, str(target)]) == 1
    told = capsys.readouterr()
    assert told.out.startswith("A step takes")
    assert told.err.startswith("the report cannot be written there: ")
    assert len(told.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "way", "status", "said"),
    [
        ("matplotlib.figure", "--png", 1, "--png needs matplotlib"),
        ("matplotlib.figure", "--html", 0, ""),
        ("torch.utils.tensorboard", "--tensorboard", 1, "--tensorboard needs tensorboard"),
    ],
)
def test_what_is_not_installed_is_named(tmp_path, module, way, status, said, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    trace = write(tmp_path / "trace.json", [6000, 8000])
    assert main(["report", str(trace), way, str(tmp_path / "there")]) == status
    assert said in capsys.readouterr().err
    assert (tmp_path / "there").exists() == (status == 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read the timeline"),
        ("hello", "is not a timeline"),
        ("[\n", "the timeline is empty"),
        ('[\n{"ph": \n{"ph":"M"}\n', "line 2 is no event"),
    ],
)
def test_what_is_no_timeline_is_refused(tmp_path, text, said):
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    done = run(path)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
