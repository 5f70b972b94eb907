"""What each rank of ``python -m ourddp bench`` does: it times collectives and training steps of all peers in turns."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from ourddp.bench import collectives, harness, report, steps
from ourddp.bench.operations import OPERATIONS, Buffers
from ourddp.progress import Progress

STEPS = "ddp"  # the name of the training steps among the operations


def measure(ranks: harness.Ranks) -> dict[str, Any]:
    """Return the report of what the plan asks for: the rows of collectives and of steps."""
    plan = ranks.plan
    groups = {peer: collectives.group_of(ranks, peer) for peer in plan["peers"]}
    sized = {name for name in plan["ops"] if name != STEPS and OPERATIONS[name].has_size}
    cases = [(name, size) for name in plan["ops"] for size in (plan["sizes"] if name in sized else [0])]
    shown = Progress(sys.stderr if ranks.rank == 0 else None, "cases")
    rows, trained = [], []
    try:
        for number, (name, size) in enumerate(cases):
            shown.show(number, len(cases), f"measuring {name}" + (f" of {report.show_size(size)}" if size else ""))
            if name == STEPS:
                trained.append(measure_steps(ranks, groups))
                continue
            buffers = {
                peer: Buffers.make(ranks.rank, ranks.size, size, "cpu" if peer == "mpi" else plan["device"])
                for peer in groups
            }
            rows.append(collectives.measure(ranks, groups, (name, size), buffers))
    finally:
        shown.close()
    return {"rows": rows, "steps": trained}


def measure_steps(ranks: harness.Ranks, groups: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a model's training steps: ``local``, and torch's and our reducer over each backend there is.

    All variants are in the same processes, begin with the same parameters, and have to compute the same gradients.
    """
    plan = ranks.plan
    wanted = (
        "local",
        *(f"torch+{peer}" for peer in groups if peer != "mpi"),
        *(["ourddp+ours"] if "ours" in groups else []),
    )
    models, actions = {}, {}
    for variant in wanted:
        torch.manual_seed(0)
        model, inputs = steps.MODELS[plan["model"]]()
        torch.manual_seed(1 + ranks.rank)  # every rank has data of its own
        inputs = torch.randn_like(inputs).to(plan["device"])
        wrapped = steps.wrap(model.to(plan["device"]), variant, groups)
        models[variant], actions[variant] = wrapped, _finished(steps.training_step(wrapped, inputs), plan["device"])
    gradients = {}
    for variant, action in actions.items():
        action()
        if variant != "local":
            gradients[variant] = torch.cat([one.grad.flatten() for one in models[variant].parameters()]).cpu()
        for _ in range(steps.WARM_UPS):
            action()
    first = next(iter(gradients), None)
    for variant, gradient in gradients.items():
        steps.check_alike(gradient, gradients[str(first)], f"{variant} are not those of {first}")
    least, most = collectives.LEAST_ROUNDS, collectives.MOST_ROUNDS
    times = ranks.measure(actions, budget=plan["seconds_of_steps"], least=least, most=most, burst=0)
    parameters = list(models["local"].parameters())
    return {
        "model": plan["model"],
        "parameters": len(parameters),
        "bytes": sum(one.nbytes for one in parameters),
        "rounds": len(times["local"]),
        "seconds": {variant: report.summary(column) for variant, column in times.items()},
    }


def _finished(action: Any, device: str) -> Any:
    return action if device == "cpu" else lambda: (action(), torch.cuda.synchronize())


def use_device(ranks: harness.Ranks) -> None:
    """Give this rank its device."""
    if ranks.plan["device"] == "cuda":
        torch.cuda.set_device(own_device())


def own_device() -> int:
    """Return the index of this rank's device among those that it sees; ranks of a node share them out."""
    return int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()


def main() -> None:
    """Measure as a rank that harness.run_ranks has started."""
    with harness.StartedRanks() as ranks:
        use_device(ranks)
        ranks.report = measure(ranks)


if __name__ == "__main__":
    main()
