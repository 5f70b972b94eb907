"""``ourddp doctor``: what each check says of made-up facts, and ranks that examine this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from programs import job as job_of
from programs import run_module, run_programs
from ranks import run_ranks

from ourddp import joining
from ourddp.doctor import command, facts, meeting, ports, words
from ourddp.doctor.checks import CHECKS, Finding, examine
from ourddp.doctor.facts import Facts
from ourddp.doctor.meeting import Job, Trials, meet, open_store
from ourddp.doctor.words import OK, PROBLEM, WARNING

GIB = 1 << 30


def healthy(rank: int, host: int = 0) -> Facts:
    address = f"10.0.0.{host + 1}"
    return Facts(
        rank=rank,
        host=f"host{host}",
        pid=100 + rank,
        boot=f"boot {host}",
        namespaces={"pid": "pid:[1]", "user": "user:[1]", "net": "net:[1]"},
        versions={"ourddp": "1", "torch": "2.15.0", "Python": "3.12.1"},
        options={"OURS_SPIN": "auto", "OURS_INTERNODE": "tcp", "OURS_TCP_CONGESTION": "", "OURS_TCP_STREAMS": "0"},
        probe="somewhere",
        memory=8 * GIB,
        descriptors=20,
        most_descriptors=4096,
        interfaces=[["lo", "127.0.0.1", True, 65536], ["eth0", address, False, 1500]],
        addresses=[address],
        ports=[[address, 4711]],
        congestion="cubic",
        congestion_allowed="reno cubic",
        cores=[0, 1, 2, 3],
        threads=2,
        machine_cores=4,
        load=0.3,
    )


def job(count: int = 4, hosts: int = 2, changed: dict[int, dict[str, Any]] | None = None) -> Job:
    """Return a job of healthy ranks, of which some have other facts."""
    every = {rank: healthy(rank, rank * hosts // count) for rank in range(count)}
    firsts = [next(rank for rank, each in every.items() if each.host == f"host{host}") for host in range(hosts)]
    trials = {}
    for rank, each in every.items():
        beside = {peer: "" for peer, other in every.items() if other.host == each.host and peer != rank}
        others = {peer: "" for peer in firsts if peer != rank} if rank in firsts else {}
        trials[rank] = Trials(beside, others, (0.001, 0.0005) if rank in firsts[1:] else None)
    every |= {rank: dataclasses.replace(every[rank], **changes) for rank, changes in (changed or {}).items()}
    return Job(count, every, trials)


def everywhere(changes: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the same changes for all ranks of a job."""
    return {rank: changes for rank in range(4)}


def on(trials: dict[int, dict[str, Any]], **keywords: Any) -> Job:
    """Return a job whose ranks found out something else about their peers."""
    made = job(**keywords)
    new = {rank: dataclasses.replace(each, **trials.get(rank, {})) for rank, each in made.trials.items()}
    return dataclasses.replace(made, trials=new)


@pytest.mark.parametrize(("count", "hosts"), [(1, 1), (4, 1), (4, 2), (6, 3)])
def test_a_healthy_job_has_no_findings(count, hosts):
    found = examine(job(count, hosts, {rank: {"threads": 4 * hosts // count} for rank in range(count)}))
    assert [each.check for each in found] == list(CHECKS)
    assert [each for each in found if each.state != OK] == []


MISSING = dataclasses.replace(job(), facts={rank: each for rank, each in job().facts.items() if rank < 2})
SILENT = dataclasses.replace(job(), trials={rank: each for rank, each in job().trials.items() if rank != 3})
BAD = [
    ("ranks", MISSING, PROBLEM, "ranks 2, 3 did not come; those that did are on host0"),
    ("ranks", SILENT, PROBLEM, "rank 3 (host host1, pid 103) came and then fell silent"),
    (
        "versions",
        job(changed={3: {"versions": {"ourddp": "1", "torch": "2.14.0", "Python": "3.12.1"}}}),
        PROBLEM,
        "torch is 2.15.0 on ranks 0 to 2 but 2.14.0 on rank 3. Install",
    ),
    (
        "versions",
        job(changed={3: {"versions": {"ourddp": "1", "torch": "2.15.0", "Python": "3.11.2"}}}),
        WARNING,
        "Python is 3.12.1 on ranks 0 to 2 but 3.11.2 on rank 3",
    ),
    ("options", job(changed={1: {"options_error": "OURS_SPIN='loud' is not understood"}}), PROBLEM, "rank 1 (host"),
    ("options", job(changed={2: {"options": {"OURS_SPIN": "1"}}}), PROBLEM, "OURS_INTERNODE is tcp on ranks 0, 1, 3"),
    (
        "options",
        job(changed={2: {"options": {**healthy(0).options, "OURS_SPIN": "1"}}}),
        WARNING,
        "OURS_SPIN is auto on ranks 0, 1, 3 but 1 on rank 2. Set them alike",
    ),
    ("shared memory", job(changed={1: {"probe_error": "forbidden"}}), PROBLEM, "rank 1 (host host0, pid 101) gets no"),
    ("shared memory", job(changed={0: {"memory": GIB // 2}}), WARNING, "512 MiB are left for 2 ranks on host0"),
    ("sharing", on({0: {"memory": {1: "Permission denied"}}}), WARNING, "security policy"),
    (
        "sharing",
        on(
            {0: {"memory": {1: "no such process"}}},
            changed={1: {"namespaces": {**healthy(1).namespaces, "pid": "pid:[2]"}}},
        ),
        WARNING,
        "in different PID namespaces: start containers with --pid=host",
    ),
    (
        "sharing",
        on({0: {"memory": {1: "no"}}}, changed={1: {"namespaces": {**healthy(1).namespaces, "user": "user:[2]"}}}),
        WARNING,
        "CAP_SYS_PTRACE",
    ),
    ("sharing", on({0: {"memory": {1: "no"}}}, changed={1: {"user": 7}}), WARNING, "They are different users'"),
    ("locked memory", job(changed={1: {"rdma": ["mlx5_0"], "lockable": 65536}}), WARNING, "ulimit -l unlimited"),
    ("descriptors", job(changed={1: {"most_descriptors": 128}}), PROBLEM, "may open 128 files; 190 more than its 20"),
    ("cores", job(changed=everywhere({"threads": 4})), WARNING, "with 8 threads: set OMP_NUM_THREADS=2"),
    ("cores", job(changed=everywhere({"threads": 1})), WARNING, "2 threads only: OMP_NUM_THREADS=2"),
    ("cores", job(changed={0: {"cores": [0]}, 1: {"cores": [0]}}), WARNING, "2 ranks on 1 core of host0: ranks wait"),
    ("load", job(changed={2: {"load": 3.0}}), WARNING, "is 3.0 on host1 (4 cores)"),
    ("clock", on({2: {"clock": (-0.7, 0.01)}}), WARNING, "host1 by -0.700 s"),
    ("addresses", job(changed={2: {"addresses": [], "addresses_error": "no route"}}), PROBLEM, "other hosts: no route"),
    ("addresses", job(2, hosts=1, changed={1: {"addresses_error": "no route"}}), WARNING, "for other hosts: no route"),
    (
        "addresses",
        job(changed={2: {"ports": [], "ports_error": "in use"}}),
        PROBLEM,
        "at none of its addresses: in use",
    ),
    ("addresses", job(changed={0: {"addresses": ["127.0.0.1"]}}), PROBLEM, "at 127.0.0.1, which they cannot reach"),
    (
        "MTU",
        job(changed={2: {"interfaces": [["eth0", "10.0.0.2", False, 9000]]}}),
        WARNING,
        "1500 on eth0 10.0.0.1 of host0, 9000 on eth0 10.0.0.2 of host1",
    ),
    (
        "congestion",
        job(changed=everywhere({"congestion_error": "not allowed", "options": {"OURS_TCP_CONGESTION": "dctcp"}})),
        PROBLEM,
        "OURS_TCP_CONGESTION=dctcp: not allowed. Allowed are: reno cubic",
    ),
    ("congestion", job(changed={1: {"congestion": "bbr"}}), WARNING, "is cubic on ranks 0, 2, 3 but bbr on rank 1"),
    (
        "congestion",
        job(changed=everywhere({"congestion": "bbr", "congestion_allowed": "bbr"})),
        WARNING,
        "bbr is in force, which is slow between near hosts",
    ),
    (
        "firewall",
        on({0: {"network": {2: "10.0.0.2: no answer within 3 s"}}}),
        PROBLEM,
        "rank 0 (host host0, pid 100) does not reach rank 2 (host host1, pid 102) (10.0.0.2: no answer within 3 s)",
    ),
]


@pytest.mark.parametrize(("name", "bad", "state", "text"), BAD)
def test_each_bad_state_is_found_by_its_check_alone(name, bad, state, text):
    found = {each.check: each for each in examine(bad)}
    assert found[name].state == state
    assert text in found[name].text
    others = {each.check for each in found.values() if each.state != OK} - {name}
    assert others == set()


def test_every_check_can_fail():
    assert {name for name, *_ in BAD} == set(CHECKS)


def test_the_load_is_that_of_all_cores_and_not_of_those_of_a_rank():
    bound = {rank: {"cores": [rank], "machine_cores": 64, "load": 3.0} for rank in range(4)}
    found = {each.check: each for each in examine(job(changed=bound))}
    assert found["load"].state == OK


def test_bbr_is_well_where_near_hosts_get_another():
    bbr = {"congestion": "bbr", "congestion_allowed": "reno bbr", "congestion_near": "reno"}
    state, text = CHECKS["congestion"](job(changed=everywhere(bbr)))
    assert (state, text) == (OK, "bbr, and reno to near hosts; allowed: reno bbr")


def test_ranks_are_numbered_in_words():
    assert words.ranks([3]) == "rank 3"
    assert words.ranks([7, 4, 5, 6, 1, 9, 10]) == "ranks 1, 4 to 7, 9, 10"


def test_the_memory_left_is_a_part_of_the_machines():
    left = facts.gather(joining.Launch("none", 0, 1, 0, 1, "127.0.0.1", 0))["memory"]
    assert 0 < left <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_congestion_control_that_cannot_be_had_is_a_fact():
    assert facts.congestion("")["congestion_error"] == ""
    assert facts.congestion("no-such-control")["congestion_error"] != ""


# --- ports -----------------------------------------------------------------------------------------------------------


def test_a_listener_is_reached_and_known():
    with ports.Listener(["127.0.0.1"], "word") as listener:
        ((address, port),) = listener.bound
        assert ports.obstacle([(address, port)], "word") == ""
        assert "another program, has this address" in ports.obstacle([(address, port)], "another word")
        # One way is enough.
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            assert ports.obstacle([closed.getsockname(), (address, port)], "word") == ""
            assert ports.obstacle([closed.getsockname()], "word") == "127.0.0.1: Connection refused"
    assert ports.obstacle([(address, port)], "word") == "127.0.0.1: Connection refused"
    assert ports.obstacle([], "word") == "it has no address to connect to"


def test_a_listener_that_says_nothing_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ports.obstacle([silent.getsockname()], "word", patience=0.05) == "127.0.0.1: no answer within 0.05 s"


def test_a_listener_keeps_to_its_ports():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ports.Listener(["127.0.0.1"], "word", f"{port}-{port}") as listener:
            assert listener.bound == []
            assert listener.error == "127.0.0.1: Address already in use"


# --- the command -----------------------------------------------------------------------------------------------------


def test_findings_are_aligned_and_counted():
    found = [Finding("a", OK, "well"), Finding("long name", PROBLEM, "do this"), Finding("b", WARNING, "see that")]
    assert command.render(found).splitlines() == [
        "ok       a          well",
        "problem  long name  do this",
        "warning  b          see that",
        "1 problem, 1 warning",
    ]
    assert command.render(found[:1]).splitlines()[-1] == "no problem found"
    wrapped = command.render([Finding("a", OK, "word " * 20)], 60).splitlines()
    assert len(wrapped) == 4
    assert all(len(line) <= 60 for line in wrapped)


@pytest.fixture(scope="module")
def examined() -> dict[str, Any]:
    """What the command finds on this machine."""
    done = run_module("ourddp", "doctor", "--ranks", "2", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == int(any(each["state"] == PROBLEM for each in found["findings"])), done.stderr
    return found


def test_the_command_examines_this_machine(examined):
    assert (examined["ranks"], examined["hosts"]) == (2, [[0, 1]])
    states = {each["check"]: each["state"] for each in examined["findings"]}
    assert list(states) == list(CHECKS)
    # Without these the tests of the backend could not run.
    assert {states[name] for name in ("ranks", "versions", "options", "sharing", "addresses")} == {OK}
    for rank, each in enumerate(examined["facts"]):
        assert (each["rank"], each["host"]) == (rank, socket.gethostname())
        assert each["cores"] == sorted(os.sched_getaffinity(0))
        assert each["ports"][0][0] == each["addresses"][0] == "127.0.0.1"
        assert ["lo", "127.0.0.1", True, facts._mtu("lo")] in each["interfaces"]


def examine_with_one_more(rank: int, world: int) -> list[tuple[str, str, str]] | None:
    place = dataclasses.replace(joining.find(os.environ), world_size=world + 1)
    found = meet(open_store(place, 20), place, 3)
    return None if found is None else [dataclasses.astuple(each) for each in examine(found)]


def test_a_rank_that_does_not_come_is_named():
    first, second = run_ranks(2, examine_with_one_more, backend=None)
    assert second is None
    assert first[0][:2] == ("ranks", PROBLEM)
    assert first[0][2].startswith("rank 2 did not come; those that did are on ")
    assert {name: state for name, state, _ in first}["sharing"] == OK


def test_a_host_that_falls_silent_keeps_no_other_from_hearing_the_time():
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as another:
        answer = another.submit(meeting._ask_the_time, store, 2, time.monotonic() + 60)
        meeting._tell_the_time(store, [1, 2], time.monotonic() + 0.5)
        # Had rank 0 waited for rank 1, this one would have heard nothing, and would still ask.
        _, error = answer.result(timeout=0)
    assert 0 <= error < 1
    assert store.check([f"clock/2/{meeting.ROUNDS - 1}/told"])


def test_a_rank_without_a_store_says_where_it_looked():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        (place,) = [
            each for each in job_of(2, type("Store", (), {"port": closed.getsockname()[1]})) if each["RANK"] == "1"
        ]
        code = "import sys; from ourddp.__main__ import main; sys.exit(main(['doctor', '--timeout', '0.2']))"
        (done,) = run_programs(code, [place])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"rank 1 has no store at 127.0.0.1, port {place['MASTER_PORT']}: Connection refused.")
    assert len(done.stderr.splitlines()) == 1


def test_different_options_are_a_problem_that_ends_with_1():
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = "import sys; from ourddp.__main__ import main; sys.exit(main(['doctor']))"
    done = run_programs(
        code, [{**each, "OURS_INTERNODE": ["tcp", "gloo"][int(each["RANK"])]} for each in job_of(2, store)]
    )
    assert [one.returncode for one in done] == [1, 0], done
    (line,) = [line for line in done[0].stdout.splitlines() if line.startswith("problem")]
    assert "OURS_INTERNODE is tcp on rank 0 but gloo on rank 1" in line
    assert done[1].stdout == ""


@pytest.mark.parametrize("arguments", [("--timeout", "0"), ("--ranks", "0")])
def test_impossible_arguments_are_refused(arguments, capsys):
    from ourddp.__main__ import main

    assert main(["doctor", *arguments]) == 1
    assert capsys.readouterr().err.startswith("--timeout must be greater than 0, and --ranks at least 1")
