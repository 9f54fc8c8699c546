"""`ttlaunch simulate --virtual`: what is refused before anything runs."""

import pytest


@pytest.mark.parametrize(
    ("options", "first_line"),
    [
        ("--slow 1=2", "error[P009]: `--slow` was given without `--virtual`"),
        ("--virtual --slow 1", "error[P009]: `--slow 1` names no rank and factor"),
        ("--virtual --slow 1=0", "error[P009]: `--slow 1=0` names no rank and factor"),
        ("--virtual --slow 1=2 --slow 1=3", "error[P009]: `--slow` names rank 1 twice"),
        ("--virtual --slow 7=2", "error[P009]: `--slow 7=2` names rank 7, but there are only 2"),
        ("--virtual --what-if --out x.png", "error[P009]: `--out x.png`: pictures are SVG, not PNG"),
        ("--elastic 1:2", "error[P009]: `--elastic` was given without `--virtual`"),
        ("--virtual --start-s 1", "error[P009]: `--start-s` was given without `--elastic`"),
        (
            "--virtual --elastic 1:2 --what-if",
            "error[P009]: `--elastic` was given with `--what-if`, whose runs have ranks that stay",
        ),
        (
            "--virtual --elastic 1:2 --plan 'join at step=1' --hang-timeout 5",
            (
                "error[P009]: `--hang-timeout` was given with `--elastic`, "
                "where a worker that makes no progress is killed after 5 s or four median steps"
            ),
        ),
        ("--virtual --elastic 2:1", "error[P009]: `--elastic 2:1`: MIN is at most MAX"),
        ("--virtual --plan 'join at step=1'", "error[P037]: `join` needs a run whose workers come and go"),
        ("--virtual --out kept", "error[P009]: `--out` was given with `--virtual`, which has no values to keep"),
    ],
)
def test_what_makes_no_sense_on_a_virtual_clock_is_refused(ttlaunch, options, first_line):
    answer = ttlaunch(f"simulate data_parallel {options}")
    assert (2, "") == (answer.status, answer.stdout)
    assert first_line == answer.stderr.splitlines()[0]
