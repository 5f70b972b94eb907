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


def hooked(x, name, look):
    """Return what the model may have for its input, with a hook of the node that computes it."""
    before = x * 1
    getattr(before.grad_fn, name)(look)
    return before


def of_a_module_around(model, look, x):
    outer = Outer(model)
    outer.register_full_backward_hook(look)
    return outer(x).square().sum()


def of_a_module_before(model, look, x):
    outer = Outer(model)
    outer.before.register_full_backward_pre_hook(look)
    return outer(x).square().sum()


def of_all_modules(model, look, x):
    handle = GLOBAL_HOOKS.register_module_full_backward_hook(look)
    try:
        return loss_of(model, x)
    finally:
        handle.remove()


def of_an_activation(model, look, x):
    def between(activation):
        activation.register_hook(look)
        return activation

    model.module.between = between


def of_an_accumulator(model, look, x):
    weight = model.module.layers[0].weight
    model.accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    model.accumulator.register_hook(look)


def function_inside(model, look, x):
    model.module.between = lambda activation: Calls.apply(activation, look)


def function_beside(model, look, x):
    # Nodes that are made earlier run later.
    beside = Calls.apply(x, look)
    return loss_of(model, x) + beside.sum()


IDENTITY = "(Tensor x) -> Tensor"


def backward_of_a_new_operator(model, look, x):
    identity = torch.library.custom_op("ours_tests::identity", lambda x: x.clone(), mutates_args=(), schema=IDENTITY)

    def backward(_, gradient):
        look()
        return gradient

    identity.register_autograd(backward)
    return loss_of(model, identity(x))


def backward_inside_backward(model, look, x):
    def run(y):
        y.register_hook(look)
        return y * 1

    return loss_of(model, checkpoint(run, x, use_reentrant=True))


def backward_of_a_checkpoint_first(model, look, x):
    """The last layer's gradients come in a backward of their own, which knows nothing of the hook before it."""
    layers = model.module.layers
    first, last = layers[:2], layers[2]
    model.module.forward = lambda x: checkpoint(last, first(Calls.apply(x, look)), use_reentrant=True)


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
    return loss_of(model, other(x))


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
    return Mode(look)


def first(model):
    return model.module.layers[0]


def loss_of(model, x):
    return model(x).square().sum()


# Each has ``look`` called in backward. It returns the loss if that is not loss_of(model, x), or the mode of backward.
WAYS = {
    "hook of the wrapper": lambda model, look, x: model.register_full_backward_hook(look),
    "old hook of a layer": lambda model, look, x: first(model).register_backward_hook(look),
    "hook of a layer": lambda model, look, x: first(model).register_full_backward_pre_hook(look),
    "hook of a module around": of_a_module_around,
    "hook of a module before": of_a_module_before,
    "hook of all modules": of_all_modules,
    "hook of the input": lambda model, look, x: x.register_hook(look),
    "hook of an activation": of_an_activation,
    "hook before a node": lambda model, look, x: loss_of(model, hooked(x, "register_prehook", look)),
    "hook after a node": lambda model, look, x: loss_of(model, hooked(x, "register_hook", look)),
    "hook of a parameter": lambda model, look, x: first(model).weight.register_hook(look),
    "hook after accumulation": lambda model, look, x: first(model).weight.register_post_accumulate_grad_hook(look),
    "hook of an accumulator": of_an_accumulator,
    "hook of several tensors": lambda model, look, x: register_multi_grad_hook(
        [layer.weight for layer in model.module.layers[1:]], look
    ),
    "function before": lambda model, look, x: loss_of(model, Calls.apply(x, look)),
    "function inside": function_inside,
    "function beside": function_beside,
    "backward of a new operator": backward_of_a_new_operator,
    "backward inside backward": backward_inside_backward,
    "backward of a checkpoint first": backward_of_a_checkpoint_first,
    "end of backward": end_of_backward,
    "communication hook of another": communication_hook_of_another,
    "mode of dispatch": mode_of_dispatch,
}
