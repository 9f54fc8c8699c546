"""What each member of an elastic run reports of a step, told by the loop without any other member."""

from types import SimpleNamespace

import pytest

from ttlaunch.runtime.training.loop import TrainingLoop

KNOWN = {"loss": 3.5, "tokens": 64, "grad_norm": 0.5}
CFG = SimpleNamespace(training_config=SimpleNamespace(validation_interval=100))


class Member:
    """A member of an elastic run that has made the step, or has got it from others."""

    follows = False

    def __init__(self, *, knows):
        self._knows, self.applied = knows, 0

    def validate_with(self, validate):
        pass

    def apply(self, step, *, validation_is_due):
        self.applied = step
        return self._knows


def reported(*, rank, knows=True, is_elastic=True, **known):
    found = []
    ctx = SimpleNamespace(
        elastic=Member(knows=knows) if is_elastic else None,
        rank=rank,
        steps_done=0,
        data=lambda cfg: SimpleNamespace(total_steps=100),
        report=lambda step, **values: found.append((step, values)),
        compare=lambda *_: None,
    )
    TrainingLoop(CFG, ctx, validate=lambda step: None).end_step(7, **known)
    [(step, values)] = found
    assert 7 == step
    return values


def test_the_first_member_of_an_elastic_run_reports_all_of_a_step():
    assert KNOWN == reported(rank=0, **KNOWN)


@pytest.mark.parametrize("counts", ["tokens", "samples"])
def test_every_other_member_reports_its_loss_but_not_what_counts_once_for_all(counts):
    known = {"loss": 3.5, counts: 64, "grad_norm": 0.5}
    assert {"loss": 3.5, "grad_norm": 0.5} == reported(rank=2, **known)


def test_a_member_that_got_the_step_from_others_reports_that_it_has_it_alone():
    assert {} == reported(rank=2, knows=False, **KNOWN)


def test_ranks_of_a_run_that_is_not_elastic_report_what_they_are_given():
    assert KNOWN == reported(rank=2, is_elastic=False, **KNOWN)
