"""How long after the death of a rank the next all-reduce is right: in place, and after a restart by torchrun.

    python benchmarks/recovery.py --trials 50

In place, the ranks call all_reduce without a pause, and one of them, each in its turn, is killed at a random moment.
The others learn who is left as they would from a launcher, and go on with each other by c10d's reconfigure(), of torch
2.15 and later. A process that has started before takes the dead one's place. `--restarts` counts the trials of
torchrun.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import ourddp  # noqa: F401

PATIENCE = datetime.timedelta(seconds=60)
LIMITS = {"those left go on": 1.0, "a replacement joins": 2.0}  # seconds


# --- in place --------------------------------------------------------------------------------------------------------


def check_all_reduce(members: list[str]) -> None:
    """Call all_reduce, and check its result."""
    dist.all_reduce(tensor := torch.full((50_000,), dist.get_rank() + 1.0))
    expected = len(members) * (len(members) + 1) / 2
    if not torch.equal(tensor, torch.full_like(tensor, expected)):
        raise RuntimeError(f"all_reduce gave {tensor[0].item()} instead of {expected}")


def change(store: dist.Store, uuid: int, name: str, ordered: bool) -> list[str]:
    """Become one of the members that the parent names for this change. Return the names of all of them."""
    store.set(f"{uuid}/{name}", c10d._get_reconfigure_handle())
    members = json.loads(store.get(f"members/{uuid}"))
    handles = [store.get(f"{uuid}/{member}").decode() for member in members]
    c10d._reconfigure(uuid=uuid, handles=handles if ordered else set(handles), timeout=PATIENCE).wait()
    check_all_reduce(members)
    store.set(f"done/{uuid}/{name}", str(time.time()))
    return members


def member(name: str, node: str, port: int, begins: int, ordered: bool) -> None:
    """Be a rank from that change on, until a signal comes. Changes with odd numbers are those after a death."""
    torch.set_num_threads(1)
    os.environ["OURS_NODE_ID"] = node
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    store.set(f"ready/{name}", "")
    store.wait([f"begin/{begins}"], datetime.timedelta(days=1))
    own = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    store.set(f"came/{name}", str(time.time()))
    dist.init_process_group("ours", store=own, rank=0, world_size=1, timeout=PATIENCE, enable_reconfigure=True)
    uuid = begins
    while True:
        members = change(store, uuid, name, ordered)
        uuid += 1
        if uuid % 2:
            try:
                while True:
                    check_all_reduce(members)
            except dist.DistNetworkError:
                continue


class Job:
    """The launcher: it starts processes, kills them, and tells the others who is left."""

    def __init__(self, ranks: int, nodes: int, ordered: bool) -> None:
        """Start the ranks, and bring them together."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "ourddp"])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        self._nodes, self._ordered = nodes, ordered
        self._processes: dict[str, Any] = {}
        self._started = 0
        self.uuid = 0
        self.members = [self.start(begins=0) for _ in range(ranks)]
        self.bring_together()

    def start(self, begins: int) -> str:
        """Start a process that waits for its turn. Return its name."""
        name = f"process {self._started}"
        node = f"node {self._started % self._nodes}"
        self._started += 1
        arguments = (name, node, self.store.port, begins, self._ordered)
        self._processes[name] = self._context.Process(target=member, args=arguments, daemon=True)
        self._processes[name].start()
        self.store.wait([f"ready/{name}"])
        return name

    def bring_together(self) -> float:
        """Tell the members who they are. Return the time of the last one that had the result of an all-reduce."""
        self.store.set(f"begin/{self.uuid}", "")
        self.store.set(f"members/{self.uuid}", json.dumps(self.members))
        ends = [float(self.store.get(f"done/{self.uuid}/{name}")) for name in self.members]
        self.uuid += 1
        return max(ends)

    def replace(self, victim: str) -> tuple[float, float]:
        """Kill a member, and let a new process take its place. Return the seconds of both changes."""
        self.members.remove(victim)
        began = time.time()
        self._processes[victim].kill()
        left = self.bring_together() - began
        self._processes.pop(victim).join()
        self.members.append(self.start(begins=self.uuid))
        joined = self.bring_together()
        return left, joined - float(self.store.get(f"came/{self.members[-1]}"))

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.kill()
            process.join()


def in_place(trials: int, ranks: int, nodes: int, ordered: bool) -> dict[str, list[float]]:
    """Return the seconds of each trial, for both changes."""
    chance = random.Random(0)
    job = Job(ranks, nodes, ordered)
    times: dict[str, list[float]] = {name: [] for name in LIMITS}
    try:
        for _ in range(trials):
            time.sleep(chance.uniform(0, 0.05))
            for name, seconds in zip(LIMITS, job.replace(job.members[chance.randrange(ranks)]), strict=True):
                times[name].append(seconds)
    finally:
        job.close()
    return times


# --- torchrun --------------------------------------------------------------------------------------------------------


def restarted(folder: Path) -> None:
    """Be a rank under torchrun: call all_reduce, die once, and write down when things happened."""
    began = float(os.environ["RECOVERY_BEGAN"])
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    loaded = time.time()
    dist.init_process_group("ours")
    last = dist.get_rank() == dist.get_world_size() - 1
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    if again:
        times = {"began": began, "loaded": loaded, "right": time.time()}
        (folder / str(dist.get_rank())).write_text(json.dumps(times))
    elif last:
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        while True:
            dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()


def by_torchrun(ranks: int) -> dict[str, float]:
    """Return the seconds from the death to the first all-reduce of the ranks that were started again, by parts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "rank.py"
        here = str(Path(__file__).resolve().parent)
        program.write_text(
            f"import os, sys, time\nos.environ['RECOVERY_BEGAN'] = str(time.time())\nsys.path.insert(0, {here!r})\n"
            f"import pathlib, recovery\nrecovery.restarted(pathlib.Path({name!r}))\n"
        )
        options = ["--standalone", f"--nproc_per_node={ranks}", "--max_restarts=1", "--monitor_interval=0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(program)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
        times = [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]
        stages = [float((folder / "killed").read_text())]
        stages += [max(each[stage] for each in times) for stage in ("began", "loaded", "right")]
    parts = ["torchrun starts the processes", "they load torch", "they meet, and reduce"]
    return {part: end - begin for part, (begin, end) in zip(parts, itertools.pairwise(stages), strict=True)}


# --- results ---------------------------------------------------------------------------------------------------------


def line(name: str, seconds: list[float], note: str = "") -> str:
    """Return a line of the table."""
    return f"{name:32} median {statistics.median(seconds):7.3f} s   longest {max(seconds):7.3f} s   {note}".rstrip()


def main() -> int:
    """Print the tables. Return 1 if a change in place took longer than its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50, help="in place")
    parser.add_argument("--restarts", type=int, default=3, help="by torchrun")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=1, help="that the ranks play: they talk over TCP")
    parser.add_argument("--unordered", action="store_true", help="let the backend choose the order of the ranks")
    chosen = parser.parse_args()
    good = True
    if chosen.trials and not hasattr(c10d, "_reconfigure"):
        print("in place: torch has reconfigure() from 2.15 on")
    elif chosen.trials:
        print(f"in place: {chosen.trials} kills of one of {chosen.ranks} ranks, on {chosen.nodes} nodes")
        for name, seconds in in_place(chosen.trials, chosen.ranks, chosen.nodes, not chosen.unordered).items():
            within = sum(each < LIMITS[name] for each in seconds)
            good = good and within == len(seconds)
            print(line(f"  {name}", seconds, f"{within} of {len(seconds)} within {LIMITS[name]:g} s"), flush=True)
    if chosen.restarts:
        print(f"by torchrun: {chosen.restarts} restarts of {chosen.ranks} ranks")
        parts = [by_torchrun(chosen.ranks) for _ in range(chosen.restarts)]
        for part in parts[0]:
            print(line(f"  {part}", [each[part] for each in parts]))
        print(line("  in all", [sum(each.values()) for each in parts]))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
