"""What is seen of `ttlaunch prepare` while it works: bars on a terminal, plain lines elsewhere, nothing beside JSON."""

import io

from rich.console import Console
from rich.progress import Progress, TextColumn

from ttlaunch.cli.prepare_view import BarView


def test_everywhere_but_on_a_terminal_each_step_of_a_host_is_a_line_and_beside_json_nothing_is_said(bench):
    assert "" == bench.run("--format json").stderr
    bench.wheels.add("numpy", "2.4.70", {"numpy/__init__.py": ""})
    pins = bench.folder / "constraints.txt"
    pins.write_text(pins.read_text().replace("numpy==2.4.6", "numpy==2.4.70"))
    lines = bench.run().stderr.splitlines()
    assert ["settling versions for", "fetching 1 wheel"] == [lines[0][:21], lines[1]]
    steps = ("looking", "receiving", "installing", "checking", "ready")
    # A slow machine also says what it fetches, and how far a step is.
    said = [line for line in lines[2:] if " of " not in line and not line.startswith("fetching numpy-")]
    assert [f"localhost: {step}" for step in steps] == said


def test_on_a_terminal_a_bar_says_what_its_host_does_and_how_far_it_is():
    columns = [TextColumn("{task.description} {task.fields[words]} {task.fields[amount]}", markup=False)]
    progress = Progress(*columns, console=Console(file=io.StringIO(), force_terminal=True))
    view = BarView(progress, ["metal-01", "metal-02"])

    def shown():
        tasks = progress.tasks
        return [(task.fields["words"], task.fields["amount"], task.completed / (task.total or 1)) for task in tasks]

    view.phase("metal-02", "receiving")
    view.moved("metal-02", done=10**6, total=4 * 10**6)
    assert [("connected", "", 0), ("receiving", "1.0 MB of 4.0 MB", 0.25)] == shown()
    view.phase("metal-02", "checking")
    view.phase("metal-01", "ready")
    assert [("ready", "", 1), ("checking", "", 0)] == shown()
