"""ourddp.DataParallel: the numbers of one module, what is kept between steps, and what is counted."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import in_ranks
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import ourddp
from ourddp.replicas import Counts, Replicas, Transfer

CPUS = ["cpu"] * 3


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def make_batch(size: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def sgd_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.zero_grad()
    loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    return loss.item()


def counts(model: ourddp.DataParallel) -> dict[str, tuple[int, int]]:
    """Return what has moved: tensors and bytes by kind, but for kinds that have not."""
    return {kind: (count.tensors, count.bytes) for kind, count in model.transfers.items() if count.tensors}


@pytest.mark.parametrize("devices", [["cpu"], CPUS, ["cpu"] * 16], ids=len)
@pytest.mark.parametrize("batch", [1, 2, 10])
def test_trains_like_one_module(devices: list[str], batch: int) -> None:
    one, many = make_net(), ourddp.DataParallel(make_net(), devices)
    for _ in range(3):
        losses = [sgd_step(model, *make_batch(batch)) for model in (one, many)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(list(many.parameters()), list(one.parameters()))


@in_ranks(3)
def test_has_the_gradients_of_ddp(rank: int, world: int) -> None:
    images, labels = make_batch(12)
    many, ddp = ourddp.DataParallel(make_net(), CPUS), ourddp.DistributedDataParallel(make_net())
    functional.cross_entropy(many(images), labels).backward()
    functional.cross_entropy(ddp(images.chunk(world)[rank]), labels.chunk(world)[rank]).backward()
    torch.testing.assert_close(gradients(ddp), gradients(many))


def test_without_devices_the_module_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model = ourddp.DataParallel(make_net())
    images, _ = make_batch()
    assert torch.equal(model(images), model.module(images))
    assert counts(model) == {}


def test_is_torchs_class_and_exchanges_states_with_it() -> None:
    ours, torchs = ourddp.DataParallel(make_net(), CPUS), nn.DataParallel(make_net())
    assert isinstance(ours, nn.DataParallel)
    ours.load_state_dict(torchs.state_dict())
    torchs.load_state_dict(ours.state_dict())


def test_counts_what_a_step_moves_and_sends_only_what_changed() -> None:
    model = ourddp.DataParallel(make_net(), CPUS)
    images, labels = make_batch(9)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    step = {
        "inputs": (2, 2 * 3 * 6 * 4),
        "parameters": (2 * 4, 2 * size),
        "outputs": (2, 2 * 3 * 4 * 4),
        "output_gradients": (2, 2 * 3 * 4 * 4),
        "gradients": (2 * 4, 2 * size),
    }
    for _ in range(2):  # the second step sends what the first has changed
        model.reset_transfers()
        sgd_step(model, images, labels)
        assert counts(model) == step
    model(images)
    model.reset_transfers()
    with torch.no_grad():
        model(images)
    assert counts(model) == {"inputs": step["inputs"], "outputs": step["outputs"]}


class Sent(TorchDispatchMode):
    """Collects the tensors that are copied to the meta device, which stands in for another device here."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default) and result.is_meta:
            self.tensors.append(result)
        return result


def test_all_that_is_sent_is_counted_and_nothing_is_sent_to_see_what_has_changed() -> None:
    net = nn.Sequential(make_net(), nn.BatchNorm1d(4))
    replicas, counts = Replicas([torch.device("meta")]), Counts()
    for changed in (9, 0, 1):
        if changed == 1:
            net[0][2].bias.data.add_(1)
        counts.reset()
        with Sent() as sent:
            replicas.of(net, 1, counts)
        assert len(sent.tensors) == changed
        assert counts["parameters"].tensors + counts["buffers"].tensors == changed


def test_counts_may_begin_anew_between_forward_and_backward() -> None:
    model = ourddp.DataParallel(make_net(), CPUS)
    images, _ = make_batch()
    outputs = model(images)
    model.reset_transfers()
    outputs.sum().backward()
    assert {kind: tensors for kind, (tensors, _) in counts(model).items()} == {"output_gradients": 2, "gradients": 8}


def test_threads_of_backward_lose_no_counts() -> None:
    count, tensor, start = Transfer(), torch.ones(1), threading.Barrier(4)

    def add() -> None:
        start.wait()
        for _ in range(5000):
            count.add([tensor])

    threads = [threading.Thread(target=add) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert count == Transfer(tensors=20000, bytes=80000)


def test_memory_of_replicas_is_kept() -> None:
    places: list[set[int]] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places[-1].add(self.weight.data_ptr())
            return super().forward(x)

    model = ourddp.DataParallel(Watched(6, 4), CPUS)
    for _ in range(3):
        places.append(set())
        sgd_step(model, *make_batch())
    assert len(places[0]) == 3
    assert places[0] == places[1] == places[2]


def test_a_change_that_no_version_tells_of_reaches_the_replicas() -> None:
    model = ourddp.DataParallel(make_net(), CPUS)
    images, _ = make_batch()
    model(images)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    torch.testing.assert_close(model(images), model.module(images))


def test_two_forwards_may_come_before_one_backward() -> None:
    one, many = make_net(), ourddp.DataParallel(make_net(), CPUS)
    images, _ = make_batch()
    for model in (one, many):
        (model(images).sum() + model(2 * images).square().sum()).backward()
    torch.testing.assert_close(gradients(many), gradients(one))


@pytest.mark.parametrize("between", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_a_forward_that_changes_buffers_may_come_before_the_backward_of_another(
    between: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:
    model = ourddp.DataParallel(nn.Sequential(make_net(), nn.BatchNorm1d(4)), CPUS)
    images, _ = make_batch()
    expected, found = (model(images).square().sum() for _ in range(2))
    expected.backward()
    expected_gradients = [gradient.clone() for gradient in gradients(model)]
    model.zero_grad()
    with between():
        model(2 * images)
    found.backward()
    torch.testing.assert_close(gradients(model), expected_gradients)


def test_a_change_between_forward_and_backward_is_an_error_and_no_wrong_gradient() -> None:
    model = ourddp.DataParallel(make_net(), CPUS)
    images, _ = make_batch()
    loss = model(images).sum()
    with torch.no_grad():
        model.module[2].weight.mul_(2)
    model(images)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_shared_frozen_and_unused_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.shared = nn.Linear(6, 6)
            self.shared.weight = self.first.weight
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.unused = nn.Linear(6, 6)
            self.absent = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.shared.weight is self.first.weight
            return self.frozen(self.shared(self.first(x)))

    torch.manual_seed(0)
    one = Net()
    many = ourddp.DataParallel(copy.deepcopy(one), CPUS)
    images, _ = make_batch()
    for model in (one, many):
        model(images).square().sum().backward()
    for ours, theirs in zip(gradients(many), gradients(one), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_buffers_reach_the_replicas_and_those_of_the_module_are_kept() -> None:
    model = ourddp.DataParallel(nn.BatchNorm1d(6), CPUS)
    images, _ = make_batch(9)
    first = nn.BatchNorm1d(6)
    first(images.chunk(3)[0])
    model(images)
    torch.testing.assert_close(model.module.running_mean, first.running_mean)
    model.eval()
    torch.testing.assert_close(model(images), model.module(images))


def test_what_a_replica_writes_to_its_buffers_does_not_last() -> None:
    class CountsZeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("zeros", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x.any():
                self.zeros += 1
            return self.zeros.clone()

    model = ourddp.DataParallel(CountsZeros(), CPUS)
    x = torch.tensor([1.0, 0.0, 0.0])  # no zero for the first replica, whose buffers are the module's
    for _ in range(2):
        assert model(x).tolist() == [0.0, 1.0, 1.0]


def test_attributes_of_layers_reach_the_replicas() -> None:
    model = ourddp.DataParallel(nn.Sequential(nn.Dropout(0.5)), CPUS)
    ones = torch.ones(9, 6)
    assert not torch.equal(model(ones), ones)
    model.module[0].p = 0.0
    assert torch.equal(model(ones), ones)


def test_recurrent_layers() -> None:
    torch.manual_seed(0)
    one = nn.LSTM(6, 5, batch_first=True)
    many = ourddp.DataParallel(copy.deepcopy(one), CPUS)
    steps = torch.randn(6, 4, 6)
    for model in (one, many):
        model(steps)[0].square().sum().backward()
    torch.testing.assert_close(gradients(many), gradients(one))


def test_structures_of_arguments_and_outputs() -> None:
    class Net(nn.Module):
        def forward(self, pair: tuple[Any, Any], *, scale: dict[str, Any]) -> dict[str, Any]:
            return {"sum": (pair[0] + pair[1]) * scale["by"], "batch": [torch.tensor(len(pair[0]))], "name": "a"}

    model = ourddp.DataParallel(Net(), CPUS)
    x = torch.arange(8.0).reshape(8, 1)
    with pytest.warns(UserWarning, match="joined to a vector"):
        output = model((x, 1), scale={"by": torch.tensor(2.0)})
    assert torch.equal(output["sum"], (x + 1) * 2)
    assert output["batch"][0].tolist() == [3, 3, 2]
    assert output["name"] == "a"


def test_another_dimension() -> None:
    torch.manual_seed(0)
    one = nn.RNN(6, 5)
    many = ourddp.DataParallel(copy.deepcopy(one), CPUS, dim=1)
    steps = torch.randn(4, 7, 6)
    for ours, theirs in zip(many(steps), one(steps), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_inputs_and_grad_mode_and_autocast_reach_the_threads() -> None:
    model = ourddp.DataParallel(nn.Linear(6, 4), CPUS)
    images = torch.ones(6, 6, requires_grad=True)
    model(images).sum().backward()
    torch.testing.assert_close(images.grad, model.module.weight.sum(0).expand(6, 6))
    with torch.no_grad():
        assert not model(images).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert model(images).dtype == torch.bfloat16


def test_inference_mode_reaches_the_threads() -> None:
    model = ourddp.DataParallel(nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(6)), CPUS)
    with torch.inference_mode():
        assert model(torch.randn(6, 6)).is_inference()


def test_trains_after_a_first_run_in_inference_mode() -> None:
    one, many = make_net(), ourddp.DataParallel(make_net(), CPUS)
    with torch.inference_mode():
        many(make_batch()[0])
    losses = [[sgd_step(model, *make_batch()) for _ in range(2)] for model in (one, many)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_that_has_run(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = ourddp.DataParallel(make_net(), CPUS)
    images, labels = make_batch()
    model(images)
    other = copied(model)
    assert sgd_step(model, images, labels) == sgd_step(other, images, labels)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="name a device for each replica"):
        ourddp.DataParallel(make_net(), [])
    with pytest.raises(ValueError, match="several types, cpu and meta"):
        ourddp.DataParallel(make_net(), ["cpu", "meta"])
    with pytest.raises(RuntimeError, match=r"0.weight is on meta: .*module.to\('cpu'\)"):
        ourddp.DataParallel(make_net().to("meta"), CPUS)(torch.ones(3, 6))

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            if x[0, 0] == 8:
                raise KeyError("only in the last replica")
            return object()

    model = ourddp.DataParallel(Fails(), CPUS)
    with pytest.raises(ValueError, match="the inputs have 3 and 9 elements along dimension 0"):
        model(torch.ones(9, 1), torch.ones(3, 1))
    x = torch.arange(9.0).reshape(9, 1)
    with pytest.raises(TypeError, match="cannot be joined: return tensors"):
        model(x, x)
    with pytest.raises(KeyError, match="only in the last replica"):
        model(x + 2, x)
