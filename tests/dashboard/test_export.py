"""`ttlaunch dashboard --export`: one file that holds all of the page, and asks nobody for anything (X11)."""

import json
import os
import re
import threading
import time

import pytest

from tests.dashboard.made_run import HOSTILE, MadeRun
from ttlaunch.dashboard.export import export_run
from ttlaunch.dashboard.page import SCRIPTS
from ttlaunch.dashboard.reading import Reading
from ttlaunch.running.runs.launcher import write_launcher

SAVED = re.compile(r'<script type="application/json" id="saved">(.*?)</script>', re.DOTALL)


@pytest.fixture
def run(tmp_path):
    made = MadeRun(tmp_path / "runs/2026-01-01T00-00-00-aaaa", name=HOSTILE)
    made.steps(1, 5)
    made.print(0, f"</script><script>document.title='owned'</script>{HOSTILE}\n")
    made.end()
    return made.path


def test_the_file_has_the_answers_of_the_server(run):
    saved = json.loads(SAVED.search(export_run(run).decode())[1])
    reading = Reading(run.parent)
    assert run.name == saved["run"]
    answers = {path.partition(run.name)[2]: answer for path, answer in saved["answers"].items()}
    assert json.loads(json.dumps(reading.facts(run.name))) == answers[""]
    loss = reading.live(run.name).series("train/loss", first=None, last=None, most=2000)
    assert loss["ranks"]
    assert json.loads(json.dumps(loss["ranks"])) == answers["/series"]["train/loss"]["ranks"]
    assert HOSTILE in answers["/logs"]["whole"]["lines"][-1]["text"]


def test_what_a_run_says_ends_no_element_of_the_file(run):
    page = export_run(run).decode()
    assert 3 == page.count("</script>")
    assert "<script>document" not in page
    assert HOSTILE not in page


def test_no_two_modules_of_the_page_declare_the_same_name(run):
    """They share one script in the file."""
    script = export_run(run).decode().partition('<script type="module">')[2].partition("</script>")[0]
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:const|let|function\*?|class) (\w+)", script, re.MULTILINE)
    assert len(names) > len(SCRIPTS)
    assert len(names) == len(set(names))


def test_a_run_that_goes_on_and_a_file_that_is_there_are_refused(run, ttlaunch, here):
    line = f"dashboard {run} --export run.html"
    assert 0 == ttlaunch(line).status
    before = (here / "run.html").read_bytes()
    again = ttlaunch(line)
    assert (2, before) == (again.status, (here / "run.html").read_bytes())
    assert "run.html already exists" in again.stderr
    assert 0 == ttlaunch(f"{line} --force").status
    write_launcher(run)
    (run / "report.json").unlink()
    going_on = ttlaunch(f"{line} --force")
    assert (2, before[:15]) == (going_on.status, (here / "run.html").read_bytes()[:15])
    assert f"{run.name} is still running" in going_on.stderr
    alone = ttlaunch("dashboard latest")
    assert (2, True) == (alone.status, "`--export FILE` writes that run to a file" in alone.stderr)


def test_a_named_pipe_is_written_if_somebody_reads_it_and_else_refused_at_once(run, ttlaunch, here):
    os.mkfifo(here / "pipe")
    answer = ttlaunch(f"dashboard {run} --export pipe --force")
    assert (2, True) == (answer.status, answer.stderr.startswith("error[P032]: pipe cannot be written: "))
    read = []
    reader = threading.Thread(target=lambda: read.append((here / "pipe").read_bytes()))
    reader.start()
    until = time.monotonic() + 60
    while ttlaunch(f"dashboard {run} --export pipe --force").status and time.monotonic() < until:
        time.sleep(0.05)
    reader.join(60)
    (page,) = read
    assert run.name == json.loads(SAVED.search(page.decode())[1])["run"]
    assert page.rstrip().endswith(b"</html>")
    alone = ttlaunch("dashboard --force")
    assert (2, True) == (alone.status, "`--force` was given without `--export`" in alone.stderr)
