"""A run in a notebook is a view that goes on until the run has ended; its texts are text, whoever chose them."""

import sys
import time
from types import SimpleNamespace

import pytest

import ttlaunch
from tests.dashboard.made_run import HOSTILE, MadeRun
from ttlaunch.app import notebook
from ttlaunch.app.notebook import NotebookView, show_while
from ttlaunch.running.runs.launcher import write_launcher


@pytest.fixture
def run(tmp_path):
    run = MadeRun(tmp_path / "runs" / "2026-01-01T00-00-00-aaaa")
    run.record(0, kind="ready", time=1e9, total_steps=9)
    run.steps(1, 3)
    return run


class Notebook:
    """What IPython's `display` does, as far as it is used: shows bundles, and replaces the shown one."""

    def __init__(self):
        self.shown = []

    def display(self, bundle, *, raw, display_id=None):
        assert raw
        self.shown.append(bundle)
        return self if display_id else None

    def update(self, bundle, *, raw):
        assert raw
        self.shown.append(bundle)


def test_a_view_goes_on_until_the_run_has_ended_and_shows_its_end(run, monkeypatch):
    monkeypatch.setattr(notebook, "EVERY_S", 0.01)
    place, left = Notebook(), [4, 5, 6]

    def goes_on():
        if not left:
            run.end()
            return False
        run.steps(left[0], left.pop(0))
        return True

    show_while(NotebookView(run.path), goes_on, place.display).join(30)
    texts = [one["text/plain"] for one in place.shown]
    assert "step 4/9" in texts[0]
    assert "step 6/9" in texts[-2]
    assert "state done" in texts[-1]
    assert "loss from 4 in step 1" in place.shown[-1]["text/html"]


def test_a_run_that_has_ended_is_shown_once_and_starts_no_thread(run):
    run.end()
    place = Notebook()
    assert show_while(NotebookView(run.path), lambda: False, place.display) is None
    assert 1 == len(place.shown)


def test_attach_shows_a_run_by_the_protocol_of_notebooks(run, monkeypatch):
    run.end()
    place = Notebook()
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=place.display))
    attached = ttlaunch.attach(run.path)
    attached._ipython_display_()
    assert place.shown == [attached._repr_mimebundle_()]
    assert "state done" in place.shown[0]["text/plain"]


def test_an_attached_run_that_is_active_is_shown_anew_as_it_goes_on(run, monkeypatch):
    monkeypatch.setattr(notebook, "EVERY_S", 0.01)
    write_launcher(run.path)  # this process
    place = Notebook()
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=place.display))
    ttlaunch.attach(run.path)._ipython_display_()
    run.steps(4, 5)
    until = time.monotonic() + 60
    while "step 5/9" not in place.shown[-1]["text/plain"]:
        assert time.monotonic() < until
    run.end()
    while "state done" not in place.shown[-1]["text/plain"]:
        assert time.monotonic() < until
    assert "step 3/9" in place.shown[0]["text/plain"]


def test_without_ipython_a_run_is_text_and_one_whose_folder_is_gone_still_has_a_name(run):
    attached = ttlaunch.attach(run.path)
    assert "<Run 2026-01-01T00-00-00-aaaa: ended>" == repr(attached)
    run.path.rename(run.path.with_name("elsewhere"))
    assert {"text/plain": "<Run 2026-01-01T00-00-00-aaaa: ended>"} == attached._repr_mimebundle_()


def test_what_strangers_name_is_text_in_the_view(tmp_path):
    run = MadeRun(tmp_path / "run", name=HOSTILE, roles=(HOSTILE,), hosts=[HOSTILE])
    run.steps(1, 2, ranks=(0,))
    assert "<img" not in NotebookView(run.path).bundle()["text/html"]
