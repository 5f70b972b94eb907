"""The table of algorithms between nodes: printed, overridden, refused, and written by measuring."""

from __future__ import annotations

import io
import os
import re
import signal
import statistics
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import backend_of
from programs import run_module, started, warm_python
from ranks import node_ids, run_ranks

from ourddp import _C, tune
from ourddp.__main__ import main
from ourddp.algorithm_table import ALGORITHMS, SPEEDUP, Measurement, choose, rules
from ourddp.progress import Progress

TIMEOUT = 240


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_printed_with_a_comment_a_line(capsys):
    assert main(["select"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert all(re.match(r"(all|node_reduce) .*\b(whole|doubling|direct|ring) +# \w", line) for line in lines), lines
    assert lines[-1].split("#")[0].split() == ["all", "direct"]


def test_the_printed_table_has_the_users_rules_first():
    result = run_module("ourddp", "select", OURS_SELECT="all_reduce nodes>=3 bytes<=64K ring; reduce whole")
    assert result.returncode == 0, result.stderr
    assert [line.split("#")[0].split() for line in result.stdout.splitlines()][:2] == [
        ["all_reduce", "nodes>=3", "bytes<=64K", "ring"],
        ["reduce", "whole"],
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("all rings", "'rings' is neither"),
        ("table.txt", "'table.txt' is no operation"),
        ("./no-such-table", "No such file"),
    ],
)
def test_a_wrong_table_is_an_error_of_the_command(text, complaint):
    result = run_module("ourddp", "select", OURS_SELECT=text)
    assert result.returncode == 1
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_choices():
    assert _C.choose_algorithm("all_reduce", 2, 4, 1024) == "whole"
    assert _C.choose_algorithm("all_reduce", 2, 4, 1 << 20) == "direct"
    assert _C.choose_algorithm("all_reduce", 2, 4, 1 << 20, "all bytes>=1M ring") == "ring"
    with pytest.raises(ValueError, match="all_reduce, reduce"):
        _C.choose_algorithm("broadcast", 2, 4, 1)


def sums(rank: int, world: int) -> list[list[float]]:
    """Sums of which the last bits tell in which order they were added up."""
    assert len(backend_of().node_sizes()) == world // 2
    results = []
    for count in (10, 100_000):
        tensor = 1.0 / (torch.arange(count) * 3 + rank * 7 + 1)
        dist.all_reduce(tensor)
        results.append(tensor.tolist())
    return results


def test_rank_0s_table_holds_for_all():
    direct, ring, mixed = (
        run_ranks(6, sums, nodes=3, env=[{"OURS_SELECT": rules if rank == 0 else other} for rank in range(6)])
        for rules, other in (("", ""), ("all ring", "all ring"), ("all ring", "all whole"))
    )
    for results in (direct, ring, mixed):
        assert all(result == results[0] for result in results)
    assert ring[0][1] != direct[0][1]
    assert mixed[0] == ring[0]
    torch.testing.assert_close(torch.tensor(ring[0][1]), torch.tensor(direct[0][1]))


def join_in_vain(rank: int, world: int) -> str:
    with pytest.raises(dist.DistBackendError, match="OURS_SELECT") as error:
        dist.init_process_group("ours", rank=rank, world_size=world)
    return str(error.value)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_wrong_table_is_an_error_on_all_ranks(nodes, tmp_path):
    table = tmp_path / "table"
    table.write_text("# all is well\nall_reduce bytes>2 ring\n")
    # Rank 0's is read; the others may not even have it.
    environments = [{"OURS_SELECT": str(table) if rank == 0 else "/nowhere/table"} for rank in range(4)]
    for text in run_ranks(4, join_in_vain, backend=None, nodes=nodes, env=environments):
        assert str(table) in text
        assert "line 2 of the table of algorithms, 'all_reduce bytes>2 ring': 'bytes>2' is neither" in text


def groups_with_tables(rank: int, world: int) -> list[float]:
    results = []
    for lines in ("all ring", "all doubling", ""):
        options = _C.ProcessGroupOurs.Options()
        options.selection = lines
        group = dist.new_group(pg_options=options)
        tensor = 1.0 / (torch.arange(100_000) * 3 + rank * 7 + 1)
        dist.all_reduce(tensor, group=group)
        results.append(tensor)
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[0])  # of OURS_SELECT
    options.selection = "ring"
    with pytest.raises(ValueError, match="'ring' is no operation"):
        dist.new_group(pg_options=options)
    return results[1].sum().item()


def test_a_group_may_have_a_table_of_its_own():
    results = run_ranks(4, groups_with_tables, env=[{"OURS_SELECT": "all ring", **ids} for ids in node_ids(4, 4)])
    assert len(set(results)) == 1


# --- tuning ----------------------------------------------------------------------------------------------------------


def test_the_choice_is_what_the_file_says_of_it():
    steady = [1.0] * 6
    # The fastest in all rounds is so by chance; the second is always faster than the one built in.
    lucky = [0.5, 1.1, 0.5, 1.1, 0.5, 0.6]
    assert choose({"direct": steady, "ring": lucky, "whole": [0.9] * 6}, "direct") == "whole"
    # 1.0515 times as fast, which the table would show as 1.05.
    assert choose({"direct": steady, "ring": [0.951] * 6}, "direct") == "ring"
    assert choose({"direct": steady, "ring": [0.953] * 6}, "direct") == "direct"


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(50, 150), min_size=6, max_size=6), min_size=2, max_size=4))
def test_no_algorithm_that_meets_the_rule_is_passed_over(rounds):
    times = {name: [float(one) for one in own] for name, own in zip(ALGORITHMS, rounds, strict=False)}
    chosen = choose(times, "whole")

    def meets_the_rule(name: str) -> bool:
        parts = [slice(0, None), slice(0, None, 2), slice(1, None, 2)]
        return all(
            statistics.median(times["whole"][part]) / statistics.median(times[name][part]) > SPEEDUP for part in parts
        )

    assert chosen == "whole" or meets_the_rule(chosen)
    for name in times:
        if meets_the_rule(name):
            assert statistics.median(times[chosen]) <= statistics.median(times[name])


def measured(size: int, built_in: str, chosen: str) -> Measurement:
    return Measurement(size, {name: 1.0 for name in ALGORITHMS}, built_in, chosen)


def test_rules_cover_what_was_measured():
    found = [
        measured(1 << 10, "whole", "doubling"),
        measured(4 << 10, "whole", "doubling"),
        measured(16 << 10, "whole", "whole"),
        measured(64 << 10, "direct", "ring"),
        measured(256 << 10, "direct", "doubling"),
    ]
    lines = rules(found, 3, 2)
    assert lines == [
        "all_reduce nodes=3 local=2 bytes<=8192 doubling",
        "all_reduce nodes=3 local=2 bytes>=32769 bytes<=131072 ring",
        "all_reduce nodes=3 local=2 bytes>=131073 bytes<=262144 doubling",
    ]
    option = ";".join(lines)
    for one in found:
        assert _C.choose_algorithm("all_reduce", 3, 2, one.bytes, option) == one.chosen
        assert _C.choose_algorithm("all_reduce", 2, 2, one.bytes, option) == (
            "whole" if one.bytes < 65537 else "direct"
        )
    assert _C.choose_algorithm("all_reduce", 3, 2, 16 << 10, option) == "whole"
    assert _C.choose_algorithm("all_reduce", 3, 2, 1 << 20, option) == "direct"
    assert rules([measured(1 << 10, "whole", "whole")], 3, 2) == []


def tuning(rank: int, world: int, output: str) -> list[Measurement]:
    return tune.tune(Path(output), 30, 16 << 10)


def test_tuning_measures_and_writes_a_table_that_is_read_back(tmp_path):
    output = tmp_path / "table.txt"
    results = run_ranks(4, tuning, str(output), nodes=2)
    assert all(result == results[0] for result in results)
    assert [one.bytes for one in results[0]] == [1 << 10, 4 << 10, 16 << 10]
    for one in results[0]:
        assert set(one.seconds) == set(ALGORITHMS)
        assert all(0 < seconds < 10 for seconds in one.seconds.values())
        assert _C.choose_algorithm("all_reduce", 2, 2, one.bytes, str(output)) == one.chosen
    text = output.read_text()
    assert "2 nodes of up to 2 ranks, 4 in all" in text
    assert "is replaced where another algorithm is more\n# than 1.05 times as fast by three medians" in text
    assert torch.__version__ in text
    assert list(tmp_path.iterdir()) == [output]


def without_success(rank: int, world: int, output: str, budget: float) -> str:
    with pytest.raises(tune.TuneError) as error:
        tune.tune(Path(output), budget, 1 << 20)
    return str(error.value)


def test_tuning_says_on_all_ranks_what_is_missing(tmp_path):
    folder = tmp_path / "no" / "such" / "folder" / "table"
    for nodes, output, budget, complaint in (
        (1, tmp_path / "table", 30.0, "all 2 ranks are on one node"),
        (2, folder, 30.0, f"cannot write {folder}: No such file or directory"),
        (2, tmp_path, 30.0, f"cannot write {tmp_path}: it is a directory"),
        (2, tmp_path / "table", 1e-9, "1e-09 s are not enough"),
    ):
        for text in run_ranks(2, without_success, str(output), budget, nodes=nodes):
            assert text.startswith(complaint)
    assert not list(tmp_path.iterdir())


def test_the_command_starts_ranks_for_a_try(tmp_path):
    output = tmp_path / "table.txt"
    arguments = ["--output", str(output), "--most-bytes", "4096", "--time-budget", "20"]
    result = run_module("ourddp", "tune", "--ranks", "2", "--nodes", "2", *arguments)
    assert result.returncode == 0, result.stderr
    assert f"OURS_SELECT={output}" in result.stdout
    assert len(re.findall(r"^ +(1024|4096) .*us", result.stdout, re.MULTILINE)) == 2
    # No terminal: a line a size.
    progress = [re.sub(r", \d+ s,", ", - s,", line) for line in result.stderr.splitlines() if "sizes" in line]
    assert progress == ["0 of 2 sizes, - s, measuring 1024 bytes", "1 of 2 sizes, - s, measuring 4096 bytes"]
    shown = run_module("ourddp", "select", OURS_SELECT=str(output))
    assert shown.returncode == 0, shown.stderr
    changed = re.search(r"^(\d) of 2 sizes", result.stdout, re.MULTILINE)
    assert changed is not None
    assert ("all_reduce nodes=2 local=1" in shown.stdout) == (changed[1] != "0")


def test_the_command_says_what_is_wrong(tmp_path):
    alone = run_module("ourddp", "tune", "--output", str(tmp_path / "table"))
    assert alone.returncode == 1
    assert "all 1 ranks are on one node" in alone.stderr


@pytest.mark.parametrize("arguments", [("--nodes", "3", "--ranks", "2"), ("--most-bytes", "10")])
def test_the_command_refuses_what_cannot_be(arguments, capsys):
    assert main(["tune", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"{arguments[0]} must be")


def test_ranks_of_a_job_start_no_ranks_of_their_own(capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delattr(tune, "_start")
    assert main(["tune", "--ranks", "2"]) == 1
    assert capsys.readouterr().err.startswith("--ranks is for a machine alone, but torchrun has started this rank")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal():
    stream = Terminal()
    progress = Progress(stream)
    progress.show(1, 4, "measuring")
    progress.show(2, 4, "measuring")
    assert stream.getvalue().count("\n") == 0
    assert stream.getvalue().endswith(f"\r\x1b[K[{'#' * 10}{'.' * 10}] 2 of 4 sizes, 0 s, measuring")
    progress.close()
    assert stream.getvalue().endswith("\r\x1b[K")
    Progress(None).show(1, 4, "measuring")


def test_the_help_tells_the_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("ours-select.txt", "60.0", str(64 << 20), "2", "none"):
        assert f"(default: {default})" in text


def test_an_interrupt_ends_tuning_in_a_line(tmp_path):
    command = [warm_python(), "-m", "ourddp", "tune", "--ranks", "2", "--output", str(tmp_path / "table")]
    with started([[*command, "--time-budget", "600"]], [{"OMP_NUM_THREADS": "1"}]) as [process]:
        assert "measuring 1024 bytes" in process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, errors = process.communicate(timeout=TIMEOUT)
    said = [line for line in errors.splitlines() if "sizes" not in line]
    assert (process.returncode != 0, output, said) == (True, "", ["interrupted"])
    assert not list(tmp_path.iterdir())
