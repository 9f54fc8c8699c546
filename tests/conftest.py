"""What all tests share: an empty folder to work in, the real command line, golden files, and skips that may not pass."""

import fcntl
import gc
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path

import hypothesis
import pytest
from _pytest.mark.expression import Expression
from typer.testing import CliRunner

from tests.examples import examples
from tests.matrices import COLLECTED, begin_with_the_longest, cells_to_leave_out

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"
pytest_plugins = ["tests.chromium", "tests.cluster.loopback"]
hypothesis.settings.register_profile(
    "shared", deadline=None, max_examples=examples(100), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)  # a machine that others use too says nothing about how fast a property is
hypothesis.settings.load_profile("shared")
MUST_RUN = "ALL_TESTS_MUST_RUN"
"""Set to 1, as in CI, a test that would be skipped for want of a program fails instead."""


def pytest_addoption(parser):
    parser.addoption("--rewrite", action="store_true", help="Write the golden files anew; then read the diff.")
    parser.addoption("--every-cell", action="store_true", help="Run all of the matrices of tests/matrices.py.")


def pytest_configure(config):
    """A hang-up ends what tests start, also where the tests themselves were told to ignore it (`nohup pytest`).

    Files are handed to processes in the order of `begin_with_the_longest`, not first those with many tests.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the byte code of test modules, also where nothing else keeps any: rewriting asserts takes half of a collection.

    What has been collected stays to the end, so no collection of garbage looks at it, neither meanwhile nor again.
    """
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        sys.dont_write_bytecode = before
        gc.collect()
        gc.freeze()


def pytest_ignore_collect(collection_path, config):
    """Leave out files without a test for `-m`: of 13,000 tests a twentieth has real ranks, and each process collects them all.

    A file is read for a marker that its text names; one that imports its tests from another file is always read.
    """
    markers = config.getoption("markexpr")
    if collection_path.suffix != ".py" or not markers or collection_path.parent.name == "cluster":
        return None
    names = set(re.findall(r"\w+", markers)) - {"and", "or", "not"}
    if Expression.compile(markers).evaluate(lambda _name, **_values: False):
        return None  # tests without a marker are wanted
    text = collection_path.read_text(encoding="utf-8")
    return None if "import *" in text or any(f"mark.{name}" in text for name in names) else True


def pytest_collection_modifyitems(config, items):
    """Leave out cells that repeat a claim, unless they are asked for, by option or by name."""
    config.stash[COLLECTED] = [item.nodeid for item in items]
    begin_with_the_longest(items)
    if config.getoption("--every-cell") or any("[" in word for word in config.args):
        return
    left_out = set(cells_to_leave_out(items))
    if left_out:
        config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item):
    beside = Path(sys.executable).with_name("mpirun")
    if item.get_closest_marker("mpi") and not beside.is_file() and shutil.which("mpirun") is None:
        _skip_or_fail("no mpirun beside this Python or in PATH")


def _skip_or_fail(reason):
    if os.environ.get(MUST_RUN) == "1":
        pytest.fail(f"{MUST_RUN}=1, but this test cannot run: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def mpirun_scratch():
    """A private place for the session folders of every mpirun that a test starts by hand.

    One that is killed, or only asked how it reads a hostfile, leaves its folder behind; a later mpirun that is given the
    same process id finds it and refuses to start. The launcher gives each run a folder of its own.
    """
    folder = tempfile.mkdtemp(prefix="ttl-tests-")
    places = dict.fromkeys(("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base"), folder)
    os.environ.update(places)
    state = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = folder  # runs of tests stay out of the registry of whoever starts them
    yield
    for name in places:
        del os.environ[name]
    os.environ.pop("XDG_STATE_HOME")
    if state is not None:
        os.environ["XDG_STATE_HOME"] = state
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _forked_simulations():
    """Fork the simulations of commands that run in this process from one that has imported torch: `tests/forked_simulation.py`."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("app.predict", "lab.play", "lab.virtual"):
            patch.setattr(f"ttlaunch.{module}.start_process", _start_simulation)
        yield


def _start_simulation(*words, **options):
    from tests.forked_simulation import start  # noqa: PLC0415 - most tests simulate nothing

    return start(*words, **options)


@pytest.fixture
def forked_predictions(monkeypatch):
    """Fork predictions as well: for tests that do not ask what the libraries of a process hold, which takes ten seconds to import."""
    from tests import forked_simulation  # noqa: PLC0415 - as above

    monkeypatch.setattr(forked_simulation, "MODULES", forked_simulation.MODULES | {"ttlaunch.runtime.predict"})


@pytest.fixture(scope="session")
def skip_or_fail():
    """`skip_or_fail(reason)`: skip, or fail where every test must run."""
    return _skip_or_fail


@pytest.fixture
def make_disk(tmp_path, skip_or_fail):
    """`make_disk(size)`: a new folder that is a file system of its own, in memory, of this size ("2500k", "8m")."""
    folders = []

    def make(size):
        folder = tmp_path / f"disk{len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            skip_or_fail("only root can mount a small file system")
        folders.append(folder)
        return folder

    yield make
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class Answer:
    """What a command said and how it ended."""

    status: int
    stdout: str
    stderr: str


@pytest.fixture
def ttlaunch(here, monkeypatch):
    """`ttlaunch("run …")` is the real command line, in this process, in the empty folder."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")

    def invoke(line, *, stdin=None):
        from ttlaunch.cli.main import make_app  # noqa: PLC0415 - only tests of the command line need it

        words = shlex.split(line) if isinstance(line, str) else line
        result = CliRunner().invoke(make_app(*words[:1]), words, input=stdin)  # one command, as `main` makes it
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return invoke


@pytest.fixture
def bare_python(tmp_path_factory):
    """`bare_python(hidden=…)`: an interpreter with our packages but no mpirun beside it, and its environment."""

    return lambda *, hidden=(): interpreter_without_mpirun(tmp_path_factory.mktemp("elsewhere"), hidden=hidden)


def interpreter_without_mpirun(folder, *, hidden=()):
    """An interpreter in an empty folder, with all our packages but those hidden, and its environment."""
    venv.create(folder, symlinks=True)
    packages = folder / "packages"
    packages.mkdir()
    for path in Path(get_path("purelib")).iterdir():
        if path.name.partition("-")[0] not in hidden:
            (packages / path.name).symlink_to(path)
    return folder / "bin/python", {**os.environ, "PYTHONPATH": f"{ROOT}:{packages}", "NO_COLOR": "1"}


@pytest.fixture(scope="session")
def mpich_python(tmp_path_factory, skip_or_fail):
    """The interpreter of an environment with MPICH's wheel of `constraints.txt` and all our packages; made once for all test processes."""
    try:
        return interpreter_with_mpich(tmp_path_factory.getbasetemp().parent)
    except LookupError as error:
        skip_or_fail(str(error))


def interpreter_with_mpich(base):
    """The interpreter of an environment below a folder with MPICH's wheel; it is made if it is not there.

    Raises:
        LookupError: The wheel cannot be installed.
    """
    version = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("mpich=="))
    folder = base / version.replace("==", "-")
    with (base / "mpich.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            venv.create(folder, symlinks=True, clear=True)
            install = [sys.executable, "-m", "pip", "--python", folder, "install", "-q", "--no-deps", version]
            installed = subprocess.run(install, capture_output=True, text=True, check=False)
            if installed.returncode:
                raise LookupError(f"MPICH cannot be installed: {installed.stderr[-200:]}")
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "ours.pth").write_text(f"import site; site.addsitedir({get_path('purelib')!r})\n")
            (folder / "complete").touch()
    return folder / "bin/python"


def _write_cluster(folder, links, *, meshes=None, slots=None, shapes=None):
    """Files of a cluster whose rank r drives the r-th of `meshes`, on hosts with `slots` ranks each."""
    count = 1 + max([mesh for link in links for mesh in link[:2]], default=0) if meshes is None else len(meshes)
    meshes = list(range(count)) if meshes is None else meshes
    slots = [1] * count if slots is None else slots
    shapes = shapes or {}
    boards = "\n".join(
        f"  {{name: b{mesh}, type: Mesh, topology: {shapes.get(mesh, [1, 8])}}}," for mesh in sorted(meshes)
    )
    rows = "\n".join(
        f"  {{id: {mesh}, board: b{mesh}, device_topology: {shapes.get(mesh, [1, 8])}, host_topology: [1, 1]}},"
        for mesh in sorted(meshes)
    )
    joined = ", ".join(f"[M{a}, M{b}, {rest[0] if rest else 2}]" for a, b, *rest in links)
    bound = "\n".join(f"  - {{rank: {rank}, mesh_id: {mesh}}}" for rank, mesh in enumerate(meshes))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts.txt").write_text("".join(f"box-{n:02} slots={count}\n" for n, count in enumerate(slots)))
    (folder / "mgd.yaml").write_text(
        "ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}\n"
        f"Board: [\n{boards}\n]\nMesh: [\n{rows}\n]\nRelaxedGraph: [{joined}]\n"
    )
    (folder / "rank_bindings.yaml").write_text(f'rank_bindings:\n{bound}\nmesh_graph_desc_path: "mgd.yaml"\n')
    return folder


@pytest.fixture(scope="session")
def write_cluster():
    """`write_cluster(folder, [(0, 1), (1, 2, 4)], meshes=…, slots=…, shapes=…)`: a configuration of meshes and links."""
    return _write_cluster


@pytest.fixture
def portable(tmp_path):
    """`portable(text)`: the text with names for what differs between machines."""
    names = {
        str(tmp_path.resolve()): "HERE",
        str(tmp_path): "HERE",
        str(ROOT): "CHECKOUT",
        sys.executable: "PYTHON",
        str(Path(sys.executable).parent): "BIN",
        socket.gethostname(): "THIS-MACHINE",
    }

    def rename(text):
        for value, name in sorted(names.items(), key=lambda item: -len(item[0])):
            text = text.replace(value, name)
        return re.sub(r"Open MPI \d+(\.\d+)+", "Open MPI VERSION", text)

    return rename


@pytest.fixture
def golden(request):
    """`golden(name, text)`: the text is that of `tests/golden/<name>`; `--rewrite` makes it so."""

    def compare(name, text):
        path = GOLDEN / name
        if request.config.getoption("--rewrite"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing; `pytest --rewrite` writes it"
        assert text == path.read_text(encoding="utf-8")

    return compare
