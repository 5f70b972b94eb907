"""Strangers that knock at the ports of a job are not let in, and do not disturb it. `make strangers` tries longer."""

from __future__ import annotations

import pytest
import strangers
import torch.distributed as dist
from programs import warm_python
from stranger_kinds import KINDS, Kind, question, right

pytestmark = pytest.mark.skipif(
    not hasattr(dist.TCPStore, "list_keys"), reason="this torch's store does not tell where the ranks of new groups are"
)


def test_none_of_a_thousand_strangers_is_accepted() -> None:
    outcome = strangers.run(1000, python=warm_python())
    assert outcome.faults() == []
    assert sum(tally.tries for tally in outcome.tallies.values()) >= 1000
    assert all(told["groups"] > 0 for told in outcome.told)
    # The handshakes have been judged, and not only left waiting.
    silent = [kind.name for kind in KINDS if kind.answers and not outcome.tallies[kind.name].answered]
    assert silent == []
    assert all(outcome.tallies[kind.name].heard for kind in KINDS if not kind.ends)


def test_one_that_knows_the_secrets_counts_as_accepted() -> None:
    """Otherwise the test above could not fail."""
    outcome = strangers.run(20, [Kind("secret", answers=right)], {"own secret": question}, warm_python())
    assert outcome.tallies["secret"].accepted
    assert outcome.tallies["own secret"].accepted
    assert outcome.faults()[0] == f"{outcome.accepted} strangers were accepted"
