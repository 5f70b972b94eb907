"""Ways in which a program may look at gradients while backward goes on."""

from __future__ import annotations

import torch
from gradient_cases import WIDTH
from gradient_cases import make_model as make_layers
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

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
