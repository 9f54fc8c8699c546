"""What a rank's process leaves of the exceptions that it handled and of the one that ended it, seen from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ttlaunch
from ttlaunch import contract

AT_START = Path(ttlaunch.__file__).parent / "at_start"


@pytest.fixture
def start(here):
    """`start(code)` starts a program as a shim does."""
    (here / contract.RECORDS_DIR).mkdir()
    processes = []

    def start(code, *, path="", **variables):
        (here / "work.py").write_text(code)
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            **({contract.ENV_PYTHONPATH: path} if path else {}),
            contract.ENV_EXCEPTIONS: str(here / contract.exceptions_file(0)),
            "PYTHONPATH": os.pathsep.join([str(AT_START), path] if path else [str(AT_START)]),
            **variables,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "work.py"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def lines(here):
    path = here / contract.exceptions_file(0)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_lines(here, number, *, within_s=20):
    deadline = time.monotonic() + within_s
    while len(lines(here)) < number:
        assert time.monotonic() < deadline, lines(here)
        time.sleep(0.01)
    return lines(here)


def test_an_exception_is_pending_while_the_program_still_cleans_up(here, start):
    process = start("import time\ntry:\n    raise ValueError('bucket 7')\nfinally:\n    time.sleep(60)\n")
    first, line = wait_for_lines(here, 2)
    assert (first["is_certain"], first["error"]["message"], first["error"]["line"]) == (False, "bucket 7", 3)
    assert (line["uncaught"], line["error"]["message"], line["error"]["line"]) == (False, "bucket 7", 3)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert lines(here) == [first, line]


def test_the_exception_that_ends_a_program_has_the_time_at_which_it_was_first_seen(here, start):
    process = start("import time\ntry:\n    raise ValueError('bucket 7')\nfinally:\n    time.sleep(0.5)\n")
    _, said = process.communicate()
    _, pending, _, last, _ = lines(here)
    assert (process.returncode, last["uncaught"], last["error"]["seen"]) == (1, True, pending["error"]["seen"])
    assert 0.3 < last["error"]["time"] - last["error"]["seen"] < 10
    assert said.count("ValueError: bucket 7") == 1, "Python still prints it itself"


def test_an_exception_that_nothing_delays_has_the_time_at_which_it_was_first_written(here, start):
    """Describing it imports modules, and another rank that fails because of this one may be faster with that."""
    assert start("raise ValueError('bucket 7')").wait() == 1
    first, *_, last, left = lines(here)
    for one in (last, left):
        assert one["error"]["seen"] <= first["error"]["time"] <= one["error"]["time"]


def test_a_loop_that_tries_again_is_never_pending(here, start):
    code = "import time\nfor _ in range(5):\n    try:\n        raise OSError\n    except OSError:\n        time.sleep(0.1)\n"
    assert start(code).wait() == 0
    first, taken_back, left = lines(here)
    assert (first["is_certain"], taken_back, left["error"]) == (False, {"error": None}, None), (
        "once, until files are loaded"
    )


def test_an_exception_that_compiled_code_kept_after_all_is_taken_back(here, start):
    code = """\
import time
class Look:
    @property
    def gone(self):
        try:
            raise AttributeError
        finally:
            time.sleep(0.2)
hasattr(Look(), "gone")
time.sleep(0.2)
"""
    assert start(code).wait() == 0
    _, pending, taken_back, _ = lines(here)
    assert pending["error"]["type"] == "AttributeError"
    assert taken_back == {"error": None}


def test_a_program_that_prints_an_exception_and_goes_on_has_not_failed(here, start):
    code = "import sys\ntry:\n    raise ValueError\nexcept ValueError:\n    sys.excepthook(*sys.exc_info())\n"
    assert start(code).wait() == 0
    assert [line["error"] for line in lines(here)] == [None], "only that it left"


def test_a_long_message_and_a_group_are_kept_with_their_place(here, start):
    start("raise ExceptionGroup('x' * 20_000, [ValueError('a')])\n").communicate()
    first, line, _ = lines(here)
    assert (first["uncaught"], first["error"]["type"], first["error"]["line"]) == (True, "ExceptionGroup", 1)
    assert (line["error"]["type"], line["error"]["line"], len(line["error"]["message"])) == ("ExceptionGroup", 1, 16384)


def test_the_program_sees_the_environment_and_the_path_that_it_was_meant_to_have(here, start):
    code = """\
import json, os, subprocess, sys
names = [name for name in ("PYTHONPATH", "TTLAUNCH_PYTHONPATH", "TTLAUNCH_EXCEPTIONS") if name in os.environ]
below = subprocess.run([sys.executable, "-c", "import sys; print(sys.modules.keys() & {'ttlaunch', 'sitecustomize'})"],
                       capture_output=True, text=True)
print(json.dumps([names, os.environ.get("PYTHONPATH"), [part for part in sys.path if "at_start" in part], below.stdout]))
"""
    assert json.loads(start(code).communicate()[0]) == [[], None, [], "set()\n"]
    assert json.loads(start(code, path="/some/where").communicate()[0]) == [
        ["PYTHONPATH"],
        "/some/where",
        [],
        "set()\n",
    ]


def test_a_sitecustomize_of_the_users_is_imported_as_before(here, start):
    (here / "theirs").mkdir()
    (here / "theirs/sitecustomize.py").write_text("print('theirs')\n")
    process = start("import sitecustomize\nprint(sitecustomize.__file__)\n", path=str(here / "theirs"))
    assert process.communicate() == (f"theirs\n{here}/theirs/sitecustomize.py\n", "")


def test_the_start_of_a_program_loads_nothing_else(here, start):
    code = "import sys\nprint(sorted(name for name in sys.modules if name in {'json', 'socket', 'threading', 'ast', 'traceback'}))\n"
    assert start(code).communicate()[0] == "[]\n"


def test_a_program_that_leaves_says_when(here, start):
    began = time.time()
    assert start("import sys\nsys.exit(0)\n").wait() == 0
    [line] = lines(here)
    assert (line["error"], began <= line["left"] <= time.time()) == (None, True)


def test_a_program_that_an_exception_ends_says_when_all_its_code_has_run(here, start):
    code = "import atexit, time\natexit.register(time.sleep, 0.3)\nraise ValueError('bucket 7')\n"
    assert start(code).wait() == 1
    _, raised, left = lines(here)
    assert (left["error"], left["uncaught"]) == (raised["error"], True)
    assert 0.25 < left["left"] - raised["error"]["time"] < 10


def test_a_file_with_the_name_of_a_module_that_describes_exceptions_changes_nothing_that_the_program_prints(
    here, start
):
    (here / "json.py").write_text("")
    process = start("raise ValueError('bucket 7')\n")
    _, said = process.communicate()
    assert "hook" not in said
    assert (process.returncode, said.splitlines()[-1]) == (1, "ValueError: bucket 7")
    last = lines(here)[-1]
    assert (last["error"]["message"], last["error"]["line"], last["uncaught"]) == ("bucket 7", 1, True)
    assert "left" in last


def test_an_exception_that_only_the_programs_own_hook_sees_is_known_too(here, start):
    process = start("import sys\nsys.excepthook = lambda *_: None\nraise ValueError('bucket 7')\n")
    assert (process.communicate()[1], process.returncode) == ("", 1)
    last = lines(here)[-1]
    assert (last["error"]["message"], last["error"]["line"], last["uncaught"]) == ("bucket 7", 3, True)
    assert "left" in last


def test_a_program_that_leaves_slowly_is_pending_with_its_status(here, start):
    start("import sys, time\ntry:\n    sys.exit(0)\nfinally:\n    time.sleep(60)\n")
    line = wait_for_lines(here, 2)[-1]
    assert (line["error"]["type"], line["error"]["message"]) == ("SystemExit", "0")


SLOW_END = "import atexit, sys, time\natexit.register(time.sleep, 0.2)\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("sys.exit(259)", 3),
        ("sys.exit()", 0),
        ("def main():\n    try:\n        raise SystemExit(4)\n    finally:\n        time.sleep(0.3)\nmain()", 4),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\ntime.sleep(0.3)", None),
        ("import threading\nthread = threading.Thread(target=sys.exit, args=[3])\nthread.start()\nthread.join()", None),
        ("", None),
    ],
)
def test_the_status_that_a_program_asked_for_is_known_before_its_libraries_have_ended(here, start, code, status):
    process = start(SLOW_END + code + "\n")
    _, said = process.communicate()
    assert (status or 0, status) == (process.returncode, lines(here)[-1].get("status")), said
    assert (None, True) == (lines(here)[-1]["error"], "left" in lines(here)[-1])


@pytest.mark.parametrize("last", ["raise ValueError('bucket 7')", "pass"])
def test_what_libraries_handle_after_the_program_does_not_replace_how_it_ended(here, last):
    """A library that was imported before the watch began, as torch in ranks that are forked, ends after it."""
    code = f"""
import atexit, time
from ttlaunch.rank_exceptions.watch import ExceptionWatch
def end_library():
    try:
        {{}}[20]
    except KeyError:
        time.sleep(0.3)
atexit.register(end_library)
watch = ExceptionWatch("exceptions.jsonl")
watch.take_hooks()
watch.start()
time.sleep(0.1)
{last}
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(ttlaunch.__file__).parents[1])}
    (here / "work.py").write_text(code)
    subprocess.run([sys.executable, "work.py"], env=environment, stderr=subprocess.DEVNULL, check=False)
    found = [json.loads(line) for line in (here / "exceptions.jsonl").read_text().splitlines()]
    assert "left" in found[-1]
    assert [] == [line for line in found if line["error"] and line["error"]["type"] == "KeyError"]


def test_a_folder_that_cannot_be_written_changes_nothing_for_the_program(here, start):
    process = start("raise ValueError('bucket 7')\n", **{contract.ENV_EXCEPTIONS: str(here / "no/where")})
    _, said = process.communicate()
    assert (process.returncode, said.splitlines()[-1]) == (1, "ValueError: bucket 7")
