"""Trains a model that is cut into stages by layer, each on a rank of its own.

The schedules and the messages between stages are those of ``torch.distributed.pipelining``; this module cuts the
model, keeps each rank's own layers, and gives the result the look of a model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ourddp import layer_costs, partition, pipeline_checks, stage_weights
from ourddp.distributed import DistributedDataParallel
from ourddp.pipeline import Pipeline, Skeleton, Stage, conditions, make_pipeline

__all__ = ["ModelParallel"]


class ModelParallel(nn.Module):
    """A sequence of layers, cut into stages over the ranks of ``group``, and trained on micro-batches in a pipeline.

    Every rank constructs it with the same layers; rank 0's weights count. Afterwards a rank keeps only the layers of
    its own stages: those of others are moved to the meta device, which frees their memory even where the program still
    holds them. Make the optimizer after that, from ``model.parameters()``. Parameters and the state dict have the names
    that they have in the whole model.

    Args:
        layers: An ``nn.Sequential``, or a list of modules. Each takes one tensor and returns one, of a shape that
            follows from the shape of its input.
        example: The inputs of a batch as ``step`` will get them, of shape (N, ...) and any dtype, on the device of
            the layers.
        loss_fn: Called as ``loss_fn(outputs, targets)`` with a micro-batch; has to return its mean loss, of shape ().
        schedule: In which order a stage runs forwards and backwards. "gpipe": all forwards, then all backwards (Huang
            et al., GPipe, 2019, https://arxiv.org/abs/1811.06965). "1f1b": backward as soon as possible, so that the
            first of p stages keeps the activations of p micro-batches at most (Narayanan et al., PipeDream, 2019,
            https://arxiv.org/abs/1806.03377). "interleaved": the same with several stages per rank, which shortens the
            time in which ranks are idle, and sends more messages (Narayanan et al., 2021,
            https://arxiv.org/abs/2104.04473).
        micro_batches: The number of equal parts that a batch is split into.
        balance: What the cut makes as equal as it can: "time" of forward and backward, measured on rank 0; "memory",
            which is weights, gradients and the activations of the micro-batches that are kept at a time. Or the number
            of layers of each stage.
        stages_per_rank: 1 unless the schedule is "interleaved", whose default is 2. Stage s is on rank
            s % ranks of the group.
        group: A process group, or a DeviceMesh of one dimension; by default all ranks.
        data_group: The ranks that train the same stages on other data, as a group or a mesh. Their gradients are
            averaged while the last micro-batch runs backward.

    Attributes:
        cut: The number of layers of each stage.
        costs: What each layer costs for one micro-batch, a list of ``ourddp.layer_costs.LayerCost``; empty if
            ``balance`` gives the numbers.

    A batch norm uses the statistics of each micro-batch, and updates its running ones once for each. Random layers such
    as dropout draw from the generator of their rank. Both therefore train as well as in one process, but not to the
    same bits. After each step, and each forward in training mode, the ranks of ``data_group`` have the buffers of its
    first. Freeze parameters before, not after, the construction, and with ``data_group`` convert them before as well.

    Autocast has to surround a step or forward on all ranks or none. An error on one rank in the middle of one
    ends the groups, so that the others raise one at once.

    Raises:
        TypeError: If an argument has the wrong type, or a layer returns something else than a tensor.
        ValueError: If arguments do not fit together, ranks were given different ones, a layer fails on ``example``, or
            stages share a parameter. All ranks raise it.
        RuntimeError: If there is no process group.

    """

    def __init__(
        self,
        layers: nn.Sequential | Sequence[nn.Module],
        example: Tensor,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        *,
        schedule: str = "1f1b",
        micro_batches: int = 4,
        balance: str | Sequence[int] = "time",
        stages_per_rank: int | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        data_group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self._group = pipeline_checks.group_of(group, "group")
        self._data_group = pipeline_checks.group_of(data_group, "data_group") if data_group is not None else None
        self._groups = [group for group in (self._data_group, self._group) if group is not None]
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        stages = self._ranks * (stages_per_rank or (2 if schedule == "interleaved" else 1))
        settings = pipeline_checks.Settings(schedule, micro_batches, balance, stages, self._ranks)
        # Collective from here on: a mistake of one rank has to reach all.
        named = pipeline_checks.agree(self._group, layers, example, loss_fn, settings)
        self._settings, self._loss_fn = settings, loss_fn
        self.costs: list[layer_costs.LayerCost] = []
        if isinstance(balance, str):
            micro_batch = example[: len(example) // micro_batches]
            self.costs = self._measured(list(named.values()), micro_batch)
            # Each stage gets weights, as optimizers refuse a rank without any.
            beginnings = [index for index, layer in enumerate(named.values()) if any(True for _ in layer.parameters())]
            self.cut = partition.cut([settings.cost(layer) for layer in self.costs], stages, beginnings[1:])
        else:
            self.cut = list(balance)
        self._names = list(named)
        bounds = [0, *itertools.accumulate(self.cut)]
        # The names of each stage's layers.
        self._stages = [self._names[begin:end] for begin, end in itertools.pairwise(bounds)]
        pipeline_checks.no_shared_parameters([[named[name] for name in names] for names in self._stages])
        self._own: dict[int, nn.Module] = {}
        self._pipelines: dict[bool, Pipeline] = {}
        modules = [Stage(*(named[name] for name in names)) for names in self._stages]
        self._skeleton = Skeleton(modules)
        self._keep_own(modules)
        self._pipeline(example, backward=True)  # a layer whose shape is unknown is found here, and not in step()

    def _measured(self, layers: list[nn.Module], micro_batch: Tensor) -> list[layer_costs.LayerCost]:
        """Return the costs of layers as the first rank of all measures them, while the others wait."""
        found: list[Any] = [None]
        if all(dist.get_rank(group) == 0 for group in self._groups):
            try:
                found = [layer_costs.measure(layers, micro_batch)]
            except (TypeError, ValueError) as error:
                found = [error]
        # To the first ranks of all pipelines, and from them to the others.
        for group in self._groups:
            dist.broadcast_object_list(found, group_src=0, group=group)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _keep_own(self, stages: list[Stage]) -> None:
        """Register the layers of own stages, and free all others."""
        stage_weights.send(stages, self._group)
        self._own = {index: stage for index, stage in enumerate(stages) if index % self._ranks == self._rank}
        stage_weights.free_all_but(self._own, stages)
        for index, stage in self._own.items():
            # Here and not by add_module(), which refuses a name that this class has, such as "step".
            self._modules.update(zip(self._stages[index], stage, strict=True))
            if self._data_group is None:
                continue
            if any(parameter.requires_grad for parameter in stage.parameters()):
                # The stages of torch's pipelines call no_sync() for all micro-batches except the last. In it, buffers
                # would not be sent either.
                self._own[index] = DistributedDataParallel(
                    stage, process_group=self._data_group, broadcast_buffers=False
                )
            stage_weights.broadcast(stage_weights.of(stage), self._data_group)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ModelParallel:
        """Convert own layers, as ``to()`` and ``bfloat16()`` do; all ranks call it, so the others' change alike."""
        if self._data_group is not None and self._skeleton.changes(fn):
            raise RuntimeError(
                "a model with a data_group cannot get another type or device, as its gradients are averaged in those "
                "that it was made with: convert the layers before they are cut"
            )
        super()._apply(fn, recurse)
        self._skeleton.apply(fn)
        self._pipelines.clear()
        return self

    @torch.enable_grad()
    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Run forward and backward of a batch, and return its mean loss, on every rank.

        Gradients are added to those that the parameters have, as ``backward()`` does. Every rank passes the batch:
        the first stage reads the values of ``inputs`` and the last those of ``targets``; elsewhere only shape and dtype
        matter. With ``data_group``, each of its ranks has a batch of its own, and the loss is the mean over all.

        Args:
            inputs: Of shape (N, ...), where N is a multiple of ``micro_batches``.
            targets: Of shape (N, ...).

        Raises:
            ValueError: If N is no multiple of ``micro_batches``, or the targets are not as many as the inputs.

        """
        pipeline_checks.batch(inputs, self._settings.micro_batches)
        if len(targets) != len(inputs):
            raise ValueError(f"{len(targets)} targets for {len(inputs)} inputs: pass one target for each")
        losses: list[Tensor] = []
        pipeline = self._pipeline(inputs, backward=True)
        with self._together():
            pipeline.schedule.step(
                *self._root_inputs(inputs),
                target=targets if self._is_last else None,
                losses=losses if self._is_last else None,
                return_outputs=False,
            )
        loss = torch.zeros((), dtype=torch.float64, device=inputs.device)
        loss += sum(part.detach() for part in losses)
        dist.broadcast(loss, group_src=self._last_rank, group=self._group)
        if self._data_group is not None:
            dist.all_reduce(loss, group=self._data_group)
            loss /= dist.get_world_size(self._data_group)
        return loss.item()

    @torch.no_grad()
    def forward(self, inputs: Tensor, *, everywhere: bool = False) -> Tensor | None:
        """Return the outputs for a batch, without a graph for backward.

        Every rank passes the batch, of shape (N, ...). The outputs are on the rank of the last stage, and None on the
        others, or on every rank if ``everywhere`` is true. N may be any number: a batch that is no multiple of
        ``micro_batches`` is split into fewer parts, as many as divide both, and then fewer ranks work at a time.
        """
        pipeline_checks.some_samples(inputs)
        if self._ranks == 1:  # torch's forward-only schedules cannot hand over between stages of the same rank
            with self._together():
                return functools.reduce(lambda tensor, stage: stage(tensor), self._own.values(), inputs)
        pipeline = self._pipeline(inputs, backward=False)
        with self._together():
            outputs = pipeline.schedule.step(*self._root_inputs(inputs))
        if not everywhere:
            return outputs
        if not self._is_last:
            outputs = torch.empty_like(pipeline.outputs, device=inputs.device)
        dist.broadcast(outputs, group_src=self._last_rank, group=self._group)
        return outputs

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Make an error in a schedule one of all ranks, and buffers equal on all data ranks after it."""
        try:
            yield
            if self.training and self._data_group is not None:
                stage_weights.broadcast(list(self.buffers()), self._data_group)
        except BaseException:
            for group in self._groups:
                if group.size() > 1:
                    group.abort()  # otherwise its other ranks would wait until their timeout
            raise

    @property
    def _last_rank(self) -> int:
        return (len(self._stages) - 1) % self._ranks

    @property
    def _is_last(self) -> bool:
        return self._rank == self._last_rank

    def _root_inputs(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs,) if self._rank == 0 else ()

    def _pipeline(self, inputs: Tensor, *, backward: bool) -> Pipeline:
        """Return the schedule for such inputs; it is made once for all of the same kind in a row."""
        made = self._pipelines.get(backward)
        if made is None or made.conditions != conditions(inputs):
            made = make_pipeline(
                inputs, self._own, self._skeleton, self._group, self._settings, self._loss_fn if backward else None
            )
            self._pipelines[backward] = made
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the whole model, or of this rank's layers; see ``torch.nn.Module``."""
        elsewhere = set(self._names) - set(self._modules)
        own = {name: value for name, value in state_dict.items() if name.partition(".")[0] not in elsewhere}
        return super().load_state_dict(own, strict, assign)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model on rank 0 of the group, and an empty one on all others.

        Every rank has to call it. ``nn.Sequential`` loads it, and so does a ``ModelParallel`` with other stages.
        """
        states: list[Any] | None = [None] * self._ranks if self._rank == 0 else None
        dist.gather_object(dict(self.state_dict()), states, group_dst=0, group=self._group)
        merged = {name: value for state in states or [] for name, value in state.items()}
        order = {name: place for place, name in enumerate(self._names)}
        return dict(sorted(merged.items(), key=lambda item: order[item[0].partition(".")[0]]))

    def report(self) -> str:
        """Return a table of the stages: rank, layers, and what they cost for one micro-batch as far as measured."""
        lines = ["stage  rank  layers         ms  weights KiB  activations KiB"]
        for stage, names in enumerate(self._stages):
            costs = [self.costs[self._names.index(name)] for name in names] if self.costs else []
            columns = f"{stage:5d}  {stage % self._ranks:4d}  {f'{names[0]} to {names[-1]}':9s}"
            if costs:
                milliseconds = sum(cost.seconds for cost in costs) * 1e3
                weights, activations = (
                    sum(getattr(cost, name) for cost in costs) / 1024 for name in ("weight_bytes", "activation_bytes")
                )
                columns += f"  {milliseconds:6.2f}  {weights:11.1f}  {activations:15.1f}"
            lines.append(columns)
        lines.append(f"{self._settings.schedule}, idle {self._settings.bubble:.0%} of the time if stages were equal")
        return "\n".join(lines)
