"""Code of the program that looks at gradients during backward sees this rank's own, in whatever way it looks.

Each way to look is tried with torch's class and with ours. Before it looks, it waits for all reductions that have been
started, as averages of which half has arrived are what it must not see.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ddp_cases import CLASSES, TorchDDP, bitwise_equal_everywhere
from gradient_cases import WIDTH
from observation_cases import LAYERS, WAYS, Layers, Mode, Outer, loss_of
from ranks import in_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from ourddp import DistributedDataParallel, SyncBatchNorm


def _batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, WIDTH, generator=generator).requires_grad_()


def _seen(cls, way, rank, meddles):
    """Return what each look of the last step found, and the gradients after it."""
    model = cls(Layers(), bucket_cap_mb=0.05)
    seen = []

    def look(*_):
        dist.all_reduce(torch.zeros(1))  # comes after all reductions that have begun
        for name, parameter in model.module.named_parameters():
            if parameter.grad is not None:
                seen.append((name, parameter.grad.clone()))
                if meddles:
                    parameter.grad.clamp_(-0.01, 0.01)

    for step in range(2):  # the buckets of the first step are not those of the others
        for kind in ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks"):
            for part in model.modules():
                getattr(part, kind).clear()
        seen.clear()
        model.zero_grad()
        x = _batch(rank, step)
        found = WAYS[way](model, look, x)
        loss = found if torch.is_tensor(found) else loss_of(model, x)
        with found if isinstance(found, Mode) else nullcontext():
            loss.backward()
    return seen, {name: p.grad for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("meddles", [False, True], ids=["reads", "changes"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@in_ranks(2)
def test_code_of_the_program_sees_what_it_sees_with_torchs_class(rank, world, way, meddles):
    theirs, mine = (_seen(cls, way, rank, meddles) for cls in CLASSES)
    assert mine[0], "nothing was seen"
    assert [name for name, _ in mine[0]] == [name for name, _ in theirs[0]]
    for (name, found), (_, expected) in zip(mine[0], theirs[0], strict=True):
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
    for name, gradient in mine[1].items():
        torch.testing.assert_close(gradient, theirs[1][name])
        assert bitwise_equal_everywhere(gradient)


def _own(model, x):
    """Return the gradients of this rank alone."""
    alone = Layers()
    alone.load_state_dict(model.module.state_dict())
    alone(x.detach()).square().sum().backward()
    return {name: p.grad for name, p in alone.named_parameters()}


@in_ranks(2)
def test_between_two_backwards_of_a_step_gradients_are_those_of_the_rank(rank, world):
    """Between two backwards of one step the program sees what the first has brought."""
    model = DistributedDataParallel(Layers(), bucket_cap_mb=0.05)
    for step in range(2):
        model.zero_grad()
        x = _batch(rank, step)
        own = _own(model, x)
        loss = model(x).square().sum()
        *rest, weight, bias = model.module.parameters()
        loss.backward(inputs=[weight, bias], retain_graph=True)
        dist.all_reduce(torch.zeros(1))
        torch.testing.assert_close(weight.grad, own["layers.2.weight"])
        torch.testing.assert_close(bias.grad, own["layers.2.bias"])
        loss.backward(inputs=rest)
        for name, gradient in own.items():
            dist.all_reduce(gradient)
            torch.testing.assert_close(model.module.get_parameter(name).grad, gradient / world)


@pytest.mark.skipif(not hasattr(TorchDDP, "finalize_backward"), reason="this torch has no manual finalization")
@in_ranks(2)
def test_before_a_backward_is_finalised_gradients_are_those_of_the_rank(rank, world):
    model = DistributedDataParallel(Layers(), bucket_cap_mb=0.05)
    model.require_manual_backward_finalization = True
    for step in range(2):
        model.zero_grad()
        x = _batch(rank, step)
        own = _own(model, x)
        model(x).square().sum().backward()
        dist.all_reduce(torch.zeros(1))
        for name, parameter in model.module.named_parameters():
            torch.testing.assert_close(parameter.grad, own[name])
        model.finalize_backward()
        for name, parameter in model.module.named_parameters():
            dist.all_reduce(own[name])
            torch.testing.assert_close(parameter.grad, own[name] / world)


def plain(model):
    return model


def wrapped(model):
    return Outer(model)


def followed(model):
    """Return ``model`` and what keeps the gradients of its outputs, for which autograd has a hook of its own."""

    def run(x):
        output = model(x)
        output.retain_grad()
        return output

    return run


def normalised(model):
    """Return ``model`` behind a function of this package that is written in Python."""
    norm = SyncBatchNorm(WIDTH)
    return lambda x: model(norm(x))


def compiled(model):
    """Return ``model`` with a part that is compiled, and is a function of torch's that is written in Python."""
    model.module.between = torch.compile(torch.tanh, backend="aot_eager")
    return model


def evaluated(model):
    """Return ``model`` with hooks of modules that run in no backward of it."""
    aside = nn.Linear(2, 2)
    aside.register_full_backward_hook(lambda *_: None)
    model.__dict__["aside"] = aside
    return model


def checkpointed(model):
    return lambda x: checkpoint(model, x, use_reentrant=False)


def hooked_once(model):
    """Return ``model`` with a hook in its first step only, which leaves no trace in the second one."""
    handle = model.register_full_backward_hook(lambda *_: None)

    def run(x):
        output = model(x)
        handle.remove()
        return output

    return run


def _count_in_place(rank, world, surround):
    model = DistributedDataParallel(Layers())
    run = surround(model)
    counts = []
    for step in range(2):
        model.zero_grad()
        run(_batch(rank, step)).square().sum().backward()
        counts.append(model.reducer._get_status().reduced_in_place)
    return counts


@pytest.mark.parametrize("surround", [plain, wrapped, followed, normalised, compiled, evaluated, checkpointed])
def test_where_nobody_looks_gradients_are_reduced_where_they_lie(rank_pool, surround):
    assert rank_pool(2).run(_count_in_place, surround, timeout=120) == [[LAYERS] * 2] * 2


def test_only_a_step_in_which_somebody_may_look_takes_copies(rank_pool):
    assert rank_pool(2).run(_count_in_place, hooked_once) == [[0, LAYERS]] * 2


@in_ranks(2)
def test_ranks_decide_each_for_itself(rank, world):
    model = DistributedDataParallel(Layers(), bucket_cap_mb=0.05)
    for step in range(2):
        model.zero_grad()
        x = _batch(rank, step)
        own = _own(model, x)
        seen = {}

        def look(_, seen=seen):
            seen.update((name, p.grad.clone()) for name, p in model.module.named_parameters() if p.grad is not None)

        if rank == 1:
            x.register_hook(look)
        model(x).square().sum().backward()
        for name, gradient in seen.items():
            torch.testing.assert_close(gradient, own[name])
        assert bool(seen) == (rank == 1)
        for name, gradient in own.items():
            dist.all_reduce(gradient)
            torch.testing.assert_close(model.module.get_parameter(name).grad, gradient / world)
        assert model.reducer._get_status().reduced_in_place == (LAYERS if rank == 0 else 0)
