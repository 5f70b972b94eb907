"""Checks of what ranks of one machine share: memory, permissions, descriptors."""

from __future__ import annotations

from ourddp.doctor import words
from ourddp.doctor.facts import Facts
from ourddp.doctor.meeting import Job
from ourddp.doctor.words import OK, PROBLEM, WARNING

LEAST_MEMORY = 512 << 20  # bytes a rank; torch alone takes more than half of it
# Descriptors of a rank: what the process has anyway, and what each group has, alone and for a peer on another host.
BASE, OF_GROUP, OF_REMOTE_PEER, GROUPS = 100, 10, 5, 4


def shared_memory(job: Job) -> tuple[str, str]:
    """Whether each rank gets memory that others could map, and has some left."""
    without = [each for each in job.facts.values() if each.probe_error]
    if without:
        why = without[0].probe_error
        return PROBLEM, f"{words.named(without)} gets no shared memory: {why}. Allow memfd_create (seccomp)"
    for host in job.hosts():
        left = min((each.memory for each in host if each.memory is not None), default=None)
        if left is not None and left < LEAST_MEMORY * len(host):
            return WARNING, (
                f"{left / 2**20:.0f} MiB are left for {words.count(len(host), 'rank')} on {host[0].host}, in its "
                "memory or its control group, where shared memory counts, too. Start fewer ranks or raise the limit"
            )
    lefts = [each.memory for each in job.facts.values() if each.memory is not None]
    return OK, f"memfd works, {min(lefts) / 2**30:.1f} GiB are left" if lefts else "memfd works"


def locked_memory(job: Job) -> tuple[str, str]:
    """Whether pages can be locked where a network device needs it."""
    few = [each for each in job.facts.values() if each.rdma and each.lockable is not None]
    if few:
        return WARNING, (
            f"{words.named(few)} may lock {few[0].lockable} bytes, but {few[0].rdma[0]} works on locked pages if "
            "NCCL or MPI uses it: ulimit -l unlimited"
        )
    return OK, "ours locks no pages, and there is no RDMA device that would"


def sharing(job: Job) -> tuple[str, str]:
    """Whether the ranks of a machine may open each other's memory through /proc/PID/fd."""
    refused = [
        (job.facts[rank], job.facts[peer], why)
        for rank, each in job.trials.items()
        for peer, why in each.memory.items()
        if why
    ]
    if refused:
        one, other, why = refused[0]
        return WARNING, (
            f"{one.name()} cannot open the memory of {other.name()}: {why}. {_cause(one, other)} Such ranks talk over "
            "TCP, which is slower"
        )
    if all(len(machine) == 1 for machine in job.machines()):
        return OK, "no two ranks are on one machine"
    return OK, "ranks of one machine can open each other's memory (/proc/PID/fd)"


def _cause(one: Facts, other: Facts) -> str:
    if one.user != other.user:
        return "They are different users': start them as one."
    names = [name for name in ("pid", "user") if one.namespaces.get(name) != other.namespaces.get(name)]
    if "pid" in names:
        return "They are in different PID namespaces: start containers with --pid=host or a common one."
    if "user" in names:
        return "They are in different user namespaces: give them one, or CAP_SYS_PTRACE."
    return "Is /proc mounted, and does a security policy (AppArmor, SELinux, seccomp, hidepid) deny it?"


def descriptors(job: Job) -> tuple[str, str]:
    """Whether each rank may open as many files as the number of its peers needs."""
    for host in job.hosts():
        streams = max(1, int(host[0].options.get("OURS_TCP_STREAMS", "0")))
        needed = descriptors_needed(len(host), job.size, streams)
        for each in host:
            most = each.most_descriptors
            if most is not None and most < each.descriptors + needed:
                return PROBLEM, (
                    f"{each.name()} may open {most} files; {needed} more than its {each.descriptors} may be needed for "
                    f"{GROUPS} groups of {job.size} ranks. Raise the hard limit: ulimit -Hn, LimitNOFILE of systemd, "
                    "or docker --ulimit"
                )
    limits = [each.most_descriptors for each in job.facts.values() if each.most_descriptors is not None]
    return OK, f"{min(limits)} may be opened" if limits else "there is no limit"


def descriptors_needed(local: int, size: int, streams: int = 1) -> int:
    """Return how many descriptors a rank may need, with ``local`` ranks on its host and ``size`` in all."""
    return BASE + local + GROUPS * (OF_GROUP + (OF_REMOTE_PEER + streams) * (size - local))
