"""`ttlaunch serve` as a user types it: clients of HTTP, real ranks behind the door, and what they learn when ranks die."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.mpi.typed import command, how_in, train, words_of
from ttlaunch.agent.run_processes import run_processes
from ttlaunch.app.door import KEY_VARIABLE
from ttlaunch.app.serve import ServeOptions, find_served
from ttlaunch.app.served_memory import predict_memory, refuse_too_large
from ttlaunch.diagnostics import LaunchError
from ttlaunch.running.runs.facts import DOOR_FILE

pytestmark = pytest.mark.mpi

SETS = {
    "training_config.steps": 12,
    "checkpoint_config.interval": 6,
    "transformer_config.num_blocks": 2,
    "transformer_config.num_heads": 4,
    "transformer_config.embedding_dim": 64,
    "transformer_config.max_sequence_length": 512,
}
LONG = {"prompt": "import os\n", "max_tokens": 480, "seed": 5, "temperature": 0.9, "stream": True}
EVERYWHERE = "0.0.0.0"  # noqa: S104 - it is refused
URLS = re.compile(r"chat page +(\S+)\nAPI +(\S+)/v1 ")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train(folder, "data_parallel", SETS)
    return folder


class Serving:
    """A command that serves, and a client of it."""

    def __init__(self, process, output):
        self.process, self.output = process, output
        self.page, self.api = URLS.search(wait_for(lambda: URLS.search(self.said()), process) and self.said()).groups()
        self.http = httpx.Client(base_url=self.api, timeout=60, trust_env=False)

    def said(self):
        return self.output.read_text()

    def until_healthy(self):
        wait_for(lambda: self.http.get("/health").status_code == 200, self.process)
        return self

    @property
    def run_id(self):
        return re.findall(r"^run (\S+):", self.said(), re.MULTILINE)[-1]

    def kill_rank(self, rank):
        found = wait_for(lambda: ranks_of(self.run_id).get(rank), self.process)
        os.kill(found, signal.SIGKILL)


def ranks_of(run_id):
    """Process ids of a run's ranks: of those that have a rank's number, the ones that were started last."""
    found = {}
    for pid in run_processes(run_id):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            numbers = [int(one.partition(b"=")[2]) for one in environment if one.startswith(b"OMPI_COMM_WORLD_RANK=")]
            found.update(dict.fromkeys(numbers, pid))
    return found


def wait_for(found, process, *, most_s=90):
    end = time.monotonic() + most_s
    while not (value := found()):
        assert process.poll() is None, "the command has ended"
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


@contextmanager
def served(trained, folder, *options):
    output = folder / "output.txt"
    words = words_of("serve", "latest", "--port", "0", "--api-port", "0", *options)
    with (
        output.open("w") as file,
        subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, **how_in(trained)) as process,
    ):
        try:
            serving = Serving(process, output)
            with serving.http:
                yield serving
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def pieces(response):
    """The texts of a stream as they come, and None for a comment."""
    for line in response.iter_lines():
        if line.startswith(":"):
            yield None
        elif line.startswith("data: {"):
            choices = json.loads(line.removeprefix("data: "))["choices"]
            yield from (choice["text"] for choice in choices)


def text_of(serving):
    with serving.http.stream("POST", "/v1/completions", json={"model": model(serving), **LONG}) as response:
        return "".join(filter(None, pieces(response)))


def model(serving):
    return serving.http.get("/v1/models").json()["data"][0]["id"]


KEY = "0123456789abcdef0123"


class Detached(Serving):
    """A run that serves in the background, for clients with a key; its supervisor is no child of the test."""

    def __init__(self, folder):
        began = command(folder, "serve", "latest", "--port", "0", "--api-port", "0", "--detach")
        assert 0 == began.returncode, began.stderr
        self.told = began.stdout + began.stderr
        self.page, self.api = URLS.search(self.told).groups()
        allowed = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(base_url=self.api, timeout=60, trust_env=False, headers=allowed)

    @property
    def run_id(self):
        return re.search(r"^(\S+) runs in the background", self.told, re.MULTILINE)[1]

    def until_healthy(self):
        end = time.monotonic() + 90
        while self.http.get("/health").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        return self


@pytest.fixture(scope="module")
def detached(trained):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        serving = Detached(trained)
    with serving.http:
        try:
            serving.until_healthy()
            serving.text = text_of(serving)
            yield serving
        finally:
            command(trained, "stop", serving.run_id)


@pytest.fixture(scope="module")
def undisturbed(detached):
    """The text that nothing disturbs, from one rank."""
    return detached.text


def counts_everything(metrics):
    """Whether the metrics have computing time of both ranks, and bytes in both directions."""
    busy = dict(re.findall(r'^ttlaunch_serve_stage_busy_seconds_total{rank="(\d)"} (\S+)$', metrics, re.MULTILINE))
    edges = re.findall(r'^ttlaunch_serve_sent_bytes_total{from="(\d)",to="(\d)"} (\d+)$', metrics, re.MULTILINE)
    sent = {(source, target): int(count) for source, target, count in edges}
    return {"0", "1"} == busy.keys() and min(map(float, busy.values())) > 0 and {("0", "1"), ("1", "0")} == sent.keys()


def test_the_client_of_openai_gets_what_it_asks_for_and_the_reason_where_a_rank_does_not_come_again(
    trained, tmp_path, undisturbed
):
    import openai  # noqa: PLC0415 - every process of pytest would import it

    with served(trained, tmp_path, "--ranks", "2") as serving:
        serving.until_healthy()
        assert re.search(
            r"rank 0 head \| serves .*, step 12, exact, weights [0-9a-f]{12}$", serving.said(), re.MULTILINE
        )
        client = openai.OpenAI(base_url=f"{serving.api}/v1", api_key="none", http_client=serving.http)
        whole = client.completions.create(model=model(serving), **{**LONG, "stream": False})
        assert (undisturbed, "length") == (whole.choices[0].text, whole.choices[0].finish_reason)
        wait_for(lambda: counts_everything(serving.http.get("/metrics").text), serving.process)
        assert "<!doctype html>" in httpx.get(serving.page, trust_env=False).text.lower()
        stream = client.completions.create(model=model(serving), **LONG)
        next(stream)
        serving.kill_rank(1)
        with pytest.raises(openai.APIError, match=r"rank 1 \(stage, localhost\) was killed by SIGKILL"):
            list(stream)
        assert 1 == serving.process.wait(60)
    assert [] == run_processes(serving.run_id)
    report = json.loads(command(trained, "report", serving.run_id, "--format", "json").stdout)
    for edge in report["traffic"]["edges"]:
        assert edge["ratio"] == pytest.approx(1.0, abs=0.005)
    assert {("rows", 0, 1), ("logits", 1, 0)} <= {
        (edge["operation"], edge["source"], edge["dest"]) for edge in report["traffic"]["edges"]
    }
    answered = report["served"]
    assert 1 == answered["texts"]  # and one that was lost
    assert 0 < answered["tokens"] < 960  # as the head had last written when the run ended it
    assert 0 < answered["first_token"]["median_s"] <= answered["working_s"]
    assert all(rank["computing_s"] > 0 for rank in answered["ranks"])


def kill_door(run):
    launcher = json.loads((run / "launcher.json").read_text())
    children = Path(f"/proc/{launcher['pid']}/task/{launcher['pid']}/children").read_text().split()
    doors = [int(pid) for pid in children if b"ttlaunch.serving.door" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(doors[0], signal.SIGKILL)


def test_a_text_goes_on_where_it_was_after_a_rank_was_killed_also_without_its_checkpoint_and_the_run_ends_with_its_door(
    trained, tmp_path, undisturbed
):
    shutil.copytree(trained / "runs", tmp_path / "runs", symlinks=True)
    with (
        served(tmp_path, tmp_path, "--ranks", "2", "--restart", "1") as serving,
        serving.until_healthy().http.stream(
            "POST", "/v1/completions", json={"model": model(serving), **LONG}
        ) as response,
    ):
        coming = pieces(response)
        before = "".join(next(coming) for _ in range(20))
        for kept in (tmp_path / "runs").glob("*/checkpoints"):  # as a training that goes on removes its old ones
            shutil.rmtree(kept)
        serving.kill_rank(1)
        after = list(coming)
        assert None in after  # it said that it was interrupted
        assert undisturbed == before + "".join(filter(None, after))
        assert 2 == serving.said().count("rank 0 head | serves")
        assert "restart 1 of 1, from step-12, as before" in serving.said()
        kill_door(tmp_path / "runs" / serving.run_id)
        assert 143 == serving.process.wait(60)
    assert "the process that answers clients was killed by signal 9; the run ends with it" in serving.said()
    assert [] == run_processes(serving.run_id)


def test_a_port_that_is_taken_is_refused_before_anything_starts(trained):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = sorted((trained / "runs").iterdir())
        refused = command(trained, "serve", "latest", "--port", str(port), "--api-port", "0")
    assert 2 == refused.returncode
    assert f"nothing can listen on port {port} of 127.0.0.1" in refused.stderr
    assert before == sorted((trained / "runs").iterdir())


def test_newer_weights_are_loaded_when_the_open_texts_have_ended(trained, tmp_path):
    shutil.copytree(trained / "runs", tmp_path / "runs", symlinks=True)
    (run,) = {path.parent for path in (tmp_path / "runs").glob("*/checkpoints/step-12")}
    (run / "step-12").rename(tmp_path / "later")
    with served(tmp_path, tmp_path, "--follow") as serving:
        serving.until_healthy()
        first = serving.http.get("/config").json()["weights_sha256"]
        undisturbed = text_of(serving)
        ask = {"model": model(serving), **LONG}
        with serving.http.stream("POST", "/v1/completions", json=ask) as response:
            coming = pieces(response)
            before = "".join(next(coming) for _ in range(5))
            (tmp_path / "later").rename(run / "step-12")
            assert undisturbed == before + "".join(filter(None, coming))
        wait_for(lambda: serving.http.get("/config").json()["weights_sha256"] != first, serving.process)
        serving.until_healthy()
        assert text_of(serving) != undisturbed
        assert re.findall(r"serves .*, step (\d+), exact", serving.said()) == ["6", "12"]
        assert "newer weights follow" in serving.said()
    assert 130 == serving.process.returncode


def test_a_dry_run_says_what_serving_takes_and_starts_nothing(trained):
    before = sorted((trained / "runs").iterdir())
    shown = command(trained, "serve", "latest", "--ranks", "2", "--max-streams", "4", "--dry-run")
    assert 0 == shown.returncode, shown.stderr
    # 2 blocks of 12 D² + 13 D, embeddings of 256 tokens and 512 positions, the head's norm and matrix; D = 64
    weights = (2 * (12 * 64**2 + 13 * 64) + (256 + 512) * 64 + 2 * 64 + 256 * 64) * 4
    cache = 2 * 2 * 4 * 512 * 64 * 4
    expected = f"weights {weights / 1e3:.1f} kB, keys and values of 4 texts of 512 tokens {cache / 1e6:.1f} MB"
    assert expected in shown.stdout
    assert f"sends   {(64 + 256) * 4 / 1e3:.1f} kB for each token" in shown.stdout
    assert before == sorted((trained / "runs").iterdir())


def test_what_the_machine_has_no_room_for_is_refused(trained, monkeypatch):
    monkeypatch.chdir(trained)
    spec, _ = find_served("latest", ServeOptions(), runs_dir=Path("runs"), working_folder=trained)
    memory = predict_memory(spec)
    refuse_too_large(memory)
    with pytest.raises(LaunchError, match=r"this machine has .* of memory left"):
        refuse_too_large(replace(memory, cache=1 << 60))


def test_a_run_in_the_background_asks_for_a_key_which_no_rank_gets_and_tells_a_stop_as_one(trained, detached):
    """No other test talks to this run, so it may end here."""
    refused = command(trained, "serve", "latest", "--host", EVERYWHERE, "--port", "0", "--api-port", "0")
    assert 2 == refused.returncode
    assert "clients need a key" in refused.stderr
    assert 401 == httpx.get(f"{detached.api}/v1/models", trust_env=False).status_code
    assert 200 == detached.http.get("/v1/models").status_code
    theirs = [Path(f"/proc/{pid}/environ").read_bytes() for pid in run_processes(detached.run_id)]
    assert theirs
    assert not [one for one in theirs if KEY.encode() in one]
    files = [path for path in (trained / "runs" / detached.run_id).rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    door = json.loads((trained / "runs" / detached.run_id / DOOR_FILE).read_text())
    assert (httpx.URL(detached.api).port, True) == (httpx.URL(door["api"]).port, door["needs_key"])
    with detached.http.stream("POST", "/v1/completions", json={"model": model(detached), **LONG}) as response:
        lines = response.iter_lines()
        next(lines)
        launcher = json.loads((trained / "runs" / detached.run_id / "launcher.json").read_text())
        os.kill(launcher["pid"], signal.SIGINT)  # as `ttlaunch stop`, whose start may take longer than the text
        rest = "\n".join(lines)
    stopped = command(trained, "stop", detached.run_id)
    assert (0, True) == (stopped.returncode, "interrupted" in stopped.stdout), stopped.stderr
    assert "the run was stopped" in rest
    assert "restarting" not in rest
    assert [] == run_processes(detached.run_id)
    with pytest.raises(httpx.ConnectError):
        detached.http.get("/health")


def test_the_door_ends_when_its_supervisor_is_killed(trained, tmp_path):
    with served(trained, tmp_path) as serving:  # its ranks are starting
        wait_for(lambda: ranks_of(serving.run_id), serving.process)
        launcher = json.loads((trained / "runs" / serving.run_id / "launcher.json").read_text())
        os.kill(launcher["pid"], signal.SIGKILL)
        serving.process.wait(60)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                serving.http.get("/health")
            except httpx.TransportError:
                break
            time.sleep(0.1)
        else:
            raise AssertionError("somebody still listens")
