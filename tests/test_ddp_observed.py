"""What code of the program sees of gradients while backward goes on: this rank's own, whatever way it looks.

Each way to look is tried with torch's class and with ours. Before it looks, it waits for all reductions that have been
started, as averages of which half has arrived are what it must not see.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp_cases import bitwise_equal_everywhere
from gradient_cases import WIDTH
from gradient_cases import make_model as make_layers
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ourddp import DistributedDataParallel, SyncBatchNorm

CLASSES = (nn.parallel.DistributedDataParallel, DistributedDataParallel)
LAYERS = 3
GLOBAL_HOOKS = torch.nn.modules.module


class Outer(nn.Module):
    """Layers before and after those that are parallel."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


class Calls(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.function()
        return gradient, None


class Layers(nn.Module):
    """Calls ``between(x)``, which returns what goes on, after each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers(LAYERS)
        self.between = lambda x: x

    def forward(self, x):
        for layer in self.layers:
            x = self.between(layer(x))
        return x


def weight_of(model):
    return model.module.layers[0].weight


def hook_of_the_wrapper(model, look, x):
    model.register_full_backward_hook(look)
    return model(x).square().sum()


def old_hook_of_a_layer(model, look, x):
    model.module.layers[0].register_backward_hook(look)
    return model(x).square().sum()


def hook_of_a_layer(model, look, x):
    model.module.layers[0].register_full_backward_pre_hook(look)
    return model(x).square().sum()


def hook_of_a_module_around(model, look, x):
    outer = Outer(model)
    outer.register_full_backward_hook(look)
    return outer(x).square().sum()


def hook_of_a_module_before(model, look, x):
    outer = Outer(model)
    outer.before.register_full_backward_pre_hook(look)
    return outer(x).square().sum()


def hook_of_all_modules(model, look, x):
    handle = GLOBAL_HOOKS.register_module_full_backward_hook(look)
    try:
        return model(x).square().sum()
    finally:
        handle.remove()


def hook_of_the_input(model, look, x):
    x.register_hook(look)
    return model(x).square().sum()


def hook_of_an_activation(model, look, x):
    def between(activation):
        activation.register_hook(look)
        return activation

    model.module.between = between
    return model(x).square().sum()


def hook_before_a_node(model, look, x):
    before = x * 1
    before.grad_fn.register_prehook(look)
    return model(before).square().sum()


def hook_after_a_node(model, look, x):
    before = x * 1
    before.grad_fn.register_hook(look)
    return model(before).square().sum()


def hook_of_a_parameter(model, look, x):
    weight_of(model).register_hook(look)
    return model(x).square().sum()


def hook_after_accumulation(model, look, x):
    weight_of(model).register_post_accumulate_grad_hook(look)
    return model(x).square().sum()


def hook_of_an_accumulator(model, look, x):
    weight = weight_of(model)
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(look)
    model.accumulator = accumulator
    return model(x).square().sum()


def hook_of_several_tensors(model, look, x):
    register_multi_grad_hook([layer.weight for layer in model.module.layers[1:]], look)
    return model(x).square().sum()


def function_before(model, look, x):
    return model(Calls.apply(x, look)).square().sum()


def function_inside(model, look, x):
    model.module.between = lambda activation: Calls.apply(activation, look)
    return model(x).square().sum()


def function_beside(model, look, x):
    # Nodes that are made earlier run later.
    beside = Calls.apply(x, look)
    return model(x).square().sum() + beside.sum()


def backward_of_a_new_operator(model, look, x):
    identity = torch.library.custom_op("ours_tests::identity", lambda x: x.clone(), mutates_args=(), schema=IDENTITY)

    def backward(_, gradient):
        look()
        return gradient

    identity.register_autograd(backward)
    return model(identity(x)).square().sum()


IDENTITY = "(Tensor x) -> Tensor"


def backward_inside_backward(model, look, x):
    def run(y):
        y.register_hook(look)
        return y * 1

    return model(checkpoint(run, x, use_reentrant=True)).square().sum()


def backward_of_a_checkpoint_first(model, look, x):
    """The last layer's gradients come in a backward of their own, which knows nothing of the hook before it."""
    layers = model.module.layers
    first, last = layers[:2], layers[2]
    model.module.forward = lambda x: checkpoint(last, first(Calls.apply(x, look)), use_reentrant=True)
    return model(x).square().sum()


def end_of_backward(model, look, x):
    output = model(x)
    output.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(look))
    return output.square().sum()


def communication_hook_of_another(model, look, x):
    other = type(model)(nn.Linear(WIDTH, WIDTH))

    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        look()
        return future

    other.register_comm_hook(None, hook)
    model.__dict__["other"] = other
    return model(other(x)).square().sum()


class Mode(TorchDispatchMode):
    """Calls a function before the operators that compute gradients of weights."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.tanh_backward.default:
            self.function()
        return operator(*args, **(kwargs or {}))


def mode_of_dispatch(model, look, x):
    model.module.between = torch.tanh
    return model(x).square().sum(), Mode(look)


WAYS = [
    hook_of_the_wrapper,
    old_hook_of_a_layer,
    hook_of_a_layer,
    hook_of_a_module_around,
    hook_of_a_module_before,
    hook_of_all_modules,
    hook_of_the_input,
    hook_of_an_activation,
    hook_before_a_node,
    hook_after_a_node,
    hook_of_a_parameter,
    hook_after_accumulation,
    hook_of_an_accumulator,
    hook_of_several_tensors,
    function_before,
    function_inside,
    function_beside,
    backward_of_a_new_operator,
    backward_inside_backward,
    backward_of_a_checkpoint_first,
    end_of_backward,
    communication_hook_of_another,
    mode_of_dispatch,
]


def _batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, WIDTH, generator=generator).requires_grad_()


def _seen(cls, way, rank, meddles):
    """Return what each look of the last step saw, and the gradients after it."""
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
        loss = way(model, look, _batch(rank, step))
        if isinstance(loss, tuple):
            loss, context = loss
            with context:
                loss.backward()
        else:
            loss.backward()
    return seen, {name: p.grad for name, p in model.module.named_parameters()}


def _looks(rank, world, way, meddles):
    theirs, mine = (_seen(cls, way, rank, meddles) for cls in CLASSES)
    assert mine[0], "nothing was seen"
    assert [name for name, _ in mine[0]] == [name for name, _ in theirs[0]]
    for (name, found), (_, expected) in zip(mine[0], theirs[0], strict=True):
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
    for name, gradient in mine[1].items():
        torch.testing.assert_close(gradient, theirs[1][name])
        assert bitwise_equal_everywhere(gradient)


@pytest.mark.parametrize("meddles", [False, True], ids=["reads", "changes"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_code_of_the_program_sees_what_it_sees_with_torchs_class(rank_pool, way, meddles):
    rank_pool(2).run(_looks, way, meddles)


def _own(model, x):
    """Return the gradients of this rank alone."""
    alone = Layers()
    alone.load_state_dict(model.module.state_dict())
    alone(x.detach()).square().sum().backward()
    return {name: p.grad for name, p in alone.named_parameters()}


def _after_a_backward_that_brings_not_all(rank, world):
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


def test_between_two_backwards_of_a_step_gradients_are_those_of_the_rank(rank_pool):
    rank_pool(2).run(_after_a_backward_that_brings_not_all)


def _before_manual_finalization(rank, world):
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


def test_before_a_backward_is_finalised_gradients_are_those_of_the_rank(rank_pool):
    if not hasattr(nn.parallel.DistributedDataParallel, "finalize_backward"):
        pytest.skip("this torch has no manual finalization")
    rank_pool(2).run(_before_manual_finalization)


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
        counts.append(model.reducer._get_reduced_in_place())
    return counts


@pytest.mark.parametrize("surround", [plain, wrapped, followed, normalised, compiled, evaluated, checkpointed])
def test_where_nobody_looks_gradients_are_reduced_where_they_lie(rank_pool, surround):
    assert rank_pool(2).run(_count_in_place, surround, timeout=120) == [[LAYERS] * 2] * 2


def test_only_a_step_in_which_somebody_may_look_takes_copies(rank_pool):
    assert rank_pool(2).run(_count_in_place, hooked_once) == [[0, LAYERS]] * 2
