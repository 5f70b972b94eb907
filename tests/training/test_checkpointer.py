"""Checkpoints: any model into any other, the best and the last ones, and what stays when something fails or dies."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, in_ranks
from torch import nn

import ourddp
from ourddp import Checkpointer
from ourddp.checkpoint_folder import CheckpointFolder

KINDS = ["plain", "ddp", "sharded", "distributed optimizer"]


def training(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    if kind == "ddp":
        model = ourddp.DistributedDataParallel(model)
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if kind == "distributed optimizer":
        optimizer = ourddp.DistributedOptimizer(optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        model(inputs).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    """Return all parameters in one dimension, those of shards put together."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@in_ranks(2, timeout=100)
@pytest.mark.parametrize("kind", KINDS)
def test_any_model_is_loaded_into_any_other(rank: int, world: int, tmp_path: Path, kind: str) -> None:
    model, optimizer = training(kind, seed=0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, 2)
    schedule.step()
    checkpointer = Checkpointer(tmp_path / "new" / "folder")
    assert checkpointer.load(model, optimizer) is None
    assert checkpointer.save(2, model, optimizer, schedule=schedule) == tmp_path / "new" / "folder" / "step-2"
    saved = weights(model)
    train(model, optimizer, 2)
    for other in KINDS:
        again, its_optimizer = training(other, seed=1)
        its_schedule = torch.optim.lr_scheduler.ExponentialLR(its_optimizer, 0.5)
        assert checkpointer.load(again, its_optimizer, schedule=its_schedule) == 2
        assert torch.equal(weights(again), saved), other
        assert its_schedule.last_epoch == 1
        assert its_optimizer.param_groups[0]["lr"] == 0.05
        train(again, its_optimizer, 2)
        torch.testing.assert_close(weights(again), weights(model))  # the moments are those that were saved
    alone, _ = training("plain", seed=1)
    assert checkpointer.load(alone) == 2
    assert torch.equal(weights(alone), saved)


def save_by_four(rank: int, world: int, folder: Path) -> torch.Tensor:
    model, optimizer = training("sharded", seed=0)
    train(model, optimizer, 1)
    Checkpointer(folder).save(1, model, optimizer)
    return weights(model)


def load_by_one(rank: int, world: int, folder: Path) -> torch.Tensor:
    model, optimizer = training("plain", seed=1)
    assert Checkpointer(folder).load(model, optimizer) == 1
    return weights(model)


def test_another_number_of_ranks_loads_a_checkpoint(tmp_path: Path, rank_pool: Any) -> None:
    saved = rank_pool(4).run(save_by_four, tmp_path)
    [loaded] = rank_pool(1).run(load_by_one, tmp_path)
    assert torch.equal(loaded, saved[0])


@in_ranks(2)
def test_the_last_ones_and_the_best_one_stay(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer = training("plain", seed=0)
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step, metric in enumerate([3.0, 1.0, float("nan"), 2.0, 1.5]):
        train(model, optimizer, 1)
        # That of rank 0 counts.
        assert checkpointer.save(step, model, optimizer, metric=metric if rank == 0 else -5.0) is not None
        if step == 1:
            best = weights(model)
    assert names(tmp_path) == ["step-1", "step-3", "step-4"]
    assert checkpointer.steps() == {1: 1.0, 3: 2.0, 4: 1.5}
    latest = weights(model)
    assert checkpointer.load(model, optimizer, which="best") == 1
    assert torch.equal(weights(model), best)
    assert checkpointer.load(model, optimizer, which=3) == 3
    assert checkpointer.load(model, optimizer) == 4
    assert torch.equal(weights(model), latest)


@in_ranks(2)
def test_one_of_a_training_that_went_back_stays(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer = training("plain", seed=0)
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step, metric in ((1, 1.0), (3, 2.0), (4, 3.0)):
        checkpointer.save(step, model, optimizer, metric=metric)
    assert checkpointer.load(model, optimizer, which="best") == 1
    path = checkpointer.save(2, model, optimizer, metric=4.0)
    assert names(tmp_path) == ["step-1", "step-2", "step-3", "step-4"]
    assert path == tmp_path / "step-2"


@in_ranks(2)
def test_only_the_best_are_saved(rank: int, world: int, tmp_path: Path) -> None:
    model, _ = training("plain", seed=0)
    checkpointer = Checkpointer(tmp_path, save_best_only=True, mode="max", keep=1)
    saved = [
        checkpointer.save(step, model, metric=metric) is not None
        for step, metric in enumerate([float("nan"), 0.5, 0.5, 0.7, 0.6])
    ]
    assert saved == [False, True, False, True, False]
    assert names(tmp_path) == ["step-3"]
    # A later run knows what the best one was.
    again = Checkpointer(tmp_path, save_best_only=True, mode="max", keep=1)
    assert again.save(9, model, metric=torch.tensor(0.65)) is None
    with pytest.raises(
        RuntimeError, match="step 9 was not saved: rank 0: with save_best_only a checkpoint needs a metric"
    ):
        again.save(9, model)


@in_ranks(2)
def test_a_step_that_is_saved_again_is_replaced(rank: int, world: int, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    for seed in (0, 1):
        model, optimizer = training("plain", seed)
        checkpointer.save(5, model, optimizer)
    assert names(tmp_path) == ["step-5"]
    other, _ = training("plain", seed=2)
    checkpointer.load(other)
    assert torch.equal(weights(other), weights(model))


class Visited:
    """Lets another job load from the folder while a checkpoint is being written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.found: int | None = None

    def state_dict(self) -> dict[str, Any]:
        assert (self._folder / ".step-2.temporary").is_dir()
        self.found = Checkpointer(self._folder).load(training("plain", seed=1)[0])
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@in_ranks(2)
def test_a_job_that_loads_leaves_alone_what_another_one_is_writing(rank: int, world: int, tmp_path: Path) -> None:
    model, _ = training("plain", seed=0)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model)
    visited = Visited(tmp_path)
    checkpointer.save(2, model, visited=visited)
    assert visited.found == 1
    assert names(tmp_path) == ["step-1", "step-2"]


# --- failures --------------------------------------------------------------------------------------------------------


class Fails:
    """Has a state that cannot be had on rank 1, or cannot be written by any rank that writes it."""

    def __init__(self, on_rank: int | None) -> None:
        self._fails = on_rank == dist.get_rank()
        self._everywhere = on_rank is None

    def state_dict(self) -> dict[str, Any]:
        if self._fails:
            raise OSError("no state")
        return {"value": Refuses() if self._everywhere else 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be written")


@in_ranks(2)
def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_what_there_was(
    rank: int, world: int, tmp_path: Path
) -> None:
    model, optimizer = training("plain", seed=0)
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, model, optimizer)
    with pytest.raises(RuntimeError, match=r"step 2 was not saved.*rank 1: OSError: no state"):
        checkpointer.save(2, model, optimizer, other=Fails(on_rank=1))
    with pytest.raises(RuntimeError, match=r"step 2 was not saved.*: rank .: RuntimeError: .*cannot be written"):
        checkpointer.save(2, model, optimizer, other=Fails(on_rank=None))
    with pytest.raises(RuntimeError, match="rank 1: TypeError: epoch is of type int; what goes into a checkpoint must"):
        checkpointer.save(2, model, optimizer, epoch=3 if rank == 1 else copy.deepcopy(model))
    dist.barrier()  # rank 0 has removed what was written
    with pytest.raises(RuntimeError, match="different steps: rank 0 passes 2, rank 1 passes 3"):
        checkpointer.save(2 + rank, model, optimizer)
    assert names(tmp_path) == ["step-1"]
    assert checkpointer.load(model, optimizer) == 1


@in_ranks(2)
def test_old_checkpoints_that_cannot_be_removed_do_not_hide_that_the_new_one_is_saved(
    rank: int, world: int, tmp_path: Path
) -> None:
    model, _ = training("plain", seed=0)
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, model)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("busy")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer._folder, "_remove", refuse)
        with pytest.raises(RuntimeError, match=r"step 2 was saved, but not all older ones .*: rank 0: OSError: busy"):
            checkpointer.save(2, model)
    assert names(tmp_path) == ["step-1", "step-2"]


@in_ranks(2)
def test_a_step_whose_replacement_fails_stays(rank: int, world: int, tmp_path: Path) -> None:
    model, _ = training("plain", seed=0)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == ".step-1.temporary":
            raise OSError("no")
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(RuntimeError, match="step 1 was not saved: rank 0: OSError: no"):
            checkpointer.save(1, model)
        dist.barrier()  # rank 0 has removed what was written
    assert names(tmp_path) == ["step-1"]


@in_ranks(2)
def test_what_cannot_be_loaded_is_an_error_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer = training("plain", seed=0)
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(RuntimeError, match="there is none of step 7; it is empty"):
        checkpointer.load(model, which=7)
    assert checkpointer.load(model, which="best") is None
    checkpointer.save(1, model)
    with pytest.raises(RuntimeError, match="there is none of step 7; it has 1"):
        checkpointer.load(model, which=7 if rank == 0 else "latest")
    with pytest.raises(RuntimeError, match="none has a metric; load the latest"):
        checkpointer.load(model, which="best")
    with pytest.raises(RuntimeError, match=r"step 1 was not loaded from .*optimizer"):
        checkpointer.load(model, optimizer)
    with pytest.raises(RuntimeError, match=r"step 1 was not loaded from .*Size mismatch"):
        checkpointer.load(nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2)))
    dist.barrier()
    if rank == 0:
        (tmp_path / "step-1" / "checkpoint.json").write_text("{")
    with pytest.raises(RuntimeError, match=r"no checkpoint was loaded from .*JSONDecodeError"):
        checkpointer.load(model)


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path, rank_pool: Any) -> None:
    (tmp_path / "file").touch()
    rank_pool(2).run(cannot_be_made, tmp_path / "file" / "folder")


def cannot_be_made(rank: int, world: int, folder: Path) -> None:
    with pytest.raises(RuntimeError, match=f"the folder {folder} cannot be used: rank 0: NotADirectoryError"):
        Checkpointer(folder)


@in_ranks(1)
def test_arguments_that_do_not_fit_are_refused(rank: int, world: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="mode must be 'min' or 'max'; got 'least'"):
        Checkpointer(tmp_path, mode="least")
    with pytest.raises(RuntimeError, match="steps are numbers from 0; got -1"):
        Checkpointer(tmp_path).save(-1, nn.Linear(1, 1))


def test_a_checkpointer_needs_a_job(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"call ourddp\.init\(\) first"):
        Checkpointer(tmp_path)


POINTS = ["before dcp", "written", "old aside", "in place", "old removed"]


def die_at(rank: int, world: int, folder: Path, point: str) -> None:
    """Save one checkpoint, and die while another one of the same step is saved."""
    model, _ = training("plain", seed=0)
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(0, model)
    checkpointer.save(1, model, metric=1.0)

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    from torch.distributed import checkpoint as dcp

    from ourddp import checkpoint_folder

    rename, renames = Path.rename, []

    def renaming(self: Path, target: Path) -> Path:
        if point == "old aside" and len(renames) == 1:
            die()
        renames.append(target)
        return rename(self, target)

    if point == "before dcp":
        dcp.save = die
    elif rank == 0:
        if point == "written":
            checkpoint_folder.json.dump = die
        elif point == "old aside":
            Path.rename = renaming  # type: ignore[method-assign]
        elif point == "in place":
            checkpoint_folder._sync = lambda path: die() if path == folder else None
        else:
            remove = shutil.rmtree
            shutil.rmtree = lambda path, **how: die() if path.name == ".step-1.replaced" else remove(path, **how)
    with pytest.raises(RuntimeError):
        checkpointer.save(1, training("plain", seed=1)[0], metric=0.5)
    raise SystemExit  # rank 1: the group is gone


def loaded(rank: int, world: int, folder: Path) -> tuple[int | None, torch.Tensor]:
    model, _ = training("plain", seed=2)
    checkpointer = Checkpointer(folder, keep=1)
    step = checkpointer.load(model)
    assert checkpointer.save(1, model, metric=0.2) is not None
    return step, weights(model)


@pytest.mark.parametrize("point", POINTS)
def test_a_whole_checkpoint_is_there_whenever_rank_0_dies(point: str, tmp_path: Path, rank_pool: Any) -> None:
    with RankPool(1) as ranks:
        ranks.run(die_at, tmp_path, point, killed=[0])
    [(step, found)] = rank_pool(1).run(loaded, tmp_path)
    assert step == 1
    expected = weights(training("plain", seed=1 if point in ("in place", "old removed") else 0)[0])
    assert torch.equal(found, expected)
    assert names(tmp_path) == ["step-1"]
    assert json.loads((tmp_path / "step-1" / "checkpoint.json").read_text()) == {"step": 1, "metric": 0.2}


def test_a_checkpoint_may_be_removed_while_another_job_looks_for_one(tmp_path, monkeypatch):
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "checkpoint.json").write_text(f'{{"step": {step}, "metric": 0.5}}')
    read = Path.read_text

    def remove_and_read(path: Path) -> str:
        if (tmp_path / "step-1").exists():
            shutil.rmtree(tmp_path / "step-1")
        return read(path)

    monkeypatch.setattr(Path, "read_text", remove_and_read)
    assert CheckpointFolder(tmp_path, 1).steps() == {2: 0.5}
