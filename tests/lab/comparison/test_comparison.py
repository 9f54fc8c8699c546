"""Comparing recipes: what is measured of a run, repeats as one row, and runs that need not be made again (D16, E14)."""

import json
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from ttlaunch import contract
from ttlaunch.cli.compare_picture import draw_comparison, draw_loss_curves
from ttlaunch.draw.bars import Measurement, Panel, render_bars
from ttlaunch.lab.comparison.measure import CODE_FILE, Measured, measure_run
from ttlaunch.lab.comparison.repeats import Attempt, Comparison, code_of
from ttlaunch.lab.comparison.summary import HEADING, cells, render_json, render_markdown, summarise
from ttlaunch.planning.comparison import Candidate, Workload

WORKLOAD = Workload(8)
FIRST = Measured(
    run_id="a",
    ranks={"worker": 2, "server": 1},
    steps_per_s=10.0,
    tokens_per_s=10240.0,
    samples_per_s=None,
    first_loss=5.5,
    loss=2.5,
    samples=128.0,
    bytes_per_step=1_500_000.0,
    is_counted=True,
    peak_memory_bytes=(300_000_000, 310_000_000, 290_000_000),
    idle_share=0.125,
    sha256="x",
)


def tried(candidate, *runs, error=None):
    found = [Attempt(Candidate(candidate), at, run, None, "ttlaunch run …") for at, run in enumerate(runs, 1)]
    return [*found, Attempt(Candidate(candidate), len(runs) + 1, None, error, "ttlaunch run …")] if error else found


def a_run(
    path,
    *,
    roles=("worker", "worker", "server"),
    plan_hash="abc",
    steps=8,
    server_reports=True,
    counts="tokens",
    losses=None,
):
    """A run of two workers that see half of a step's 64 tokens each, a step every 0.5 s after a slow first fourth.

    The first step is only waited for: connections are opened.
    """
    (path / contract.RECORDS_DIR).mkdir(parents=True)
    rows = [{"rank": rank, "host": "box", "slot": 0, "role": role} for rank, role in enumerate(roles)]
    config = {
        "training_config": {"batch_size": 2, "gradient_accumulation_steps": 2, "steps": steps},
        "transformer_config": {"max_sequence_length": 16},
    }
    plan = {
        "recipe": None,
        "command": {"name": "r"},
        "layout": None,
        "config": config,
        "ranks": rows,
        "hash": plan_hash,
    }
    (path / contract.PLAN_FILE).write_text(json.dumps(plan))
    for rank, role in enumerate(roles):
        lines = []
        for step in range(1, steps + 1):
            time = 100.0 + (step * 2.0 if step <= 2 else 4.0 + (step - 2) * 0.5)
            if role == "worker" or server_reports:
                number = 32 if role == "worker" else 64
                loss = {"loss": losses[rank]} if losses else {}
                lines.append(contract.record_line({"kind": "step", "time": time, "step": step, counts: number, **loss}))
        (path / contract.progress_file(rank)).write_text("".join(lines))
        spent = [["step", {str(step): 1000 for step in range(1, steps + 1)}]]
        spent += [["forward", {str(step): 400 for step in range(1, steps + 1)}]] if role == "worker" else []
        stretch = {"format": 1, "first": 0, "last": steps, "facts": {}, "spent": spent}
        stretch["sent"] = [
            ["gradients", None, "exchange", 2, [[1, steps, 1, 1, 500]]],
            ["weights", None, "start", 2, [[0, 0, 1, 1, 9000]]],
            ["losses", None, "after", 2, [[steps, steps, 1, 1, 77]]],
        ]
        waited = 250 if role == "worker" else 900
        waits = {str(step): 1000 if step == 1 else waited for step in range(1, steps + 1)}
        stretch["waited"] = [["gradients", "exchange", waits]]
        (path / contract.traffic_file(rank)).write_text(json.dumps(stretch) + "\n")
    ranks = [{**row, "peak_memory_bytes": 1000 + row["rank"]} for row in rows]
    report = {"status": "done", "plan_hash": plan_hash, "ranks": ranks, "first_validation": 5.0, "last_validation": 2.0}
    (path / contract.REPORT_FILE).write_text(json.dumps({**report, "parameters_sha256": "x"}))
    return path


def test_a_run_is_measured_after_its_warm_up(tmp_path):
    """E14: 64 tokens each half second; what an aggregator repeats of its workers' tokens counts once."""
    found = measure_run(a_run(tmp_path / "run"))

    assert 128.0 == found.tokens_per_s
    assert 2.0 == found.steps_per_s
    assert (5.0, 2.0, 8 * 64 / 16) == (found.first_loss, found.loss, found.samples)
    assert {"worker": 2, "server": 1} == found.ranks
    assert (1000, 1001, 1002) == found.peak_memory_bytes


def test_a_run_on_images_is_measured_in_samples(tmp_path):
    """64 images each half second; a step of the workload has 4 of them, whatever the number of their pixels."""
    found = measure_run(a_run(tmp_path / "run", counts="samples"))

    assert (None, 128.0) == (found.tokens_per_s, found.samples_per_s)
    assert (128.0 / 4, 8 * 64) == (found.steps_per_s, found.samples)


def test_a_comparison_on_images_names_samples_in_its_table_and_picture():
    rows = summarise(tried("sync_ps", replace(FIRST, tokens_per_s=None, samples_per_s=1234.0)))

    page = render_markdown(rows, WORKLOAD, machine="m")
    assert "| samples/s |" in page
    assert "| 1,234 |" in page
    assert "tokens/s" not in page
    picture = draw_comparison(render_json(rows, WORKLOAD, machine="m", repeats=1))
    assert "samples/s, higher is better" in picture
    assert "1,234" in picture
    assert "tokens/s" not in picture


def test_bytes_are_those_within_steps_and_idle_time_that_of_ranks_that_compute(tmp_path):
    """D16: neither the first weights nor validations, and no server that has nothing to do but wait."""
    found = measure_run(a_run(tmp_path / "run"))

    assert (1500.0, True) == (found.bytes_per_step, found.is_counted)
    assert 0.25 == found.idle_share


def test_tokens_that_only_one_rank_reports_are_those_of_the_step(tmp_path):
    """As the first worker of `data_parallel` does for all."""
    run = a_run(tmp_path / "run", roles=("worker", "server"), server_reports=True)
    (run / contract.progress_file(0)).write_text("")

    assert 128.0 == measure_run(run).tokens_per_s


def test_repeats_are_a_row_with_their_spread():
    """E14."""
    runs = [replace(FIRST, steps_per_s=speed) for speed in (10.0, 15.0, 11.0)]
    (row,) = summarise(tried("sync_ps", *runs))

    assert (11.0, 10.0, 15.0) == (row.steps_per_s.median, row.steps_per_s.least, row.steps_per_s.most)
    expected = (
        "sync_ps",
        "2 worker, 1 server",
        "11.0 (10.0 to 15.0)",
        "10,240",
        "2.500",
        "1.50",
        "310 MB",
        "12 %",
        "A",
    )
    assert expected == cells(row)


def test_equal_bits_have_equal_letters_and_runs_that_differ_have_none():
    other = replace(FIRST, sha256="y")
    attempts = [*tried("a", FIRST, FIRST), *tried("b", other), *tried("c", FIRST), *tried("d", FIRST, other)]

    assert ["A", "B", "A", None] == [row.bits for row in summarise(attempts)]


def test_a_recipe_that_failed_is_in_the_table_and_below_it():
    rows = summarise([*tried("a", FIRST), *tried("b", error="the model | is too large")])
    page = render_markdown(rows, WORKLOAD, machine="2 cores")

    assert "| b | failed | – | – | – | – | – | – | – |" in page.splitlines()
    assert page.endswith("Failed:\n\n- b: the model | is too large\n")
    assert ["a", "b"] == [row["name"] for row in render_json(rows, WORKLOAD, machine="m", repeats=1)["rows"]]
    widths = {line.count(" | ") for line in page.splitlines() if line.startswith("| ")}
    assert {len(HEADING) - 1} == widths


def test_bytes_from_a_formula_are_marked_and_unknown_idle_time_is_not_invented():
    (row,) = summarise(tried("fully_sharded", replace(FIRST, is_counted=False, idle_share=None)))

    assert ("≈ 1.50", "–") == (cells(row)[5], cells(row)[7])


def drawn(svg, kind, *, css="bar"):
    return [one for one in ET.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{kind}") if one.get("class") == css]  # noqa: S314 - it is ours


def texts_of(svg):
    return {one.text for one in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}  # noqa: S314 - it is ours


def test_a_picture_has_bars_from_zero_and_dots_on_the_axis_that_is_asked_for():
    found = (Measurement(10.0, 9.0, 12.0, "10"), Measurement(None), Measurement(5.0, 5.0, 5.0, "5 <&>"))
    panels = [Panel("speed", "a second", found), Panel("loss", "less is better", found, axis=(4.0, 14.0))]
    svg = render_bars("A & B", [["one"], ["two <", "x=3"], ["three"]], panels, note="2 cores")

    bars, dots = drawn(svg, "rect"), drawn(svg, "circle")
    widths = [float(one.get("width")) for one in bars]
    assert 2 == len(bars)
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    assert (110 * 5 / 10, 2) == (pytest.approx(float(dots[0].get("cx")) - float(dots[1].get("cx")), abs=0.1), len(dots))
    assert 2 == len(drawn(svg, "path", css="whisker"))
    assert ["one", "two <", "three"] == [one.text for one in drawn(svg, "text", css="label")]
    assert ["2 cores", "x=3", "a second", "less is better", "4.00"] == [
        one.text for one in drawn(svg, "text", css="quiet")
    ]


def test_a_comparison_is_drawn_from_its_json():
    """D16: what failed is left out, bytes from a formula are marked, changes have lines of their own."""
    guessed = replace(FIRST, is_counted=False, idle_share=None)
    rows = summarise([*tried("a", FIRST), *tried("zero (stage=3, a={b: 1, c: 2})", guessed), *tried("b", error="no")])
    svg = draw_comparison(json.loads(json.dumps(render_json(rows, WORKLOAD, machine="2 cores", repeats=1))))

    assert ["a", "zero"] == [one.text for one in drawn(svg, "text", css="label")]
    quiet = [one.text for one in drawn(svg, "text", css="quiet")]
    assert ["2 cores; 1 run of each: median, minimum and maximum", "stage=3", "a={b: 1, c: 2}"] == quiet[:3]
    numbers = [one.text for one in drawn(svg, "text", css="end")]
    assert ["10,240", "10,240", "2.500", "2.500", "1.50", "≈1.50", "310", "310", "12", "–"] == numbers


def test_losses_of_3_086_and_3_094_lie_side_by_side_on_the_axis_of_all_that_training_did():
    rows = summarise([*tried("a", replace(FIRST, loss=3.086)), *tried("b", replace(FIRST, loss=3.094))])
    svg = draw_comparison(json.loads(json.dumps(render_json(rows, WORKLOAD, machine="2 cores", repeats=1))))
    first, second = (float(one.get("cx")) for one in drawn(svg, "circle", css="bar"))
    assert 0 <= second - first < 1
    assert {"3.086", "3.094", "6"} <= texts_of(svg)


def test_the_curve_of_a_run_counts_global_batches_seconds_and_bytes(tmp_path):
    """Two workers report half of each batch's 64 tokens; the losses of one batch are one point."""
    path = a_run(tmp_path / "run", server_reports=False, losses={0: 4.0, 1: 2.0})
    found = measure_run(path)
    assert [1.0, 2.0, 3.0] == [step for step, *_ in found.curve][:3]
    assert {3.0} == {loss for _, loss, _, _ in found.curve}
    assert (8.0, 5.0) == (found.curve[-1][0], found.curve[-1][2])
    assert found.curve[-1][3] == found.bytes_per_step * 8


def test_repeats_are_one_curve_with_the_range_between_the_least_and_the_most():
    first = replace(FIRST, curve=((1.0, 5.0, 1.0, 100), (2.0, 4.0, 2.0, 200)))
    other = replace(FIRST, curve=((1.0, 5.0, 3.0, 100), (2.0, 3.0, 6.0, 200)))
    rows = summarise(
        [*tried("a", first, other), *tried("b", error="no"), *tried("c", replace(first, curve=first.curve[:1]))]
    )
    svg = draw_loss_curves(json.loads(json.dumps(render_json(rows, WORKLOAD, machine="2 cores", repeats=2))))
    assert 3 * 1 == len(drawn(svg, "path", css="band"))
    assert 3 * 2 + 2 == len(drawn(svg, "path", css="curve"))
    assert {"steps (global batches)", "seconds of training", "MB sent by all ranks", "a", "c"} <= texts_of(svg)
    assert "b" not in texts_of(svg)


def test_a_comparison_in_which_all_failed_is_a_picture_without_bars():
    rows = summarise(tried("b", error="no"))
    svg = draw_comparison(render_json(rows, WORKLOAD, machine="2 cores", repeats=1))
    assert [] == drawn(svg, "rect") + drawn(svg, "circle")
    assert [] == drawn(draw_loss_curves(render_json(rows, WORKLOAD, machine="2 cores", repeats=1)), "path", css="curve")
    assert ["2 cores; nothing was measured"] == [one.text for one in drawn(svg, "text", css="quiet")][:1]


def test_a_kept_run_is_taken_only_if_plan_and_code_are_the_same(tmp_path, monkeypatch):
    """E14: after Ctrl-C the same command continues where it was."""
    kept = a_run(tmp_path / "out" / "runs" / "2026-01-01T00-00-00-aaaa")
    (kept / CODE_FILE).write_text(json.dumps({"code": code_of("r")}))
    old = a_run(tmp_path / "out" / "runs" / "2026-01-01T00-00-00-bbbb")
    (old / CODE_FILE).write_text(json.dumps({"code": "of yesterday"}))
    a_run(tmp_path / "out" / "runs" / "2026-01-01T00-00-00-cccc", plan_hash="other")
    started = []
    monkeypatch.setattr(Comparison, "_plan_hash", lambda self, candidate: "abc")
    monkeypatch.setattr(
        Comparison, "_run", lambda self, one, repeat: started.append(repeat) or Attempt(one, repeat, FIRST, None, "")
    )
    comparison = Comparison(WORKLOAD, on="local", folder=tmp_path / "out", repeats=2)
    attempts = list(comparison.attempts([Candidate("r")]))

    assert [(1, True), (2, False)] == [(one.repeat, one.was_kept) for one in attempts]
    assert [2] == started
    assert kept.name == attempts[0].measured.run_id


def test_a_change_of_a_recipe_makes_its_own_runs_anew_and_no_others(here):
    """Whoever works on a recipe of their own compares it with ours again and again."""
    for name in ("mine", "other"):
        (here / "recipes" / name).mkdir(parents=True)
        for file in ("recipe.py", "trainer.py"):
            (here / "recipes" / name / file).write_text("x = 1\n")
    before = [code_of("mine"), code_of("other")]
    (here / "recipes" / "mine" / "trainer.py").write_text("x = 2\n")

    assert [False, True] == [old == new for old, new in zip(before, [code_of("mine"), code_of("other")], strict=True)]


def test_a_run_that_fails_is_told_once_and_status_is_1(ttlaunch, here, monkeypatch):
    """R062: the table is written all the same."""
    failed = lambda self, one, repeat: Attempt(one, repeat, None, "there is no more memory", "ttlaunch run zero")  # noqa: E731
    monkeypatch.setattr(Comparison, "_plan_hash", lambda self, candidate: "")
    monkeypatch.setattr(Comparison, "_run", failed)
    answer = ttlaunch("compare zero --repeats 2 --format json")

    content = json.loads(answer.stdout)
    assert 1 == answer.status
    assert [("R062", "zero cannot be compared: there is no more memory")] == [
        (one["code"], one["message"]) for one in content["diagnostics"]
    ]
    assert ["zero"] == [row["name"] for row in content["rows"]]
    assert {"comparison.json", "comparison.md", "comparison.svg"} <= {
        path.name for path in (here / "comparison").iterdir()
    }


def test_a_name_that_is_no_recipes_is_refused_before_anything_is_run(ttlaunch, here):
    answer = ttlaunch("compare data_parallel zeroo:zero_config.stage=1")
    assert (2, "") == (answer.status, answer.stdout)
    assert answer.stderr.startswith("error[P001]: there is no recipe `zeroo`\n")
    assert answer.stderr.endswith("hint: did you mean `zero`?\n\n")
    assert not (here / "comparison").exists()


@pytest.mark.parametrize(
    ("line", "status", "expected"),
    [
        ("data_parallel zero:stage", 2, "P009 `stage` after `zero:` is not KEY=VALUE"),
        ("zero fabric_minimal", 2, "P009 fabric_minimal trains no model, so there is nothing to compare"),
        ("zero --set training_config.steps=9", 2, "P009 `--set training_config.steps` is given to `compare`"),
        ("zero zero:zero_config.stage=9", 3, "C005 `stage` is `9`; a number of at most 3 was expected"),
        ("--set training_config.stepz=9", 3, "C004 unknown key `stepz` in `training_config`"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_run(ttlaunch, here, line, status, expected):
    """Else it would be told after minutes of what can."""
    answer = ttlaunch(f"compare {line} --format json")
    found = [f"{one['code']} {one['message']}" for one in json.loads(answer.stdout)["diagnostics"]]
    assert (status, [expected]) == (answer.status, found)
    assert not (here / "comparison").exists()


def test_whose_mistake_it_is_is_said(ttlaunch):
    answer = ttlaunch("compare tensor_parallel zero --set multihost_config.num_workers=3")
    assert "  = note: of `tensor_parallel`\n" in answer.stderr


def test_changes_of_keys_with_one_name_are_two_rows():
    """`num_blocks` of the model, and of the pipeline."""
    both = [Candidate("p", (f"{section}.num_blocks=2",)) for section in ("a", "b")]
    assert 2 == len(summarise([Attempt(one, 1, FIRST, None, "") for one in both]))


@pytest.mark.mpi
@pytest.mark.slow
def test_recipes_are_compared_for_real_and_not_twice(here):
    """D16, E14: two recipes with the same bits; a second time nothing is started."""
    small = ["transformer_config.embedding_dim=16", "transformer_config.max_sequence_length=16"]
    words = ["compare", "data_parallel", "pipeline_parallel", "--steps", "6", "--repeats", "1", "--format", "json"]
    argv = [sys.executable, "-m", "ttlaunch", *words, *(word for one in small for word in ("--set", one))]
    first = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=250)
    assert 0 == first.returncode, first.stderr
    rows = json.loads(first.stdout)["rows"]
    assert ["data_parallel", "pipeline_parallel"] == [row["name"] for row in rows]
    assert ["A", "A"] == [row["bits"] for row in rows]
    for row in rows:
        (run,) = row["runs"]
        assert 6 * 16 == run["samples"]
        assert 0 < run["loss"] < run["first_loss"]
        assert min(run["steps_per_s"], run["bytes_per_step"], *run["peak_memory_bytes"]) > 0
        assert 0 <= run["idle_share"] < 1
        assert [1, 2, 3, 4, 5, 6] == [step for step, *_ in run["curve"]]
    made = sorted(path.name for path in (here / "comparison" / "runs").iterdir())
    again = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=250)
    assert json.loads(first.stdout) == json.loads(again.stdout)
    assert made == sorted(path.name for path in (here / "comparison" / "runs").iterdir())
