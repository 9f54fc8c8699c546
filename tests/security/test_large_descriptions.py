"""Descriptions that are large on purpose: the time to refuse them grows with their length, and with nothing else."""

import time

import pytest
from pydantic import create_model

from ttlaunch.diagnostics.span import Source
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.schema import Section, check_schema
from ttlaunch.spec.located.yaml import parse_yaml

MANY = 4000
MISSING = 30
LONGEST_S = 15.0
"""Seconds of processor time that a case may take. Each takes less than 8 s; before its mend the first took more than half a minute."""


@pytest.fixture
def in_time():
    """Fails the test if it has needed more of the processor than it may; waiting for others does not count."""
    began = time.process_time()
    yield
    assert time.process_time() - began < LONGEST_S


def test_unknown_keys_are_compared_once_with_the_known_ones_however_many_of_these_are_missing(in_time):
    model = create_model("Wide", __base__=Section, **{f"required_number_{n}": (int, ...) for n in range(MISSING)})
    text = "".join(f"unknown_number_{n}: 1\n" for n in range(MANY))
    node, _ = parse_yaml(Source("wide.yaml", text), codes=TOPOLOGY)
    _, found = check_schema(model, node, codes=TOPOLOGY)
    assert MANY == sum(one.code == TOPOLOGY.unknown_key for one in found)


FILES = {
    "unknown keys of a training file": (
        "train.yaml",
        "".join(f"unknown_key_{n}: 1\n" for n in range(MANY)),
        "plan hierarchical_parallel -c train.yaml",
        MANY,
    ),
    "unknown keys of rank bindings": (
        "rank_bindings.yaml",
        "rank_bindings:\n" + "".join(f"  - {{rank: {n}, mesh_idd: 0}}\n" for n in range(MANY)),
        "validate rank_bindings.yaml",
        2,  # the same mistake in every row is one
    ),
    "unknown keys of a mesh graph": (
        "mgd.yaml",
        "ChipSpec: {arch: wormhole_b0}\n" + "".join(f"unknown_{n}: 1\n" for n in range(MANY)),
        "validate mgd.yaml",
        MANY + 3,
    ),
    "unknown words of a hostfile": (
        "hosts.txt",
        "".join(f"h{n} slotz=1\n" for n in range(MANY)),
        "plan fabric_minimal --hostfile hosts.txt",
        MANY,
    ),
    "aliases that unfold into a billion values": (
        "train.yaml",
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)),
        "plan hierarchical_parallel -c train.yaml",
        1,
    ),
    "a list of 10,000 levels": (
        "train.yaml",
        "a: " + "[" * 10_000 + "]" * 10_000 + "\n",
        "plan hierarchical_parallel -c train.yaml",
        1,
    ),
    "a training file of 20 MB": ("train.yaml", " " * 20_000_000, "plan hierarchical_parallel -c train.yaml", 1),
    "a mesh graph of 20 MB": ("mgd.yaml", "\n" * 20_000_000, "validate mgd.yaml", 1),
    "a number of 300,000 digits": ("mgd.textproto", "a: " + "9" * 300_000 + "_", "validate mgd.textproto", 1),
    "a text in millions of pieces": ("mgd.textproto", "a: " + '""' * 2_100_000, "validate mgd.textproto", 1),
    "a message of 10,000 levels": ("mgd.textproto", "a { " * 10_000 + "}" * 10_000, "validate mgd.textproto", 1),
    "five megabytes behind one alias": (
        "train.yaml",
        "a: &a {" + ", ".join(f"k{n}: {'x' * 5000}" for n in range(1000)) + "}\nb: [" + "*a, " * 400 + "]\n",
        "plan hierarchical_parallel -c train.yaml",
        2,
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_a_large_description_is_refused_in_seconds(ttlaunch, here, in_time, what):
    name, text, line, mistakes = FILES[what]
    (here / name).write_text(text)
    answer = ttlaunch(f"{line} --format concise")
    assert 3 == answer.status
    assert mistakes == (answer.stderr + answer.stdout).count("error[")
