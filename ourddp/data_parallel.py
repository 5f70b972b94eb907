"""torch.nn.DataParallel with replicas whose memory is kept, on CPUs as well, and with a count of what it moves."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ourddp.replicas import Counts, Replicas, Transfer, move


class DataParallel(nn.DataParallel):
    """Split each batch over replicas of a module in one process, as ``torch.nn.DataParallel`` does.

    The first device has the module itself. In forward, the inputs are split along ``dim`` and scattered, every other
    device gets the parameters, the replicas run in threads, and their outputs are gathered on ``output_device``. In
    backward, the gradients of all replicas are added up on the first device. The gradients are those of one module that
    is given the whole batch, but for layers that look at a whole batch, such as batch norm: each replica normalises its
    own part, and only the running statistics of the first are kept.

    Beyond torch's class:

    - ``device_ids`` may name the CPU, once for each replica: ``["cpu"] * 4``. Each replica has memory and a thread of
      its own.
    - The memory of replicas is kept from step to step, and a tensor that has not changed is not sent again. To tell
      that, the first device keeps what it sent last: as much memory as the parameters and buffers take.
    - ``transfers`` counts what has moved.
    - Inputs whose sizes along ``dim`` differ are refused. torch drops what is too much.

    One process has one interpreter, and one device that sends and adds up everything, so
    ``ourddp.DistributedDataParallel`` with a process for each device is faster. This class is for programs that
    use torch's, and to show the difference.

    Args:
        module: The module to replicate. Its parameters and buffers must be on ``device_ids[0]``.
        device_ids: The devices, all of one type: numbers of CUDA devices, names, or ``torch.device``. Without them, all
            CUDA devices, and where there are none, the module runs alone and nothing is replicated.
        output_device: Where the outputs are gathered; ``device_ids[0]`` by default.
        dim: The dimension along which tensors are split and gathered. Tensors without dimensions, and what is no
            tensor, go to all replicas.

    Raises:
        ValueError: If the devices have several types, or there are none in the list.

    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        if device_ids is None:
            device_ids = list(range(torch.cuda.device_count()))
        elif not device_ids:
            raise ValueError('device_ids is empty: name a device for each replica, for example ["cpu"] * 4')
        nn.Module.__init__(self)
        self.module = module
        self.dim = dim
        self.devices = [_device(device) for device in device_ids]
        types = sorted({device.type for device in self.devices})
        if len(types) > 1:
            raise ValueError(f"device_ids has devices of several types, {' and '.join(types)}: name those of one type")
        # torch's class runs the module alone if this is empty, which is what one replica needs, too.
        self.device_ids = [device.index for device in self.devices]
        self.output_device = None
        if self.devices:
            self.src_device_obj = self.devices[0]
            self.output_device = _device(self.devices[0] if output_device is None else output_device)
        self._transfers = Counts()
        self._replicas: Replicas | None = None
        self._threads: ThreadPoolExecutor | None = None

    @property
    def transfers(self) -> dict[str, Transfer]:
        """What has moved between the first device and the others since the last ``reset_transfers()``, by kind.

        ``"inputs"``, ``"parameters"``, ``"buffers"`` and ``"outputs"`` belong to forward, ``"output_gradients"``,
        ``"gradients"`` and ``"input_gradients"`` to backward. Replicas on the CPU are counted as if each had a device:
        the parts of inputs and outputs, which they share there, would have to move.
        """
        return self._transfers

    def reset_transfers(self) -> None:
        """Begin to count anew, in the dict that ``transfers`` has returned before."""
        self._transfers.reset()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on the parts of the inputs, and return the outputs joined.

        Raises:
            RuntimeError: If the module is not on the first device.
            ValueError: If tensors of the inputs differ in size along ``dim``.
            TypeError: If outputs cannot be joined.

        """
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            if not self.devices:
                return self.module(*inputs, **kwargs)
            self._check_place()
            arguments = self.scatter(inputs, kwargs, self.device_ids)
            if len(arguments[0]) == 1:
                outputs = [self.module(*arguments[0][0], **arguments[1][0])]
            else:
                outputs = self.parallel_apply(
                    self.replicate(self.module, self.device_ids[: len(arguments[0])]), *arguments
                )
            return self.gather(outputs, self.output_device)

    def _check_place(self) -> None:
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if tensor.device != self.devices[0]:
                raise RuntimeError(
                    f"{name} is on {tensor.device}: the parameters and buffers must be on the first of device_ids, "
                    f"{self.devices[0]}; move the module there with module.to({str(self.devices[0])!r})"
                )

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Return the positional and the keyword arguments of each replica that has a part of the inputs."""
        leaves, structure = pytree.tree_flatten((inputs, kwargs or {}))
        sizes = {leaf.size(self.dim) for leaf in leaves if _is_split(leaf)}
        if len(sizes) > 1:
            raise ValueError(
                f"the inputs have {' and '.join(map(str, sorted(sizes)))} elements along dimension {self.dim}: tensors "
                "that are split over replicas must have the same size there"
            )
        replicas = len(device_ids)
        parts = [leaf.chunk(replicas, self.dim) if _is_split(leaf) else [leaf] * replicas for leaf in leaves]
        # A batch may be smaller than the replicas are many, and what has no batch is for one of them.
        count = min(map(len, parts)) if sizes else 1
        scattered = [
            pytree.tree_unflatten([self._send(part[replica], replica) for part in parts], structure)
            for replica in range(count)
        ]
        return [positional for positional, _ in scattered], [keyword for _, keyword in scattered]

    def _send(self, leaf: Any, replica: int) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if replica == 0:
            return leaf.to(self.devices[0])
        counts = self._transfers
        return move(leaf, self.devices[replica], counts["inputs"], counts["input_gradients"])

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Return the module and its replicas on the devices after the first."""
        if self._replicas is None:
            self._replicas = Replicas(self.devices[1:])
        return [module, *self._replicas.of(module, len(device_ids) - 1, self._transfers)]

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run each replica in a thread of its own, and return the outputs; an error of a replica is raised."""
        if self.devices[0].type != "cpu":
            return super().parallel_apply(replicas, inputs, kwargs)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self.devices), "ourddp_replica")
        # These belong to the thread that sets them.
        gradients, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        low_precision, inference = torch.get_autocast_dtype("cpu"), torch.is_inference_mode_enabled()

        def run(replica: nn.Module, positional: tuple[Any, ...], keyword: dict[str, Any]) -> Any:
            autocast_here = torch.autocast("cpu", low_precision, enabled=autocast)
            # The mode comes first, because it sets whether gradients are enabled.
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients), autocast_here:
                return replica(*positional, **keyword)

        runs = [self._threads.submit(run, *each) for each in zip(replicas, inputs, kwargs, strict=True)]
        wait(runs)
        return [each.result() for each in runs]

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Return the replicas' outputs, joined along ``dim`` on the output device."""
        device = self.output_device
        flat = [pytree.tree_flatten(output) for output in outputs]
        structure = flat[0][1]
        if any(other != structure for _, other in flat):
            raise TypeError("the outputs of replicas differ in structure, so they cannot be joined")
        joined = [self._join(list(leaves), device) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
        return pytree.tree_unflatten(joined, structure)

    def _join(self, leaves: list[Any], device: torch.device) -> Any:
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            if all(leaf is leaves[0] or leaf == leaves[0] for leaf in leaves):
                return leaves[0]
            raise TypeError(f"replicas returned {leaves}, which cannot be joined: return tensors")
        if len(leaves) == 1:
            return leaves[0].to(device)
        counts = self._transfers
        moved = [leaves[0].to(device)]
        moved += [move(leaf, device, counts["outputs"], counts["output_gradients"]) for leaf in leaves[1:]]
        if moved[0].dim() == 0:
            warnings.warn("replicas returned single numbers, which are joined to a vector", stacklevel=2)
            return torch.stack(moved)
        return torch.cat(moved, self.dim)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_replicas": None, "_threads": None}


def _device(device: int | str | torch.device) -> torch.device:
    """Return the device that a number (of a CUDA device), a name, or a device stands for."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _is_split(leaf: Any) -> bool:
    """Return whether a value is split over the replicas."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0
