"""The table of algorithms between nodes: printed, overridden, refused, and written by measuring."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from probes import backend_of
from ranks import node_ids, run_ranks

from ourddp import _C, tune
from ourddp.__main__ import main
from ourddp.tune import Measurement

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 240


def ourddp(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ourddp`` from this checkout."""
    command = [sys.executable, "-m", "ourddp", *arguments]
    around = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=around, check=False)


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_printed_with_a_comment_a_line(capsys):
    assert main(["select"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert all(re.match(r"all .*\b(whole|doubling|direct|ring) +# \w", line) for line in lines), lines
    assert lines[-1].split("#")[0].split() == ["all", "direct"]


def test_the_printed_table_has_the_users_rules_first():
    result = ourddp("select", OURS_SELECT="all_reduce nodes>=3 bytes<=64K ring; reduce whole")
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
    result = ourddp("select", OURS_SELECT=text)
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
        run_ranks(8, sums, nodes=4, env=[{"OURS_SELECT": rules if rank == 0 else other} for rank in range(8)])
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
    for rules in ("all ring", "all doubling", ""):
        options = _C.ProcessGroupOurs.Options()
        options.selection = rules
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


def test_another_algorithm_is_chosen_only_where_it_is_faster_beyond_the_noise():
    steady = [1.0, 1.01, 0.99, 1.0]
    assert tune.choose({"direct": steady, "ring": [0.9] * 4}, "direct") == "ring"
    assert tune.choose({"direct": steady, "ring": [0.97] * 4}, "direct") == "direct"
    assert tune.choose({"direct": steady, "ring": [1.2] * 4}, "direct") == "direct"
    # Faster in all, but in every other round only.
    assert tune.choose({"direct": [1.0] * 6, "ring": [0.5, 1.1, 0.5, 1.1, 0.5, 0.6]}, "direct") == "direct"
    assert tune.choose({"direct": steady, "ring": [0.9] * 4, "whole": [0.8] * 4}, "direct") == "whole"


def measured(size: int, built_in: str, chosen: str) -> Measurement:
    return Measurement(size, {name: 1.0 for name in tune.ALGORITHMS}, built_in, chosen)


def test_rules_cover_what_was_measured():
    found = [
        measured(1 << 10, "whole", "doubling"),
        measured(4 << 10, "whole", "doubling"),
        measured(16 << 10, "whole", "whole"),
        measured(64 << 10, "direct", "ring"),
        measured(256 << 10, "direct", "doubling"),
    ]
    rules = tune.rules(found, 3, 2)
    assert rules == [
        "all_reduce nodes=3 local=2 bytes<=8192 doubling",
        "all_reduce nodes=3 local=2 bytes>=32769 bytes<=131072 ring",
        "all_reduce nodes=3 local=2 bytes>=131073 bytes<=262144 doubling",
    ]
    option = ";".join(rules)
    for one in found:
        assert _C.choose_algorithm("all_reduce", 3, 2, one.bytes, option) == one.chosen
        assert _C.choose_algorithm("all_reduce", 2, 2, one.bytes, option) == (
            "whole" if one.bytes < 65537 else "direct"
        )
    assert _C.choose_algorithm("all_reduce", 3, 2, 16 << 10, option) == "whole"
    assert _C.choose_algorithm("all_reduce", 3, 2, 1 << 20, option) == "direct"
    assert tune.rules([measured(1 << 10, "whole", "whole")], 3, 2) == []


def tuning(rank: int, world: int, output: str) -> list[Measurement]:
    return tune.tune(Path(output), 30, 16 << 10)


def test_tuning_measures_and_writes_a_table_that_is_read_back(tmp_path):
    output = tmp_path / "table.txt"
    results = run_ranks(4, tuning, str(output), nodes=2)
    assert all(result == results[0] for result in results)
    assert [one.bytes for one in results[0]] == [1 << 10, 4 << 10, 16 << 10]
    for one in results[0]:
        assert set(one.seconds) == set(tune.ALGORITHMS)
        assert all(0 < seconds < 10 for seconds in one.seconds.values())
        assert _C.choose_algorithm("all_reduce", 2, 2, one.bytes, str(output)) == one.chosen
    text = output.read_text()
    assert "2 nodes of up to 2 ranks, 4 in all" in text
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
    result = ourddp("tune", "--ranks", "2", "--nodes", "2", *arguments, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    assert f"OURS_SELECT={output}" in result.stdout
    assert len(re.findall(r"^ +(1024|4096) .*us", result.stdout, re.MULTILINE)) == 2
    shown = ourddp("select", OURS_SELECT=str(output))
    assert shown.returncode == 0, shown.stderr
    changed = re.search(r"^(\d) of 2 sizes", result.stdout, re.MULTILINE)
    assert changed is not None
    assert ("all_reduce nodes=2 local=1" in shown.stdout) == (changed[1] != "0")


def test_the_command_says_what_is_wrong(tmp_path):
    alone = ourddp("tune", "--output", str(tmp_path / "table"))
    assert alone.returncode == 1
    assert "all 1 ranks are on one node" in alone.stderr


@pytest.mark.parametrize("arguments", [("--nodes", "3", "--ranks", "2"), ("--most-bytes", "10")])
def test_the_command_refuses_what_cannot_be(arguments, capsys):
    assert main(["tune", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"{arguments[0]} must be")
