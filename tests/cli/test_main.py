"""Starting the command line: what a command imports."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ttlaunch.cli.main import app

_LINE = """
import sys
sys.argv[1:] = ["sync", "--on", "nowhere"]
from ttlaunch.cli.main import main
try:
    main()
except SystemExit:
    print(*sys.modules)
"""


def test_a_command_imports_neither_the_other_commands_nor_pydantic(tmp_path):
    answer = subprocess.run([sys.executable, "-c", _LINE], cwd=tmp_path, capture_output=True, text=True, check=True)

    imported = set(answer.stdout.split())
    assert "ttlaunch.cli.sync" in imported
    assert set() == imported & {"ttlaunch.cli.run", "ttlaunch.cli.chaos", "pydantic", "rich"}


_RUN = """
import sys
for name in sys.argv.pop(1).split():
    sys.modules[name] = None  # whoever imports it fails, in the supervisor as well, which is a fork
sys.argv[1:] = ["run", "-n", "2", "--engine", "agents", "--env", "NAME=value", "--", "echo", "hello"]
from ttlaunch.cli.main import main
main()
"""


_OF_OTHER_RUNS = [
    *("pydantic", "yaml", "concurrent.futures", "importlib.metadata"),
    *("http.client", "statistics", "secrets", "ctypes", "ttlaunch.running.metrics.export", "ttlaunch.agent.probe"),
    *("ttlaunch.app.replan", "ttlaunch.app.slurm_job", "ttlaunch.cli.plan"),
    *("ttlaunch.running.checkpoints.last_states", "ttlaunch.running.checkpoints.tensor_file"),
]


def test_a_program_runs_without_modules_that_take_time_to_import_and_serve_other_runs(tmp_path):
    command = [sys.executable, "-c", _RUN, " ".join(_OF_OTHER_RUNS)]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (answer.returncode, answer.stderr) == (0, "")
    both = answer.stdout.count("×2 ranks 0-1 | hello\n")  # if they come at the same moment
    assert answer.stdout.count("| hello\n") + both == 2


_HOSTS = "import sys, ttlaunch.app.restarts, ttlaunch.app.ready_hosts, ttlaunch.draw.scene; print(*sys.modules)"


def test_a_program_over_hosts_is_made_ready_without_modules_that_serve_recipes():
    answer = subprocess.run([sys.executable, "-c", _HOSTS], capture_output=True, text=True, check=True)

    imported = set(answer.stdout.split())
    assert "ttlaunch.hosts.doctor.cuda" in imported
    of_others = {"pydantic", "yaml", "ttlaunch.spec.recipe.config", "ttlaunch.app.serve", "importlib.resources"}
    assert set() == imported & of_others


@pytest.mark.parametrize(("text", "ranks"), [("2", 2), ("02", 2), (" 2", 2), ("1_0", 10), ("+2", 2)])
def test_a_number_is_read_as_typer_reads_it(text, ranks):
    answer = CliRunner().invoke(app, ["plan", "-n", text, "--engine", "agents", "--", "true"])

    assert f": {ranks} ranks on 1 host, agents" in answer.output


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", "a number of at least 1"),
        ("-1", "a number of at least 1"),
        ("2.5", "a whole number"),
        ("", "a whole number"),
    ],
)
def test_a_number_that_an_option_does_not_take_is_refused_with_what_was_expected(text, expected):
    answer = CliRunner().invoke(app, ["plan", "-n", text, "--engine", "agents", "--", "true"])

    assert (answer.exit_code, answer.output) == (2, f"error[P009]: `--ranks` is `{text}`; {expected} was expected\n\n")


def test_python_m_ttlaunch_imports_no_file_of_the_current_folder(tmp_path):
    for name in ("json", "random", "signal", "typing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file')\n")
    answer = subprocess.run(
        [sys.executable, "-m", "ttlaunch", "plan", "-n", "2", "--", "echo", "x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "") == (answer.returncode, answer.stderr)
