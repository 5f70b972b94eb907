"""Averages of metrics over the ranks."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import in_ranks

from ourddp import allgather_object, average_metrics


@in_ranks(3, "backend")
def test_averages_are_those_of_all_samples(rank: int, world: int) -> None:
    own = {"loss": 1.0 + rank, "accuracy": torch.tensor([0.25 * rank]), "steps": 7}
    assert average_metrics(own) == {"loss": 2.0, "accuracy": 0.25, "steps": 7.0}
    # Ranks with 1, 2 and 3 samples.
    assert average_metrics({"loss": 1.0 + rank}, 1 + rank) == {"loss": (1 * 1 + 2 * 2 + 3 * 3) / 6}
    each = {"loss": torch.tensor(1 + rank), "accuracy": 0 if rank == 0 else 1}
    assert average_metrics({"accuracy": 0.5 * rank, "loss": rank}, each) == {"accuracy": 0.75, "loss": 8 / 6}
    assert average_metrics({}) == {}


@in_ranks(2)
def test_values_without_weight_do_not_count(rank: int, world: int) -> None:
    empty = {"loss": math.nan if rank == 0 else 2.0}
    assert average_metrics(empty, rank) == {"loss": 2.0}
    assert math.isnan(average_metrics(empty, 0)["loss"])
    assert math.isnan(average_metrics(empty)["loss"])
    assert average_metrics({"loss": math.inf if rank == 0 else 1.0}) == {"loss": math.inf}
    assert math.isnan(average_metrics({"loss": math.inf if rank == 0 else -math.inf})["loss"])


@in_ranks(3)
def test_all_ranks_get_the_same_bits_whatever_the_order_of_names(rank: int, world: int) -> None:
    names = ["a", "b", "c"]
    generator = torch.Generator().manual_seed(rank)
    values = dict(zip(names, torch.rand(3, generator=generator, dtype=torch.float64).tolist(), strict=True))
    turned = {name: values[name] for name in names[rank:] + names[:rank]}
    averages = average_metrics(turned, 0.1 + rank)
    assert list(averages) == list(turned)
    whole = [torch.rand(3, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(world)]
    total = sum(0.1 + r for r in range(world))
    for index, name in enumerate(names):
        assert averages[name] == pytest.approx(sum(w[index] * (0.1 + r) for r, w in enumerate(whole)) / total)
        assert len(set(allgather_object(averages[name]))) == 1


@in_ranks(3, "backend")
def test_ranks_with_different_names_are_told_of_all_of_them(rank: int, world: int) -> None:
    own = {"loss": 1.0, **({"accuracy": 1.0} if rank != 1 else {}), **({"acc": 1.0} if rank == 1 else {})}
    names = r"'accuracy' is there on ranks 0, 2 alone; 'acc' is there on rank 1 alone\. "
    with pytest.raises(ValueError, match=f"the 3 ranks pass different metrics: {names}"):
        average_metrics(own)
    assert average_metrics({"loss": 1.0}) == {"loss": 1.0}  # the group goes on


@in_ranks(2)
def test_what_is_no_number_is_an_error_on_all_ranks(rank: int, world: int) -> None:
    def refused(message: str, metrics: dict, weights: object = None) -> None:
        with pytest.raises(ValueError, match=f"metrics cannot be averaged: rank 1: {message}"):
            average_metrics(metrics if rank == 1 else {"loss": 1.0}, weights if rank == 1 else None)

    refused("'loss' is no number but of type str", {"loss": "low"})
    refused("'loss' is no number but of type Tensor", {"loss": torch.ones(2)})
    refused("'loss' is too large for a floating-point number", {"loss": 10**400})
    refused("the weight of 'loss' is -1.0; it must be finite and not negative", {"loss": 1}, -1)
    refused("the weight of 'loss' is nan", {"loss": 1}, math.nan)
    refused("the weight of 'loss' is no number but of type list", {"loss": 1}, [1])
    refused("weights has none for 'loss'", {"loss": 1}, {"accuracy": 1})


@in_ranks(2)
def test_metrics_longer_than_one_message(rank: int, world: int) -> None:
    many = {f"metric {index}": float(index + rank) for index in range(1000)}
    assert average_metrics(many) == {name: value - rank + 0.5 for name, value in many.items()}
