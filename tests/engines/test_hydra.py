"""The command line and the files for the Hydra of MPICH and Intel MPI, compared with `tests/golden/`, and what its messages mean."""

import pytest

from ttlaunch.engines.base import DaemonStart, EngineReport
from ttlaunch.engines.hydra import INTEL, MPICH, Hydra, HydraFinder
from ttlaunch.planning.engine import OverHosts, RanksToStart
from ttlaunch.planning.launch_plan import RankRow

SLOTS = [("box-01", 2), ("ann@box-02", 1)]
ROWS = [
    RankRow(0, "box-01", 0, "worker"),
    RankRow(1, "box-02", 0, "aggregator"),
    RankRow(2, "box-02", 1, "worker"),
    RankRow(3, "box-01", 1, "optimizer"),
]
PRODUCTS = {
    "mpich": Hydra("/opt/bin/mpiexec.hydra", (5, 0, 2), MPICH),
    "intel-mpi": Hydra("/opt/bin/mpiexec.hydra", (2021, 18, 1), INTEL),
}
NETWORKS = OverHosts("~/.ttlaunch", ("10.0.0.0/24",), ("10.0.0.0/24", "192.168.1.0/24"))
START = DaemonStart("/home/ann/env", "/home/ann/env/bin", {"TTLAUNCH_RUN_ID": "r 1"}, ("python", "start_daemon.py"))


@pytest.fixture(params=PRODUCTS)
def engine(request):
    """The Hydra of each product in turn."""
    return PRODUCTS[request.param]


@pytest.mark.parametrize(("where", "over_hosts"), [("here", None), ("over-hosts", NETWORKS)])
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_command_and_its_files_are_the_known_good_ones(golden, product, where, over_hosts):
    made = PRODUCTS[product].command(
        RanksToStart("/opt/bin/python", "/opt/shim.py", ROWS, SLOTS, over_hosts=over_hosts)
    )
    text = f"# {made.name}\n" + "\n".join(made.argv) + "\n"
    text += "\n# environment of mpiexec\n" + "".join(f"{name}={value}\n" for name, value in made.environment.items())
    text += "".join(f"\n# {name}\n{content}" for name, content in made.files.items())
    golden(f"{product}-{where}.txt", text)


def test_hydra_is_free_to_use_rdma_where_every_host_has_it(engine):
    rdma = OverHosts("~/.ttlaunch", ("10.0.0.0/24",), (), has_rdma=True)
    argv = engine.command(RanksToStart("python", "shim.py", ROWS, SLOTS, over_hosts=rdma)).argv
    assert "10.0.0.0/24" not in argv


@pytest.mark.parametrize(
    ("answer", "mpich", "intel"),
    [
        (
            "HYDRA build details:\n    Version:                                 4.0.2\n    Release Date: …",
            (4, 0, 2),
            None,
        ),
        ("HYDRA build details: Version: 5.0.0rc1", (5, 0, 0), None),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)", None, (2021, 18, 1)),
        ("mpirun (Open MPI) 5.0.11", None, None),
        ("HYDRA build details:", None, None),
    ],
)
def test_each_product_is_recognised_by_its_own_version_text(answer, mpich, intel):
    assert (mpich, intel) == (MPICH.signature.version_in(answer), INTEL.signature.version_in(answer))


@pytest.mark.parametrize(
    ("library", "pairs"),
    [
        ("MPICH Version: 5.0.2", True),
        ("MPICH Version:      4.3.2", True),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS", True),
        ("Open MPI v5.0.11", False),
        ("", False),
    ],
)
def test_libraries_of_both_products_and_no_others_form_one_world(engine, library, pairs):
    assert pairs == engine.pairs_with(library)


def test_the_repair_of_a_wrong_pair_names_the_library_beside_the_program():
    hydra = Hydra("/opt/bin/mpiexec.hydra", (5, 0, 2), MPICH, "/opt/lib/libmpi.so.12")
    assert hydra.pairing_repair == "`export MPI4PY_LIBMPI=/opt/lib/libmpi.so.12` makes mpi4py load the library of MPICH"


@pytest.mark.parametrize(
    ("command", "adapted"),
    [
        (
            '"/opt/mpich/bin/hydra_pmi_proxy" --control-port 10.0.0.1:40219 --rmk user --iface eth0 --pgid 0',
            "/home/ann/env/bin/hydra_pmi_proxy --control-port 10.0.0.1:40219 --rmk user --pgid 0",
        ),
        (
            (
                "/opt/impi/bin//hydra_bstrap_proxy --upstream-host 10.0.0.1 --base-path /opt/impi/bin/ --iface eth0 "
                "--node-id 0 /opt/impi/bin//hydra_pmi_proxy --usize -1"
            ),
            (
                "/home/ann/env/bin//hydra_bstrap_proxy --upstream-host 10.0.0.1 --base-path /home/ann/env/bin/ "
                "--node-id 0 /home/ann/env/bin//hydra_pmi_proxy --usize -1"
            ),
        ),
    ],
    ids=["mpich", "intel-mpi"],
)
def test_a_daemon_gets_the_paths_of_its_host_and_no_interface_of_this_machine(engine, command, adapted):
    made = engine.adapt_daemon(command, START)
    assert made.endswith(f"; exec {adapted}")
    assert "export TTLAUNCH_RUN_ID='r 1'" in made
    assert "LD_LIBRARY_PATH=/home/ann/env/lib" in made


@pytest.mark.parametrize("command", ["", "uname", "/opt/bin/other_proxy --control-port x", "echo hydra_pmi_proxy"])
def test_other_commands_are_not_taken_for_a_daemon(engine, command):
    assert engine.adapt_daemon(command, START) is None


def test_a_killed_shim_is_read_from_the_message_that_names_its_rank(engine):
    said = (
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
        "=   RANK 1 PID 22887 RUNNING AT vm\n=   KILLED BY SIGNAL: 9 (Killed)\n"
    )
    assert EngineReport(killed_shims=frozenset({1})) == engine.read_output(said, {0: None, 1: None})


@pytest.mark.parametrize(
    ("said", "is_lost"),
    [
        ("[mpiexec@vm] control_cb (/mpich-5.0.2/src/pm/hydra/mpiexec/pmiserv_cb.c:280): assert (!closed) failed", True),
        ("[mpiexec@vm] Error: Downstream from host node-a exited abnormally", True),
        ("[mpiexec@vm] main (/mpich-5.0.2/src/pm/hydra/mpiexec/mpiexec.c:270): process manager error", False),
    ],
)
def test_a_killed_daemon_is_read_from_what_mpiexec_said_when_one_was_killed(engine, said, is_lost):
    assert is_lost == engine.read_output(f"{said}\n", {}).lost_daemon


def test_arguments_for_mpirun_are_refused():
    _, (found,) = HydraFinder().parse_arguments("--bind-to core")
    assert found.message == "`--mpi-args --bind-to core` cannot be used: mpiexec.hydra takes none"


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("HYDRA build details:\n    Version:      4.3.2", "MPICH 4.3.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626", "Intel MPI 2021.18.1"),
    ],
)
def test_the_product_is_found_by_what_the_program_says(tmp_path, says, expected):
    program = tmp_path / "bin/mpiexec.hydra"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat << END\n{says}\nEND\n")
    program.chmod(0o755)
    library = tmp_path / "lib/libmpi.so.12"
    library.parent.mkdir()
    library.touch()
    found = HydraFinder().find(python=str(tmp_path / "bin/python"), search_path="/none")
    assert (expected, str(library)) == (found.name, found.library)
