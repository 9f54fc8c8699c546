"""Rules about hosts: facts in, diagnostics out, word for word."""

from dataclasses import replace
from functools import partial

import pytest

from ttlaunch.diagnostics import Severity
from ttlaunch.engines.openmpi import SIGNATURE
from ttlaunch.hosts.doctor import checks
from ttlaunch.hosts.doctor.facts import Clock, Cpu, Devices, Interpreter, Leftover, Mpi, Shm
from ttlaunch.hosts.doctor.software import check_packages
from ttlaunch.spec.topology.model import Binding, Mesh, MeshId, Rank

check_everything = partial(checks.check_everything, engine=SIGNATURE)
PREPARE = "`ttlaunch prepare --on metal` gives every host the environment that ranks need"
MIB = 1024**2


@pytest.fixture
def found(healthy, topology):
    """`found(3, {2: {"shm": None}}, slots=1)`: (severity, code, message, label) of everything that is found."""

    def find(count, changes=None, *, slots=1, settings=None, **options):
        diagnostics = check_everything(
            healthy(count, changes), topology=topology(count, slots=slots, **(settings or {})), **options
        )
        return [(str(d.severity), d.code, d.message, d.primary.text if d.primary else None) for d in diagnostics]

    return find


def python(facts, **changes):
    return replace(facts(1).python, **changes)


def test_healthy_hosts_have_nothing_to_say(found):
    assert [] == found(4)


def test_two_names_of_one_machine_point_at_both_lines(healthy, topology, check):
    facts = healthy(3, {3: {"machine": "boot-1"}})

    check(
        check_everything(facts, topology=topology(3)),
        """
        error[H017]: `metal-01` and `metal-03` are the same machine, `metal-01`
         --> hosts.txt:3:1
          |
        3 | metal-03 slots=1
          | ^^^^^^^^ the same machine as metal-01
         --> hosts.txt:1:1
          |
        1 | metal-01 slots=1
          | -------- its other name
          = note: both names show the same boot of the same kernel, in the same namespaces

        hint: keep one line, with the slots of both
        """,
    )


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (-0.5, 3.0, []),  # the answer took long: the clocks may agree
        (1.9, 2.3, []),
        (2.1, 2.5, [("warning", "2.1 seconds ahead")]),
        (-30.4, -30.0, [("warning", "30.0 seconds behind")]),
        (-121.0, -120.0, [("error", "2 minutes behind")]),
        (3600.2, 3600.9, [("error", "60 minutes ahead")]),
    ],
)
def test_a_clock_that_is_off_is_judged_by_what_is_certain(found, least, most, expected):
    answer = found(2, {2: {"clock": Clock(least, most)}})

    assert [(s, "H019", f"host `metal-02` has a clock that is {text}", text) for s, text in expected] == answer


def test_a_missing_package_names_the_interpreter(found, facts):
    packages = {name: version for name, version in facts(1).python.packages.items() if name != "torch"}

    answer = found(3, {2: {"python": python(facts, packages=packages)}})

    assert [("error", "H005", "host `metal-02` has no torch", "no torch for /env/bin/python")] == answer


def test_packages_do_not_matter_to_a_program_that_is_no_recipe(found, facts):
    changes = {2: {"python": python(facts, packages={})}}

    assert [] == found(3, changes, packages=())


def test_another_torch_on_one_host_is_an_error_because_bits_would_differ(healthy, topology, facts, check):
    other = python(facts, packages={**facts(1).python.packages, "torch": "2.5.1"})

    check(
        check_everything(healthy(3, {3: {"python": other}}), topology=topology(3)),
        f"""
        error[H015]: host `metal-03` differs from the others: torch 2.5.1 (2.6.0 elsewhere)
         --> hosts.txt:3:1
          |
        3 | metal-03 slots=1
          | ^^^^^^^^ torch 2.5.1 (2.6.0 elsewhere)
          = note: with another torch the same training ends with other bits

        hint: {PREPARE}
        """,
    )


def test_the_patch_of_python_may_differ_and_its_minor_version_may_not(found, facts):
    assert [] == found(2, {2: {"python": python(facts, version=(3, 11, 2))}})
    text = "Python 3.12 (3.11 elsewhere)"
    assert [("error", "H015", f"host `metal-02` differs from the others: {text}", text)] == found(
        2, {2: {"python": python(facts, version=(3, 12, 1))}}
    )


def test_a_launching_machine_that_differs_from_all_hosts_is_a_warning(found, facts):
    here = facts(9, python=python(facts, packages={"torch": "2.4.0", "pydantic": "2.10.4"}))

    assert [("warning", "H015", "this machine differs from the hosts: torch 2.4.0 (hosts: 2.6.0)", None)] == found(
        2, launcher=here
    )


@pytest.mark.parametrize(
    ("mpi", "code", "message", "label"),
    [
        ({"mpirun": None, "says": None}, "H001", "has no Open MPI", "looked beside /env/bin/python and in PATH"),
        ({"says": None}, "H001", "has no Open MPI", "/env/bin/mpirun does not answer"),
        (
            {"says": "HYDRA build details:"},
            "H003",
            "has an mpirun that cannot be used",
            "/env/bin/mpirun says: HYDRA build details:",
        ),
        (
            {"says": "mpirun (Open MPI) 4.0.3"},
            "H003",
            "has an mpirun that cannot be used",
            "/env/bin/mpirun is Open MPI 4.0.3; 4.1 or newer is needed",
        ),
        (
            {"says": "mpirun (Open MPI) 6.0.0"},
            "H003",
            "has an mpirun that cannot be used",
            "/env/bin/mpirun is Open MPI 6.0.0; older than 6 is needed",
        ),
        ({"abi": None, "library": None}, "H004", "pairs mpi4py with another MPI", "mpi4py finds no MPI library"),
        (
            {"abi": "mpich", "library": "/usr/lib/libmpi.so.12"},
            "H004",
            "pairs mpi4py with another MPI",
            "mpi4py loads /usr/lib/libmpi.so.12, which is none of Open MPI",
        ),
    ],
)
def test_an_mpi_that_cannot_be_used_is_named(found, facts, mpi, code, message, label):
    answer = found(3, {1: {"mpi": replace(facts(1).mpi, **mpi)}})

    assert ("error", code, f"host `metal-01` {message}", label) == answer[0]


@pytest.mark.parametrize(("version", "severity"), [("5.0.8", "warning"), ("4.1.6", "error")])
def test_another_open_mpi_is_judged_by_its_major_version(found, facts, version, severity):
    other = Mpi("/env/bin/mpirun", "/env", f"mpirun (Open MPI) {version}", "/env/lib/libmpi.so.40", "openmpi")
    text = f"Open MPI {version} (5.0.11 elsewhere)"

    assert [(severity, "H020", f"host `metal-02` has another Open MPI: {text}", text)] == found(3, {2: {"mpi": other}})


def test_a_host_without_an_interpreter_is_not_blamed_for_the_open_mpi_in_its_path_too(found, facts):
    stray = Mpi("/usr/bin/mpirun", "/usr", "mpirun (Open MPI) 4.1.4", None, None)

    answer = found(2, {2: {"python": None, "tried": ("/bin/true",), "mpi": stray}}, settings={"python": "/bin/true"})

    text = "host `metal-02` has no Python that ranks could run with"
    assert [("error", "H014", text, "looked for /bin/true")] == answer


def test_a_named_folder_of_open_mpi_without_one_is_not_sent_to_prepare(healthy, topology, check):
    none = Mpi(None, None, None, None, "openmpi")

    check(
        check_everything(healthy(2, {2: {"mpi": none}}), topology=topology(2, mpi_prefix="/nope")),
        """
        error[H001]: host `metal-02` has no Open MPI
         --> hosts.txt:2:1
          |
        2 | metal-02 slots=1
          | ^^^^^^^^ looked in /nope/bin

        hint: `mpi_prefix:` in cluster.yaml names /nope; it is to be a folder with bin/mpirun of Open MPI, and without it that of the interpreter's environment is taken
        """,
    )


def test_hosts_are_compared_with_the_mpirun_that_starts_their_daemons(found, facts):
    old = replace(facts(1).mpi, says="mpirun (Open MPI) 4.1.6")

    assert [("error", "H020", "2 of 2 hosts have another Open MPI", "Open MPI 5.0.11 (4.1.6 here)")] == found(
        2, launcher=facts(9, mpi=old)
    )


def test_a_read_only_home_is_an_error_and_a_small_disk_a_warning(found, facts):
    disk = facts(1).disk
    broken = replace(disk, problem="read-only file system", nearest="/home/ttuser")
    small = replace(disk, free_bytes=100 * MIB)
    few = replace(disk, free_inodes=12)

    assert [
        (
            "error",
            "H016",
            "host `metal-01` does not allow writing in /home/ttuser/.ttlaunch (below /home/ttuser): read-only file system",
            "/home/ttuser/.ttlaunch (below /home/ttuser): read-only file system",
        ),
        ("warning", "H016", "2 of 3 hosts have little room", "100 MiB free in /home/ttuser/.ttlaunch, 256 MiB wanted"),
    ] == found(3, {1: {"disk": broken}, 2: {"disk": small}, 3: {"disk": few}})


@pytest.mark.parametrize(
    ("shm", "severity", "label"),
    [
        (None, "error", "there is no /dev/shm"),
        (Shm(64 * MIB, 64 * MIB, noexec=False, writable=False), "error", "ttuser may not write in /dev/shm"),
        (
            Shm(64 * MIB, 60 * MIB, noexec=False, writable=True),
            "warning",
            "60 MiB free, 64 MiB wanted for 4 slots",
        ),
    ],
)
def test_ranks_need_shared_memory(found, shm, severity, label):
    answer = found(2, {2: {"shm": shm}}, slots=4)

    assert [(severity, "H024", label)] == [(s, code, text) for s, code, _, text in answer]


def test_hosts_on_which_mpi_cannot_be_kept_on_the_network_are_named(found):
    assert [
        (
            "warning",
            "H041",
            "host `metal-02` lets MPI listen on all networks",
            "does not let a process trace its children",
        )
    ] == found(2, {1: {"moves_listeners": True}, 2: {"moves_listeners": False}})


def test_limits_are_measured_by_the_size_of_the_cluster(found):
    limits = {"nofile": (256, 4096), "nproc": (None, None), "memlock": (65536, 65536)}
    text = "nofile 256, 264 wanted"

    assert [("warning", "H023", f"host `metal-01` has limits too low for ranks: {text}", text)] == found(
        2, {1: {"limits": limits}}
    )
    assert (
        "nofile 256, 264 wanted; memlock 64 KiB, unlimited wanted for mlx5_0"
        == found(2, {1: {"limits": limits, "rdma": ("mlx5_0",)}})[0][3]
    )


def test_other_instruction_sets_are_a_warning_because_kernels_differ(found):
    old = Cpu("Xeon", "x86_64", 8, 8.0, ("avx2", "fma"))
    text = "x86_64 AVX2 (x86_64 AVX512 elsewhere)"

    assert [("warning", "H021", f"host `metal-03` has another kind of processor: {text}", text)] == found(
        3, {3: {"cpu": old}}
    )


@pytest.mark.parametrize(
    ("flags", "capability"),
    [
        (("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"), "AVX512"),
        (("avx2", "fma", "avx512f"), "AVX2"),
        (("avx2",), "DEFAULT"),
        (("asimd", "sve"), "SVE"),
    ],
)
def test_the_capability_is_the_one_by_which_pytorch_chooses(flags, capability):
    assert capability == Cpu("", "", 1, 1.0, flags).capability


def test_more_slots_than_processors_is_worth_a_note(found, facts):
    crowded = replace(facts(1).cpu, usable=1.5)

    assert [
        (
            "note",
            "H025",
            "host `metal-02` has more slots than processors",
            "2 slots, 1.5 of 8 processors for this login",
        )
    ] == found(2, {2: {"cpu": crowded}}, slots=2)


def test_a_host_without_devices_where_its_meshes_need_some(healthy, topology):
    cluster = topology(2)
    span = cluster.hosts[0].span
    meshes = tuple(Mesh(MeshId(n), "lbox", (1, 8), (1, 1), span) for n in range(2))
    bindings = tuple(Binding(Rank(n), MeshId(n), span) for n in range(2))
    bound = replace(cluster, meshes=meshes, bindings=bindings)

    answer = check_everything(healthy(2, {2: {"devices": Devices((), None, ())}}), topology=bound)

    assert ["host `metal-02` has no Tenstorrent devices"] == [d.message for d in answer]
    assert "no /dev/tenstorrent, but its meshes have 8 devices" == answer[0].primary.text
    assert Severity.WARNING is answer[0].severity


def test_a_driver_that_does_not_answer_is_a_warning(found):
    broken = Devices((), "couldn't communicate with the NVIDIA driver", ())

    assert ("warning", "H022", "host `metal-01` has nvidia-smi, which shows no GPU", broken.nvidia_problem) == found(
        1, {1: {"devices": broken}}
    )[0]


def test_leftovers_are_ended_by_their_exact_numbers(healthy, topology, check):
    folder = "/dev/shm/ttl-x1"  # noqa: S108 - where runs keep their sockets
    left = (Leftover(41, "2026-08-01T10", 3600.0, "python"), Leftover(57, "2026-08-01T10", 3600.0, "python"))

    check(
        check_everything(healthy(2, {2: {"leftovers": left, "folders": (folder,)}}), topology=topology(2)),
        """
        warning[H026]: host `metal-02` has leftovers: 2 processes of run 2026-08-01T10, 1 folder in /dev/shm
         --> hosts.txt:2:1
          |
        2 | metal-02 slots=1
          | ^^^^^^^^ 2 processes of run 2026-08-01T10, 1 folder in /dev/shm

        hint: `ssh metal-02 kill 41 57`

        hint: `ssh metal-02 rm -r /dev/shm/ttl-x1`
        """,
    )


def test_a_name_that_means_another_machine_says_which(healthy, topology, check):
    facts = healthy(
        3,
        {
            1: {"names": {"metal-02": ("10.0.0.3",), "metal-01": ("127.0.1.1",), "metal-03": ()}},
            2: {"names": {"metal-01": ("10.0.0.1",)}},
        },
    )

    check(
        check_everything(facts, topology=topology(3)),
        """
        warning[H018]: host `metal-01` takes another machine for `metal-02`
         --> hosts.txt:1:1
          |
        1 | metal-01 slots=1
          | ^^^^^^^^ here metal-02 means 10.0.0.3, which is metal-03; metal-02 has 10.0.0.2
          = note: MPI connects by address; programs that meet by name, as gloo and NCCL do, would meet the wrong one

        hint: `ssh metal-01 getent hosts metal-02`, then correct its /etc/hosts or its DNS
        """,
    )


def test_an_address_that_only_the_gateway_knows_is_right_if_ssh_reached_the_host_by_it(found):
    names = {"metal-02": ("198.51.100.7",)}
    connections = {"metal-01": None, "metal-02": ("203.0.113.1", "198.51.100.7")}

    assert [] == found(2, {1: {"names": names}}, connections=connections)


def test_an_interpreter_that_is_missing_or_too_old_for_ranks(found, facts):
    old = Interpreter("/usr/bin/python3", (3, 10, 4), "/usr", facts(1).python.packages, ())
    looked = ("~/.ttlaunch/env/bin/python", "python3")

    answer = found(3, {1: {"python": None, "tried": looked}, 2: {"python": old}})

    assert (
        "error",
        "H014",
        "2 of 3 hosts have no Python that ranks could run with",
        "looked for ~/.ttlaunch/env/bin/python and python3",
    ) == answer[0]


@pytest.mark.parametrize(("section", "severity"), [("disk", "error"), ("devices", "warning")])
def test_a_section_without_an_answer_is_named(found, section, severity):
    answer = found(2, {1: {section: None, "unanswered": (section,)}})

    label = f"no answer about its {section}"
    assert [(severity, "H013", "host `metal-01` did not answer everything within 3 s", label)] == answer


def test_a_clock_that_is_a_minute_off_keeps_a_run_back_and_one_that_is_seconds_off_does_not(found):
    answer = found(2, {1: {"clock": Clock(5.0, 5.1)}, 2: {"clock": Clock(99.0, 99.1)}})

    assert [
        ("error", "H019", "host `metal-02` has a clock that is 2 minutes ahead"),
        ("warning", "H019", "host `metal-01` has a clock that is 5.0 seconds ahead"),
    ] == [one[:3] for one in answer]


def test_a_script_that_needs_torch_alone_does_not_ask_for_the_rest(facts, topology):
    one = facts(1)
    without = {name: version for name, version in one.python.packages.items() if name != "torch"}
    with_torch_alone = {"metal-01": replace(one, python=python(facts, packages={"torch": "2.6.0"}))}
    without_torch = {"metal-01": replace(one, python=python(facts, packages=without))}
    assert [] == check_packages(with_torch_alone, topology=topology(1), needed=("torch",))
    [found] = check_packages(without_torch, topology=topology(1), needed=("torch",))
    assert ("H005", "host `metal-01` has no torch") == (found.code, found.message)
