"""The examples that each show one way of parallel training."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from example_programs import EXAMPLES, Run, import_example
from programs import ROOT, job, run_file
from ranks import in_ranks

SHORT = ("--steps", "16", "--batch-size", "12")
# torch compiles the model in each run; only what the C++ compiler makes of its kernels is kept, by their text.
COMPILER = {
    "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build" / "inductor"),
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}
EXACT = {
    "one process",
    "DataParallel",
    "DistributedDataParallel",
    "fully sharded",
    "cut by layer",
    "cut by slice",
    "parameter server, sync",
    "central storage",
}


def loss_in(output: str) -> float:
    """Return the last loss that a program prints; guessing costs log(10) = 2.3."""
    found = re.search(r"loss ([\d.]+)", output)
    assert found is not None, output
    return float(found[1])


def test_all_ways_that_wait_for_each_other_have_the_losses_of_one_process(run_example: Run, tmp_path: Path) -> None:
    files = ("--metrics", str(tmp_path / "losses.json"), "--plot", str(tmp_path / "losses.png"))
    output = run_example("compare.py", 4, *SHORT, *files)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses.keys() > EXACT
    for name, curve in losses.items():
        assert len(curve) == 16
        if name in EXACT:
            assert curve == pytest.approx(losses["one process"], rel=1e-4), name
        else:
            assert min(curve) < curve[0], name  # it learns
        assert f"| {name} | " in output
    # What a rank keeps, in KiB: all ways but one keep everything.
    kept = {
        row[1]: float(row[2].replace(",", "")) for row in re.finditer(r"\| ([^|]+) \| [^|]+ \| ([\d,]+) KiB", output)
    }
    assert kept["fully sharded"] == pytest.approx(kept["DistributedDataParallel"] / 4, rel=0.02)
    assert kept["DataParallel"] == pytest.approx(kept["one process"] * 4.5, rel=0.01)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mode", ["sync", "async", "bounded"])
def test_parameter_servers(run_example: Run, mode: str) -> None:
    flags = ("--steps", "200", "--batch-size", "12", "--servers", "2", "--mode", mode)
    output = run_example("parameter_server.py", 4, *flags)
    accuracy = re.search(r"held-out accuracy ([\d.]+)%", output)
    assert accuracy is not None, output
    # Even a worker that runs through all its steps before the other begins gets to 80 %.
    assert float(accuracy[1]) > 60


@pytest.mark.parametrize("way", ["periodic", "gossip"])
def test_local_sgd(run_example: Run, way: str) -> None:
    assert loss_in(run_example("local_sgd.py", 3, "--steps", "90", "--batch-size", "12", "--way", way)) < 2.2


@pytest.mark.parametrize("way", ["periodic", "gossip"])
@in_ranks(3)
def test_local_sgd_ends_with_one_model(rank: int, world: int, way: str) -> None:
    local_sgd = import_example("local_sgd")
    # The last step is not one that averages, and after two steps of gossip not all ranks have met.
    args = argparse.Namespace(steps=2, batch_size=12, lr=0.1, seed=0, way=way, period=2)
    _, model = local_sgd.train(args, rank, world)
    mine = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    of_first = mine.clone()
    dist.broadcast(of_first, 0)
    torch.testing.assert_close(mine, of_first, rtol=0, atol=0)


def test_central_storage(run_example: Run) -> None:
    assert loss_in(run_example("central_storage.py", 2, "--steps", "90", "--batch-size", "12")) < 2.2


def test_data_parallel_counts_its_transfers(run_example: Run) -> None:
    output = run_example("data_parallel.py", 1, *SHORT, "--replicas", "3")
    # Two replicas beside the first, each with 8 parameters of 605,224 bytes in all.
    for kind in ("parameters", "gradients"):
        assert re.search(rf"^{kind} +16 tensors, +1,210,448 bytes$", output, re.M)


def test_sharding_changes_the_memory_and_not_the_loss(run_example: Run) -> None:
    flags = ("--steps", "6", "--batch-size", "8", "--width", "32", "--corpus", "20000")
    whole = run_example("sharded.py", 4, *flags, "--way", "ddp")
    kept = {}
    for way in ("ddp", "zero", "fsdp"):
        output = run_example("sharded.py", 4, *flags, "--way", way)
        assert loss_in(output) == pytest.approx(loss_in(whole), rel=1e-4)
        kept[way] = {what: int(size.replace(",", "")) for what, size in re.findall(r"(\w+) ([\d,]+) bytes", output)}
    for what in ("parameters", "gradients", "optimizer"):
        assert kept["fsdp"][what] == pytest.approx(kept["ddp"][what] / 4, rel=0.1)
    assert kept["zero"]["optimizer"] == pytest.approx(kept["ddp"]["optimizer"] / 4, rel=0.25)


def test_a_sharded_checkpoint_continues_with_other_ranks(run_example: Run, tmp_path: Path) -> None:
    flags = ("--batch-size", "8", "--width", "32", "--corpus", "20000", "--checkpoint", str(tmp_path / "checkpoint"))
    first = run_example("sharded.py", 4, *flags, "--steps", "6", "--way", "fsdp")
    again = run_example("sharded.py", 2, *flags, "--steps", "6", "--way", "ddp")
    assert loss_in(again) < loss_in(first)


def test_a_server_lets_no_worker_get_further_ahead_than_the_bound() -> None:
    server = import_example("parameter_server")
    steps = [3, 5, 4]
    assert [server.may_go_on(steps, worker, 1) for worker in range(3)] == [True, False, True]
    assert [server.may_go_on(steps, worker, 0) for worker in range(3)] == [True, False, False]
    assert all(server.may_go_on(steps, worker, None) for worker in range(3))


@in_ranks(3)
def test_a_slow_worker_stalls_no_other_of_an_asynchronous_server(rank: int, world: int) -> None:
    server, ways = import_example("parameter_server"), import_example("ways")
    store = dist.distributed_c10d._get_default_store()
    images, labels = torch.ones(2, 1, 8, 8), torch.tensor([1, 2])
    model = ways.model(0)
    if rank == 2:
        start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        server.Server(start, 2, 0.1, "async", 0).serve(5)
        return
    if rank == 1:
        store.wait(["rank 0 has taken all its steps"])
    worker = server.Worker(model, [2])
    for _ in range(5):
        worker.step(images, labels)
    if rank == 0:
        store.set("rank 0 has taken all its steps", "")


def test_a_server_and_an_all_reduce_are_compared(run_example: Run, tmp_path: Path) -> None:
    flags = ("--elements", "1000", "--rounds", "2", "--plot", str(tmp_path / "scaling.png"))
    output = run_example("server_and_ring.py", 4, *flags)  # which checks every sum
    # Of 4,000 bytes: 2 x 2 and 3 x 2 through the server, but 2 x 2 x 1/2 and 2 x 2 x 2/3 through a rank of a ring.
    assert re.findall(r"^\| (\d) \|.* \| ([\d.]+) MiB \| ([\d.]+) MiB \|$", output, re.M) == [
        ("2", "0.015", "0.008"),
        ("3", "0.023", "0.010"),
    ]
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_gossip_meets_every_rank_in_turn() -> None:
    partner_of = import_example("local_sgd").partner_of
    for ranks in (1, 2, 3, 4, 7):
        for step in range(ranks):
            pairs = [partner_of(rank, ranks, step) for rank in range(ranks)]
            assert [pairs[other] for other in pairs] == list(range(ranks))
        assert all(
            {partner_of(rank, ranks, step) for step in range(ranks)} == set(range(ranks)) for rank in range(ranks)
        )


@pytest.mark.parametrize(
    ("name", "flags", "refusal"),
    [
        ("parameter_server.py", (), "1 ranks cannot be 1 servers and at least one worker"),
        ("sharded.py", ("--way", "zero", "--checkpoint", "x"), "use --way fsdp"),
        ("compare.py", (), "one rank has nothing to compare"),
        ("server_and_ring.py", (), "1 ranks are too few for two workers and a server"),
    ],
)
def test_what_is_impossible_is_refused_in_one_line(name: str, flags: tuple[str, ...], refusal: str) -> None:
    [(status, output)] = run_file(EXAMPLES / name, *flags)
    assert status == 1
    assert refusal in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("flag", ["--steps", "--batch-size"])
def test_a_training_without_steps_or_samples_is_refused(flag: str) -> None:
    [(status, output)] = run_file(EXAMPLES / "parameter_server.py", flag, "0")
    assert status == 2
    assert f"argument {flag}: 0 is not at least 1" in output


@pytest.mark.parametrize(
    ("name", "flags", "shown"),
    [
        ("model_parallel.py", (), "    3     3  "),
        ("model_parallel.py", ("--data", "2", "--schedule", "gpipe"), "    1     1  "),
        ("tensor_parallel.py", (), "rank 0 has 42,634 of 170,122 weights"),
        ("tensor_parallel.py", ("--tensor", "2", "--data", "2"), "rank 0 has 42,5"),
    ],
)
def test_models_that_are_cut_train_like_one_process(
    name: str, flags: tuple[str, ...], shown: str, run_example: Run
) -> None:
    output = run_example(name, 4, "--epochs", "2", "--check", *flags)
    assert shown in output
    difference = re.search(r"largest difference to the losses of one process: (\S+)", output)
    assert difference is not None
    assert float(difference[1]) < 1e-9  # sums in another order differ in their last bits
    assert re.search(r"held-out accuracy: [\d.]+%$", output)


@pytest.mark.parametrize(("ranks", "flag"), [(4, "--no-compile"), (2, "--compile")])
def test_inference_with_slices_writes_what_one_process_does(ranks: int, flag: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    each = [{**env, **COMPILER} for env in job(ranks, store)]
    flags = ("--check", "--layers", "1", "--length", "8", flag)
    [(status, output), *others] = run_file(EXAMPLES / "tensor_parallel_inference.py", *flags, each=each)
    assert [status, *(code for code, _ in others)] == [0] * ranks, output
    assert "same tokens as one process: True" in output
    difference = re.search(r"largest difference to the logits of one process: (\S+)", output)
    assert difference is not None
    assert float(difference[1]) < 1e-5


@pytest.mark.parametrize("name", ["model_parallel.py", "tensor_parallel.py"])
def test_a_mesh_that_does_not_fit_the_ranks_is_refused(name: str) -> None:
    [(status, output)] = run_file(EXAMPLES / name, "--data", "2")
    assert (status, output.count("\n")) == (1, 1)
    assert "--data 2" in output
