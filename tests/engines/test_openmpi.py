"""The command line and the files for Open MPI 4.1 and 5, compared with `tests/golden/`."""

import dataclasses
import os
import subprocess

import pytest

from ttlaunch.diagnostics import Diagnostic
from ttlaunch.engines.base import DaemonStart
from ttlaunch.engines.openmpi import GENERATIONS, OpenMpi, OpenMpiFinder, generation_of
from ttlaunch.planning.engine import OverHosts, RanksToStart
from ttlaunch.planning.launch_plan import RankRow

SLOTS = [("box-01", 2), ("ann@box-02", 1)]
ROWS = [
    RankRow(0, "box-01", 0, "worker"),
    RankRow(1, "box-01", 1, "aggregator"),
    RankRow(2, "box-02", 0, "optimizer"),
]


def command(version, rows=ROWS, slots=SLOTS, **more):
    engine = OpenMpi("/opt/bin/mpirun", version, generation_of(version))
    return engine.command(RanksToStart("/opt/bin/python", "/opt/shim.py", rows, slots, **more))


@pytest.mark.parametrize("version", [(5, 0, 11), (4, 1, 4)], ids=["5", "4"])
def test_the_command_and_its_files_are_the_known_good_ones(golden, version):
    engine = command(version)
    settings = {**engine.environment, **dict.fromkeys(engine.names.folder_variables, "SCRATCH")}
    text = f"# {engine.name}\n" + "\n".join(engine.argv) + "\n"
    text += "\n# environment of mpirun\n" + "".join(f"{name}={value}\n" for name, value in settings.items())
    text += "".join(f"\n# {name}\n{content}" for name, content in engine.files.items())
    golden(f"openmpi-{version[0]}.txt", text)


@pytest.mark.parametrize("version", [(5, 0, 11), (4, 1, 4)], ids=["5", "4"])
def test_the_command_over_hosts_is_the_known_good_one(golden, version):
    over_hosts = OverHosts("~/.ttlaunch", ("10.0.0.0/24", "10.0.1.0/24"), ("10.0.0.0/24", "192.168.1.0/24"))
    engine = command(version, over_hosts=over_hosts)
    settings = {engine.names.remote_shell_variable: "sh SCRATCH/ssh"}
    text = "\n".join(engine.argv) + "\n" + "".join(f"{name}={value}\n" for name, value in settings.items())
    golden(f"openmpi-{version[0]}-over-hosts.txt", text)


def test_open_mpi_is_free_to_use_rdma_where_every_host_has_it():
    argv = command((5, 0, 11), over_hosts=OverHosts("~/.ttlaunch", ("10.0.0.0/24",), (), has_rdma=True)).argv
    assert {"pml", "btl", "btl_tcp_if_include"} & set(argv) == set()


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("~/.ttlaunch", "/home/ann/.ttlaunch/runs/r1/start"),
        ("kept here", "/home/ann/kept here/runs/r1/start"),
        ("/srv/it's $HOME", "/srv/it's $HOME/runs/r1/start"),
    ],
)
def test_the_script_on_a_host_is_found_wherever_its_home_is(folder, expected):
    *_, shell, flag, script = command((5, 0, 11), over_hosts=OverHosts(folder)).argv
    environment = {"HOME": "/home/ann", "TTLAUNCH_RUN_ID": "r1", "PATH": "/usr/bin:/bin"}
    shown = script.replace('exec sh "$TTLAUNCH_START"', 'printf %s "$TTLAUNCH_START"')
    said = subprocess.run([shell, flag, shown], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == expected


def test_arguments_of_the_user_stand_in_the_command():
    argv = command((5, 0, 11), arguments=("-x", "A=b c")).argv
    at = argv.index("A=b c")
    assert ("-x", "A=b c", "/opt/bin/python") == argv[at - 1 : at + 2]


def test_the_command_does_not_grow_with_the_ranks():
    many = [RankRow(rank, f"box-{rank:04}", 0, "worker") for rank in range(1000)]
    long = command((5, 0, 11), rows=many, slots=[(row.host, 1) for row in many]).argv
    short = command((5, 0, 11)).argv
    assert [word for word in long if word != "1000"] == [word for word in short if word != "3"]
    assert len(long) == len(short)


def test_every_rank_has_its_line_in_the_rankfile():
    many = [RankRow(rank, f"box-{rank // 8}", rank % 8, "worker") for rank in range(64)]
    text = command((5, 0, 11), rows=many, slots=[(f"box-{host}", 8) for host in range(8)]).files["rankfile.txt"]
    assert text.splitlines()[63] == "rank 63=box-7 slot=0"
    assert len(text.splitlines()) == 64


def test_a_version_has_the_settings_of_one_generation_and_of_no_other():
    four, five = (dataclasses.asdict(generation) for generation in GENERATIONS)
    assert [name for name in four if four[name] == five[name]] == []
    for version, own, other in (((4, 1, 4), four, five), ((5, 0, 11), five, four)):
        made = command(version, over_hosts=OverHosts("~/.ttlaunch", ("10.0.0.0/24",), ("10.0.0.0/24",)))
        words = {*made.argv, *made.names.folder_variables, made.names.remote_shell_variable}
        names = [{values for values in generation.values() if isinstance(values, str)} for generation in (own, other)]
        said = f"self,{own['shared_memory']},tcp"
        assert names[0] - words == {own["shared_memory"]}
        assert said in words
        assert (names[1] - names[0]) & words <= {"--mca"}  # which Open MPI 5 has too, for what is MPI's own


@pytest.mark.parametrize("version", [(), (1, 10), (3, 1, 6), (4, 0, 3), (6,), (6, 0, 0), (10, 1)])
def test_a_version_that_nobody_knows_the_settings_of_gets_none(version):
    with pytest.raises(ValueError, match="no settings are known for Open MPI"):
        generation_of(version)


@pytest.mark.parametrize(
    ("says", "answer"),
    [
        ("4.1.0", "Open MPI 4.1.0"),
        ("5.1.0rc2", "Open MPI 5.1.0"),
        ("4.0.3", "is Open MPI 4.0.3; 4.1 or newer is needed"),
        ("6.0.0", "is Open MPI 6.0.0; older than 6 is needed"),
        ("6.0.0rc1", "is Open MPI 6.0.0; older than 6 is needed"),
        ("10.2", "is Open MPI 10.2; older than 6 is needed"),
    ],
)
def test_a_machine_with_a_version_that_cannot_be_used_is_refused(tmp_path, says, answer):
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\necho 'mpirun (Open MPI) {says}'\n")
    program.chmod(0o755)
    found = OpenMpiFinder().find(python=str(tmp_path / "python"), search_path="")
    if isinstance(found, Diagnostic):
        assert (found.code, found.message) == ("H003", f"{program} {answer}")
    else:
        assert found.name == answer
        assert found.signature.version_in(found.version_output) == found.version


def test_a_daemon_is_started_alike_for_a_login_shell_that_gets_parentheses():
    engine = OpenMpi("/opt/bin/mpirun", (5, 0, 11), generation_of((5, 0, 11)))
    start = DaemonStart("/opt", "/venv/bin", {}, ("python", "start_daemon.py"))
    words = "/opt/bin/prted --leave-session-attached --prtemca ess env"
    plain, in_parentheses = (
        engine.adapt_daemon(command, start) for command in (words, f"( test ! -r ./.profile || . ./.profile; {words} )")
    )
    assert plain == in_parentheses.rstrip()


def test_mpirun_inside_a_slurm_job_is_told_to_leave_hosts_and_daemons_to_the_launcher(tmp_path):
    (tmp_path / "mpirun").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "mpirun").chmod(0o755)
    for version, prefix in (((5, 0, 11), "PRTE"), ((4, 1, 4), "OMPI")):
        engine = OpenMpi(str(tmp_path / "mpirun"), version, generation_of(version))
        seen = {}
        for job in ({}, {"SLURM_JOBID": "7"}):
            with engine.start(
                dataclasses.replace(command(version), argv=(engine.program,)),
                folder=tmp_path,
                environment={"PATH": os.environ["PATH"], **job},
            ) as process:
                seen[bool(job)] = process.stdout.read().decode() if process.stdout else ""
        assert f"{prefix}_MCA_plm=^slurm" in seen[True]
        assert f"{prefix}_MCA_ras=^slurm" in seen[True]
        assert "^slurm" not in seen[False]
