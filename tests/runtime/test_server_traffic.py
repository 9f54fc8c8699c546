"""TrafficCounter ÷ formula where a parameter server makes steps without late workers: what was dropped is counted, and in the formula."""

import torch

from ttlaunch import contract
from ttlaunch.running.readers.recorded import read_run
from ttlaunch.train import ParameterServerClient

from .test_sync_servers import LATE, one_is_late  # noqa: F401  a fixture
from .test_traffic import books, small  # noqa: F401  a fixture and its helper

WORD = "late_push"
"""The operation with which `one_is_late` holds a worker back, which is none of the recipe's."""


ROLES = ["worker"] * 3 + ["server"] * 2


def dropping(*, steps):
    keys = {"straggler": "drop", "straggler_timeout_s": 5.0, "num_servers": 2, "polyak_interval": 1}
    config = small(6, steps, sync_ps_config=keys, compression_config={"kind": "int8"})
    config["training_config"] |= {"early_stop_patience": 9}
    return config


def edges(recorded):
    return {about(edge)[:3]: about(edge)[3:] for edge in recorded.traffic.edges if edge.operation != WORD}


def about(edge):
    return edge.operation, edge.source, edge.dest, edge.size, edge.expected


def test_where_nobody_is_late_the_counts_come_to_the_formula_of_every_step(books):  # noqa: F811
    config = dropping(steps=2)
    config["training_config"] |= {"precision": "fp16"}
    dropped = edges(books("sync_ps", ROLES, config=config))
    assert all(size == expected for size, expected in dropped.values())
    config["sync_ps_config"] |= {"straggler": "wait"}
    waited = edges(books("sync_ps", ROLES, config=config))
    order = (1 + 3) * 8
    assert dropped["orders", 3, 4] == tuple(size + order for size in waited.pop(("orders", 3, 4)))  # to be done
    assert waited == {edge: sizes for edge, sizes in dropped.items() if edge[0] != "orders"}


def test_a_run_that_dropped_a_gradient_moves_what_it_says_and_owes_it_again(books, one_is_late, monkeypatch):  # noqa: F811
    """D9: its refused gradient counts, and what it did not send in the steps that were made without it does not."""
    owed = {}
    for verb in ("push", "pull"):
        monkeypatch.setattr(ParameterServerClient, verb, remembering(getattr(ParameterServerClient, verb), verb, owed))
    recorded = books("sync_ps", ROLES, config=dropping(steps=6))
    found = edges(recorded)
    assert [] == [edge for edge, (size, expected) in found.items() if size != expected]
    pushes = {worker: recorded.telemetry[worker].facts["pushes"] for worker in range(3)}
    assert {0: 6, LATE: 5, 2: 6} == pushes  # steps 1, 2 refused, 4, 5 and 6
    assert found["gradients", LATE, 3][0] * 6 == found["gradients", 0, 3][0] * 5
    assert found["verdict", 3, LATE][0] * 6 == found["verdict", 3, 0][0] * 5
    assert torch.equal(owed[LATE, "push", 2], owed[LATE, "pull", 2])
    assert not torch.equal(owed[0, "push", 2], owed[0, "pull", 2])
    (recorded.path / contract.REPORT_FILE).write_text('{"status": "failed"}')
    cut = read_run(recorded.path).traffic
    assert (None, []) == (cut.reason, [about(edge) for edge in cut.differing if edge.operation != WORD])


def remembering(verb, name, owed):
    """The verb of a worker's link, which leaves what its first codec owes before a push and after a pull."""

    def kept(self, *arguments):
        if name == "push":
            self.at = arguments[0]
            owed[self._ctx.rank, name, self.at] = next(tensor for _, tensor in self._owed.named_state()).clone()
        verb(self, *arguments)
        if name == "pull":
            owed[self._ctx.rank, name, self.at] = next(tensor for _, tensor in self._owed.named_state()).clone()

    return kept
