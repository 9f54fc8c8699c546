"""`ttlaunch serve` over hosts: the text of one process, and what clients learn when a host is cut off (D12, D13)."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import time
from contextlib import contextmanager

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from ttlaunch import contract

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

TRAIN = (
    "run data_parallel --ranks 1 --set training_config.steps=4 --set checkpoint_config.interval=4 "
    "--set transformer_config.num_blocks=2 --set transformer_config.num_heads=4 "
    "--set transformer_config.embedding_dim=64 --set transformer_config.max_sequence_length=512 "
    "--set device_config.threads_per_rank=1"
)
PORTS = re.compile(r"chat page +\S+\nAPI +http://127.0.0.1:(\d+)/v1 ")
PROMPT, SEED, FEW_TOKENS, TOKENS = "import os\n", 5, 60, 300


class Client:
    """Asks the door on the launcher."""

    def __init__(self, cluster, port):
        self.cluster, self.port = cluster, port

    @contextmanager
    def asked(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.sock = self.cluster.connect("launcher", self.port)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            with connection.getresponse() as answer:
                yield answer

    def get(self, path):
        with self.asked("GET", path) as answer:
            return answer.status, json.loads(answer.read())

    def pieces(self, tokens):
        """The pieces of a text of so many tokens as they come."""
        ask = {"prompt": PROMPT, "seed": SEED, "temperature": 0.9, "max_tokens": tokens, "stream": True}
        ask["model"] = self.get("/v1/models")[1]["data"][0]["id"]
        with self.asked("POST", "/v1/completions", ask) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield from (choice["text"] for choice in json.loads(line.removeprefix(b"data: "))["choices"])


@pytest.fixture
def served(make_cluster, ttlaunch_on, lab, tmp_path):  # noqa: F811 - the fixture
    """A model that two hosts serve, the head on the first one: the cluster, a client, and the text of one process."""
    cluster = make_cluster(hosts=2)
    lab(cluster.hostfile())
    line = ttlaunch_on(cluster)
    trained = line(TRAIN, timeout_s=120)
    assert trained.status == 0, trained.stderr
    words = ["generate", "latest", PROMPT, "--seed", SEED, "--temperature", "0.9", "--max-tokens", TOKENS]
    alone = line([*words, "--format", "json"], timeout_s=120)
    assert alone.status == 0, alone.stderr
    said = tmp_path / "said.txt"
    options = "--on lab --ranks 2 --restart 1 --port 0 --api-port 0"
    with said.open("w") as file:
        process = line.start(f"serve latest {options}", stdout=file, stderr=subprocess.STDOUT)

    def port():
        assert process.poll() is None, said.read_text()
        return PORTS.search(said.read_text())

    client = Client(cluster, int(wait_until(port, what="it serves", timeout_s=90).group(1)))
    wait_until(lambda: client.get("/health")[0] == 200, what="it is healthy", timeout_s=60)
    yield cluster, client, json.loads(alone.stdout)["choices"][0]["text"], said
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


def test_two_hosts_have_the_text_of_one_process_also_when_one_is_cut_off_in_its_middle(served):
    cluster, client, alone, said = served
    whole = "".join(client.pieces(FEW_TOKENS))
    assert whole
    assert alone.startswith(whole.rstrip("\ufffd"))  # which stands for a character whose last bytes would come later
    coming = client.pieces(TOKENS)
    begun = "".join(next(coming) for _ in range(20))
    cluster.link("node1", up=False)
    cut_at = time.monotonic()

    def names_host():
        status, health = client.get("/health")
        return health["reason"] if status == 503 and "node1" in (health["reason"] or "") else None

    wait_until(names_host, what="the client learns which host", timeout_s=contract.LEASE_S + 2)
    assert time.monotonic() - cut_at < contract.LEASE_S + 2
    assert begun + "".join(coming) == alone
    assert "restart 1 of 1" in said.read_text()
    cluster.link("node1", up=True)
