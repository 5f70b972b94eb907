"""Trainings that are resumed: the same bits as without a break, each sample once, and a good checkpoint at any time."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from example_programs import EXAMPLES, Run
from programs import environment, warm_folder
from ranks import in_ranks
from torch import nn
from torch.utils.data import DistributedSampler

from ourddp import Checkpointer, RandomState, ResumableSampler

# --- by torchrun -----------------------------------------------------------------------------------------------------


def test_a_training_that_torchrun_starts_again_has_the_bits_of_one_without_a_break(
    tmp_path: Path, run_example: Run
) -> None:
    """A rank is killed in the midst of an epoch."""
    flags = ["--epochs", "2", "--batch-size", "48", "--save-every", "4"]
    broken_flags = [*flags, "--folder", str(tmp_path / "broken"), "--die", "18"]
    torchrun = [warm_folder() / "torchrun", "--standalone", "--nproc_per_node=2", "--max_restarts=1"]
    command = [*torchrun, "--monitor_interval=0.05", EXAMPLES / "resume.py", *broken_flags]
    broken = subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=100)
    assert broken.returncode == 0, broken.stdout + broken.stderr
    whole = run_example("resume.py", 2, *flags, "--folder", str(tmp_path / "whole"))
    resumed, result = broken.stdout.splitlines()
    assert resumed == "resumed after step 16, sample 96 of epoch 2"
    assert re.fullmatch(r"30 steps, loss [\d.]+, parameters \w{16}", result)
    assert [result] == whole.splitlines()


# --- random numbers --------------------------------------------------------------------------------------------------


def draws() -> list[float]:
    numpy = sys.modules["numpy"]
    return [torch.rand(()).item(), random.random(), float(numpy.random.random())]


@in_ranks(2)
def test_each_rank_gets_its_own_random_numbers_back(rank: int, world: int, tmp_path: Path) -> None:
    __import__("numpy").random.seed(rank)
    torch.manual_seed(rank)
    random.seed(rank)
    model = nn.Linear(2, 2)
    Checkpointer(tmp_path).save(1, model, random=RandomState())
    expected = draws()
    draws()
    assert Checkpointer(tmp_path).load(model, random=RandomState()) == 1
    assert draws() == expected


def save_random_state(rank: int, world: int, folder: Path) -> list[float]:
    torch.manual_seed(rank)
    __import__("numpy")
    Checkpointer(folder).save(1, nn.Linear(2, 2), random=RandomState())
    return draws()


def load_random_state(rank: int, world: int, folder: Path) -> list[float]:
    torch.manual_seed(77)
    __import__("numpy")
    model = nn.Linear(2, 2)
    torch.manual_seed(77)
    Checkpointer(folder).load(model, random=RandomState())
    return draws()


def test_a_rank_that_the_checkpoint_does_not_know_keeps_its_random_numbers(tmp_path: Path, rank_pool: Any) -> None:
    saved = rank_pool(1).run(save_random_state, tmp_path)
    first, second = rank_pool(2).run(load_random_state, tmp_path)
    assert first == saved[0]
    assert second[0] == torch.rand((), generator=torch.Generator().manual_seed(77)).item()


class Unpicklable:
    differs_by_rank = True

    def state_dict(self) -> dict[str, Any]:
        return {"value": (lambda: None) if dist.get_rank() == 1 else 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


@in_ranks(2)
def test_a_checkpoint_has_the_position_of_the_rank_with_most_samples(rank: int, world: int, tmp_path: Path) -> None:
    """Rank 1 has used its share, and does not know that rank 0 has not."""
    model, checkpointer = nn.Linear(1, 1), Checkpointer(tmp_path)
    samplers = {f"sampler_{i}": ResumableSampler(range(5), tail="uneven", shuffle=False) for i in range(4)}
    for sampler in samplers.values():
        assert list(sampler) == [[0, 2, 4], [1, 3]][rank]
        sampler.advance(2)
    checkpointer.save(1, model, **samplers)
    checkpointer.load(model, **samplers)
    assert [sampler.position for sampler in samplers.values()] == [4] * 4


@in_ranks(2)
def test_a_state_of_one_rank_that_cannot_be_saved_is_an_error_on_all(rank: int, world: int, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"step 1 was not saved: objects that cannot be pickled .*: rank 1: "):
        Checkpointer(tmp_path).save(1, nn.Linear(2, 2), own=Unpicklable())


# --- samples ---------------------------------------------------------------------------------------------------------


class Ranks:
    """Samplers of all ranks of a job of that size, in one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: int, state: dict[str, int] | None = None, **how: Any):
        monkeypatch.setattr(ResumableSampler, "_place", lambda sampler: (sampler.rank, world))
        self.all = []
        for rank in range(world):
            sampler = ResumableSampler(range(how.get("samples", 103)), seed=3, tail=how.get("tail", "uneven"))
            sampler.rank = rank
            if state:
                sampler.load_state_dict(state)
            self.all.append(sampler)

    def take(self, batches: int, size: int) -> list[int]:
        """Use up to that many batches, and return the samples of all ranks, ascending."""
        lengths = [len(sampler) for sampler in self.all]
        shares = [list(sampler) for sampler in self.all]
        assert [len(share) for share in shares] == lengths
        for share, sampler in zip(shares, self.all, strict=True):
            del share[batches * size :]
            for begin in range(0, len(share), size):
                sampler.advance(len(share[begin : begin + size]))
        return sorted(itertools.chain(*shares))

    def state(self) -> dict[str, int]:
        states = [sampler.state_dict() for sampler in self.all]
        assert states == states[:1] * len(states)
        return json.loads(json.dumps(states[0]))


@pytest.mark.parametrize("seed", range(20))
def test_each_sample_is_used_once_whatever_the_numbers_of_ranks_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    samples = chance.randrange(1, 120)
    used: list[int] = []
    state = None
    for _ in range(chance.randrange(4)):
        ranks = Ranks(monkeypatch, chance.randrange(1, 7), state, samples=samples)
        used += ranks.take(chance.randrange(4), chance.randrange(1, 5))
        with contextlib.suppress(AssertionError):  # ranks of an uneven end
            state = ranks.state()
            continue
        break
    else:
        used += Ranks(monkeypatch, chance.randrange(1, 7), state, samples=samples).take(samples, 1)
        assert sorted(used) == list(range(samples))
        return
    assert len(set(used)) == len(used)


@pytest.mark.parametrize(("tail", "drop_last"), [("repeat", False), ("drop", True)])
def test_the_order_is_that_of_torch(tail: str, drop_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for samples, world in itertools.product([1, 3, 12, 103], [1, 2, 4, 5]):
        ranks = Ranks(monkeypatch, world, samples=samples, tail=tail)
        for rank, sampler in enumerate(ranks.all):
            theirs = DistributedSampler(range(samples), world, rank, seed=3, drop_last=drop_last)
            for epoch in (0, 1):
                sampler.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(sampler) == list(theirs), (samples, world, rank)
                assert len(sampler) == len(theirs)


@pytest.mark.parametrize(("tail", "twice", "unused"), [("repeat", 3, 0), ("drop", 0, 1)])
def test_only_the_end_of_an_epoch_is_repeated_or_dropped(
    tail: str, twice: int, unused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Ranks(monkeypatch, 3, samples=102, tail=tail)
    used = first.take(3, 3)  # 27 samples; 75 are left, for 2 and then 4 ranks
    second = Ranks(monkeypatch, 2, first.state(), samples=102, tail=tail)
    used += second.take(5, 1)  # 65 are left
    last = Ranks(monkeypatch, 4, second.state(), samples=102, tail=tail)
    used += last.take(99, 5)
    assert len(used) == 102 + twice - unused
    assert len(set(used)) == 102 - unused
    assert last.state()["position"] == 102
    assert last.take(9, 9) == []
    for sampler in last.all:
        sampler.set_epoch(1)
    assert len(last.take(1, 2)) == 8
    assert last.state() == {"epoch": 1, "position": 8, "samples": 102, "seed": 3}


def test_a_sampler_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="tail must be one of repeat, drop, uneven; got 'wrap'"):
        ResumableSampler([], tail="wrap")
    sampler = ResumableSampler(range(5), seed=1)
    with pytest.raises(ValueError, match=r"0 of its 0 are left\. Call advance"):
        sampler.advance(1)
    assert len(list(sampler)) == 5
    sampler.advance(3)
    with pytest.raises(ValueError, match="cannot have used 3 samples: 2 of its 5 are left"):
        sampler.advance(3)
    with pytest.raises(ValueError, match="saved with samples 5, and this one has samples 6"):
        ResumableSampler(range(6), seed=1).load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="saved with seed 1, and this one has seed 0"):
        ResumableSampler(range(5)).load_state_dict(sampler.state_dict())


def use_some(rank: int, world: int, folder: Path, batches: int) -> list[int]:
    """Go on from the checkpoint in the folder, use some batches of two, and save."""
    sampler = ResumableSampler(range(60), seed=1)
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(folder)
    step = checkpointer.load(model, sampler=sampler) or 0
    used: list[int] = []
    loader = torch.utils.data.DataLoader(range(60), 2, sampler=sampler)
    for batch in itertools.islice(loader, batches):
        used += batch.tolist()
        sampler.advance(len(batch))
    checkpointer.save(step + batches, model, sampler=sampler)
    return used


def test_other_ranks_go_on_with_the_samples_that_are_left(tmp_path: Path, rank_pool: Any) -> None:
    used = [rank_pool(world).run(use_some, tmp_path, batches) for world, batches in [(2, 3), (3, 4), (1, 99)]]
    assert sorted(itertools.chain(*itertools.chain(*used))) == list(range(60))


# --- checkpoints while processes die ---------------------------------------------------------------------------------

TRIALS = 50
ENOUGH_S = 40  # on a busy machine there are fewer trials


def weights_of(step: int) -> torch.Tensor:
    return torch.full((64, 64), float(step))


def make_model(step: int) -> nn.Module:
    model = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight.copy_(weights_of(step))
    return model


def join(rank: int, world: int, port: int, name: str) -> None:
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("ours", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=30))


def save_until_killed(folder: Path, acknowledge: int) -> None:
    """Save steps in turn, and tell of each that has been saved."""
    checkpointer = Checkpointer(folder, keep=1)
    for step in itertools.count(max(checkpointer.steps(), default=0) + 1):
        checkpointer.save(step, make_model(step))
        os.write(acknowledge, step.to_bytes(8, "little"))


def in_fork(body: Any) -> int:
    """Run ``body`` in a child process; it ends with status 0 if that returns, and otherwise 1."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            body()
            status = 0
        os._exit(status)
    return pid


def kill_while_saving(rank: int, world: int, folder: Path, ranks: int) -> list[int]:
    """Kill one of some ranks at a random moment, again and again. Return the steps that were found afterwards."""
    import torch.distributed.checkpoint  # noqa: F401, so that the children have it

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    chance = random.Random(ranks)
    found: list[int] = []
    deadline = time.monotonic() + ENOUGH_S
    for trial in range(TRIALS // ranks):
        if len(found) >= 4 and time.monotonic() > deadline:
            break
        acknowledged, acknowledge = os.pipe()

        def body(own: int, trial: int = trial, acknowledge: int = acknowledge) -> None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # no tracebacks of ranks that are meant to fail
            join(own, ranks, server.port, f"trial {trial}")
            save_until_killed(folder, acknowledge if own == 0 else os.open(os.devnull, os.O_WRONLY))

        pids = [in_fork(lambda own=own: body(own)) for own in range(ranks)]
        os.close(acknowledge)
        try:
            assert select.select([acknowledged], [], [], 60)[0], "no checkpoint was saved"
            time.sleep(chance.uniform(0, 0.05))
            os.kill(pids[trial % ranks], signal.SIGKILL)
            ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        except BaseException:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            raise
        assert ends.pop(trial % ranks) == -signal.SIGKILL
        assert ends == [1] * (ranks - 1)
        with os.fdopen(acknowledged, "rb") as pipe:
            last = int.from_bytes(pipe.read()[-8:], "little")
        found.append(check_folder(folder, server.port, f"check {trial}", last))
    return found


def check_folder(folder: Path, port: int, name: str, last: int) -> int:
    """Load the checkpoint as a new process does. Return its step, which is ``last`` or the one after it."""
    answer, say = os.pipe()

    def load() -> None:
        join(0, 1, port, name)
        model = make_model(0)
        step = Checkpointer(folder, keep=1).load(model)
        assert step in (last, last + 1)
        assert torch.equal(model.weight, weights_of(step))
        assert os.listdir(folder) == [f"step-{step}"] or len(os.listdir(folder)) == 2  # the older one was not removed
        os.write(say, step.to_bytes(8, "little"))

    pid = in_fork(load)
    os.close(say)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with os.fdopen(answer, "rb") as pipe:
        step = int.from_bytes(pipe.read(), "little")
    assert status == 0, f"{sorted(os.listdir(folder))} after step {last}"
    return step


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_good_checkpoint_survives_kills_at_random_moments(ranks: int, tmp_path: Path, rank_pool: Any) -> None:
    [found] = rank_pool(1, None).run(kill_while_saving, tmp_path, ranks, timeout=110)
    assert found == sorted(set(found))  # each trial got further than the one before
