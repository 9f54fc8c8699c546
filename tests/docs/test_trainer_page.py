"""The complete trainer in the documentation runs as it stands, and its section on differing ranks is true."""

import re
from pathlib import Path

import pytest

import ttlaunch

PAGE = Path(__file__).parents[2] / "docs/how-to/write-your-own-trainer.md"
STEPS = {"circle_config.steps": 4}


@pytest.fixture
def recipe(here):
    """The page's two files, written where the page says."""
    *files, _ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    folder = here / "recipes/circle"
    folder.mkdir(parents=True)
    for name, text in zip(("recipe.py", "trainer.py"), files, strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_its_parameters_do_not_depend_on_the_number_of_ranks(recipe):
    one, *others = [ttlaunch.simulate("circle", ranks=ranks, set=STEPS).parameters_sha256 for ranks in (1, 2, 3)]

    assert one is not None
    assert [one, one] == others


def test_ranks_may_differ_in_what_they_report_under_names_of_their_own(recipe):
    line = "    ctx.report_parameters(model.named_parameters())\n"
    own_names = re.findall(r"^```python\n(place = .*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    trainer = recipe / "trainer.py"
    text = trainer.read_text(encoding="utf-8")
    drifting = text.replace(line, '    model[0].bias.data.add_(ctx.position("worker"))\n' + line)
    named = drifting.replace(line, "".join(f"    {part}\n" for part in own_names[0].splitlines()))
    assert named != drifting != text

    trainer.write_text(drifting, encoding="utf-8")
    refused = ttlaunch.simulate("circle", ranks=2, set=STEPS)
    trainer.write_text(named, encoding="utf-8")
    accepted = ttlaunch.simulate("circle", ranks=2, set=STEPS)

    assert ["R009"] == [diagnostic.code for diagnostic in refused.diagnostics]
    assert ["docs/how-to/write-your-own-trainer.md"] == [hint.split()[-1] for hint in refused.diagnostics[0].hints]
    assert ("done", ()) == (accepted.status, accepted.diagnostics)


@pytest.mark.mpi
@pytest.mark.slow
def test_it_learns_on_real_ranks(recipe):
    report = ttlaunch.run("circle", ranks=2)

    assert "done" == report.status
    assert int(report.results["points classified correctly"].removesuffix("%")) > 90
