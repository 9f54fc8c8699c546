"""`ttlaunch place` and the rules of placing: what is shown, what is written, what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest

from ttlaunch.diagnostics.explain import load_page

STAR = [(0, 1), (0, 2), (0, 3)]
HIERARCHY = "hierarchical_parallel --set multihost_config.num_workers=3"


@pytest.fixture
def star(here, write_cluster):
    return write_cluster(here / "star", STAR)


def test_the_proposal_shows_costs_ranks_and_hops(ttlaunch, star):
    answer = ttlaunch(f"place {HIERARCHY} --on star")
    expected = """\
hierarchical_parallel (two_tier) on star: cost 2.5 → 1.5, the best of all orders
rank  role                  host    mesh  was
   0  worker                box-01     1  rank 1
   1  worker                box-02     2  rank 2
   2  worker                box-03     3  rank 3
   3  aggregator_optimizer  box-00     0  rank 0

apart   pairs now  proposed
1 hop           1         3
2 hops          2         0
"""
    assert expected == re.sub(r" +$", "", answer.stdout, flags=re.MULTILINE)
    assert ("", 0) == (answer.stderr, answer.status)


def test_a_good_order_is_left_as_it_is(ttlaunch):
    answer = ttlaunch(f"place {HIERARCHY} --on 5loudboxes")
    first = "hierarchical_parallel (three_tier) on 5loudboxes: cost 2, the best of all orders; nothing to change"
    assert first == answer.stdout.splitlines()[0]


def test_the_short_form_is_a_line_for_each_rank(ttlaunch, star):
    answer = ttlaunch(f"place {HIERARCHY} --on star --format concise")
    assert "0\tworker\tbox-01\t1" == answer.stdout.splitlines()[0]


def test_programs_read_the_proposal_as_json(ttlaunch, star):
    found = json.loads(ttlaunch(f"place {HIERARCHY} --on star --format json").stdout)
    assert {"before": {"unreachable": 0, "time": 2.5}, "after": {"unreachable": 0, "time": 1.5}} == found["cost"]
    assert ["box-01", "box-02", "box-03", "box-00"] == found["hosts"]
    assert {"a": 0, "b": 3, "weight": 1.0, "before": 1, "after": 1} == found["pairs"][0]
    assert found["exact"]


def test_what_is_written_validates_and_costs_less(ttlaunch, star):
    ttlaunch(f"place {HIERARCHY} --on star --out new")
    answer = ttlaunch(f"validate new --recipe {HIERARCHY}")
    assert ("", 0) == (answer.stderr, answer.status)
    again = json.loads(ttlaunch(f"place {HIERARCHY} --on new --format json").stdout)
    assert (1.5, 1.5) == (again["cost"]["before"]["time"], again["cost"]["after"]["time"])


def test_rows_move_with_their_hosts_as_they_were_typed(ttlaunch, star, here):
    bindings = star / "rank_bindings.yaml"
    text = bindings.read_text().replace("mesh_id: 0}", 'mesh_id: 0, env_overrides: {LOG: "$HOME/log"}}')
    bindings.write_text(text + 'global_env: {A: "1"}\n')
    (star / "hosts.txt").write_text("ann@box-00 slots=1 max_slots=2\nbox-01\nbox-02\nbox-03\n")
    (star / "cluster.yaml").write_text("user: ann\n")
    ttlaunch(f"place {HIERARCHY} --on star --out new")
    hosts, written = (here / "new/hosts.txt").read_text(), (here / "new/rank_bindings.yaml").read_text()
    assert "box-01 slots=1\nbox-02 slots=1\nbox-03 slots=1\nann@box-00 slots=1 max_slots=2\n" in hosts
    assert "- rank: 3\n  mesh_id: 0\n  env_overrides:\n    LOG: $HOME/log\n" in written
    assert "mesh_graph_desc_path: ../star/mgd.yaml\n" in written
    assert "global_env:\n  A: '1'\n" in written
    assert "user: ann\n" == (here / "new/cluster.yaml").read_text()


def test_files_that_exist_are_never_written_over(refused, star):
    refused(f"place {HIERARCHY} --on star --out star", status=2)


def test_a_configuration_without_meshes_cannot_be_placed(refused):
    refused("place hierarchical_parallel --on local", status=3)


def test_a_script_cannot_be_placed(refused, star):
    refused("place work.py --on star", files={"work.py": ""}, status=2)


def test_validate_warns_of_bindings_that_cost_much_more(ttlaunch, star):
    answer = ttlaunch(f"validate star --recipe {HIERARCHY} --set multihost_config.socket_type=fabric")
    expected = """\
warning[P013]: these bindings cost 2.5; another order of the hosts costs 1.5
 --> star/rank_bindings.yaml:2:12
  |
2 |   - {rank: 0, mesh_id: 0}
  |            ^ the proposal gives rank 0 another host and mesh
  = note: the cost is the sum of weight ÷ channels over the links between the pairs of ranks that talk

hint: `ttlaunch place hierarchical_parallel --on star` proposes that order

"""
    assert (expected, 0) == (answer.stderr, answer.status)


def test_links_that_no_message_uses_are_no_reason_to_warn(ttlaunch, star):
    answer = ttlaunch(f"validate star --recipe {HIERARCHY}")
    assert ("", 0) == (answer.stderr, answer.status)


FABRIC = "plan hierarchical_parallel --set multihost_config.socket_type=fabric --set multihost_config.num_workers"


def test_fabric_sockets_need_a_path_for_every_pair(refused, here, write_cluster):
    write_cluster(here / "islands", [(0, 1), (1, 2), (3, 4)])
    refused(f"{FABRIC}=3 --on islands", status=3)


def test_fabric_sockets_need_links_at_all(refused, here, write_cluster):
    write_cluster(here / "bare", [], meshes=[0, 1, 2, 3, 4])
    refused(f"{FABRIC}=3 --on bare", status=3)


def test_fabric_sockets_need_meshes_of_one_shape(refused, here, write_cluster):
    write_cluster(here / "mixed", STAR, shapes={2: [2, 4]})
    refused(f"{FABRIC}=3 --on mixed", status=3)


def test_fabric_sockets_may_lead_through_other_meshes(ttlaunch, here, write_cluster):
    write_cluster(here / "chain", [(0, 1), (1, 2), (2, 3)])
    answer = ttlaunch(f"{FABRIC}=3 --on chain")
    assert ("", 0) == (answer.stderr, answer.status)


@pytest.mark.parametrize("code", ["P010", "P011", "P013"])
def test_the_files_on_a_page_give_its_code(ttlaunch, here, write_cluster, code):
    write_cluster(here / "lab", [(0, 1)])
    for file in load_page(code).files:
        (here / "lab" / file.name).write_bytes(file.content)
    answer = ttlaunch("validate lab --recipe hierarchical_parallel -c lab/train.yaml --format concise")
    # A graph in two parts is also warned of as such.
    assert {code} == set(re.findall(r"\[(\w+)\]", answer.stderr)) - {"T040"}


def test_a_descriptor_far_away_is_named_by_its_whole_path(ttlaunch, star, here, tmp_path_factory):
    far = tmp_path_factory.mktemp("far") / "a/b/c"
    ttlaunch(f"place {HIERARCHY} --on star --out {far}")
    assert f"mesh_graph_desc_path: {star / 'mgd.yaml'}\n" in (far / "rank_bindings.yaml").read_text()
    shutil.rmtree(Path(far))


def test_a_folder_for_files_that_cannot_be_made_is_refused(ttlaunch, here, star):
    (here / "taken").touch()
    answer = ttlaunch(f"place {HIERARCHY} --on star --out taken/new")
    message = "error[P032]: taken/new cannot be written: not a directory\n\n"
    message += "hint: a part of this path is a file; check its spelling\n\n"
    assert (2, message) == (answer.status, answer.stderr)


def test_the_speed_of_links_is_that_of_a_simulated_step(ttlaunch):
    answer = ttlaunch("place data_parallel --on 5loudboxes --link-us 3")
    assert (2, "") == (answer.status, answer.stdout)
    assert "`--link-us` was given without `--step-time`" in answer.stderr
