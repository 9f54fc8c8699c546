"""Run folders as the launcher and its ranks leave them, written piece by piece where a test wants that."""

import json
import os
import time

from ttlaunch import contract
from ttlaunch.flight_recorder import RECV
from ttlaunch.flight_recorder_writer import FlightRecorder
from ttlaunch.running.logs.merge import MERGED_FILE
from ttlaunch.running.runs.facts import DOOR_FILE, MEMBERS_FILE
from ttlaunch.running.runs.launcher import write_launcher
from ttlaunch.running.runs.run_folder import RunFolder, append_event

CONFIG = {"training_config": {"learning_rate": 0.001, "batch_size": 32, "steps": 10_000_000}}
DOOR = {"page": "http://127.0.0.1:5050", "api": "http://127.0.0.1:8080", "needs_key": True}
HOSTILE = '"><img src=x onerror="document.title=1">'


class MadeRun:
    """A run that grows."""

    def __init__(
        self, path, *, name="data_parallel", roles=("worker", "worker"), hosts=None, more_workers=0, config=CONFIG
    ):
        self.path = path
        hosts = hosts or ["localhost"] * len(roles)
        rows = [
            {"rank": rank, "host": hosts[rank], "slot": 0, "role": role, "local_rank": 0}
            for rank, role in enumerate(roles)
        ]
        later = {"host": "localhost", "slot": 0, "role": "worker", "local_rank": 0, "later": True}
        rows += [{"rank": len(roles) + number, **later} for number in range(more_workers)]
        plan = {"recipe": {"name": name, "folder": "/nowhere"}, "layout": "two", "hash": "abc", "config": config}
        for folder in (contract.RECORDS_DIR, contract.LOGS_DIR):
            (path / folder).mkdir(parents=True)
        (path / contract.PLAN_FILE).write_text(
            json.dumps({**plan, "topology": "local", "ranks": rows, "elastic": more_workers or None})
        )
        (path / contract.TRAIN_FILE).write_text("training_config:\n  seed: 0  # default\n  steps: 4  # train.yaml:3\n")
        append_event(RunFolder(path.name, path), "start", engine="Open MPI")

    def record(self, rank, **values):
        with (self.path / contract.progress_file(rank)).open("a") as file:
            file.write(contract.record_line(values))

    def steps(self, first, last, *, ranks=(0, 1)):
        for step in range(first, last + 1):
            for rank in ranks:
                numbers = {"loss": 4.0 / step + rank / 7, "tokens": 50, "grad_norm": 1 / 3}
                self.record(rank, kind="step", time=1e9 + step / 4, step=step, **numbers)

    def telemetry(self, last, *, ranks=(0, 1)):
        """Each step of 200 ms sends the other rank 100 bytes in two messages and waits for 15 ms."""
        every = {str(step): 1 for step in range(1, last + 1)}
        for rank in ranks:
            stretch = {
                "format": contract.TRAFFIC_FORMAT,
                "first": 0,
                "last": last,
                "facts": {},
                "sent": [["gradients", None, "backward", 1 - rank, [[1, last, 1, 2, 100]]]],
                "waited": [["gradients", "exchange", dict.fromkeys(every, 15000)]],
                "spent": [
                    [name, dict.fromkeys(every, us)]
                    for name, us in {"step": 200_000, "forward": 60_000, "backward": 90_000, "update": 9_000}.items()
                ],
            }
            with (self.path / contract.traffic_file(rank)).open("a") as file:
                file.write(json.dumps(stretch) + "\n")

    def answers(self, texts, tokens, *, open_texts=0):
        """Have the ranks of a serving run write what they have answered so far; rank 0 is the head."""
        times = {"working_us": 2_000_000, "waiting_us": 900_000, "token_median_us": 9000, "token_p90_us": 15_000}
        first = {"first_token_median_us": 27_000, "first_token_p90_us": 34_000}
        head = {"texts": texts, "tokens": tokens, "open_texts": open_texts, "waiting_texts": 1, **times, **first}
        for rank, more in enumerate((head, {})):
            facts = {"computing_us": 500_000, "sending_us": 100_000, **more}
            line = {"format": contract.TRAFFIC_FORMAT, "last": 0, "facts": facts, "sent": [], "waited": [], "spent": []}
            with (self.path / contract.traffic_file(rank)).open("a") as file:
                file.write(json.dumps(line) + "\n")

    def members(self, *entries):
        """Write entries into the journal of an elastic run."""
        with (self.path / MEMBERS_FILE).open("a") as file:
            file.writelines(json.dumps({"time": 1e9, **entry}) + "\n" for entry in entries)

    def waits(self, rank, peer):
        """Have a rank wait for another one since four seconds, by its flight recorder."""
        box = FlightRecorder(self.path / contract.recorder_file(rank), rank=rank)
        box.begin_step(3)
        began = time.monotonic_ns() - 4_000_000_000
        box.begin(RECV, ("gradients", None), None, peer=peer, tag=7, size=8, now=began)
        then = time.time() - 60  # as a copy of another host's recorder that has not changed since
        os.utime(self.path / contract.recorder_file(rank), (then, then))

    def print(self, rank, text, *, stream="stdout", time=1e9):
        """Have a rank print a text, as one stretch of the merged log."""
        name = contract.stdout_file if stream == "stdout" else contract.stderr_file
        data = text if isinstance(text, bytes) else text.encode()
        with (self.path / name(rank)).open("ab") as file:
            offset = file.tell()
            file.write(data)
        row = {"rank": rank, "stream": stream, "time": time, "offset": offset, "length": len(data)}
        with (self.path / MERGED_FILE).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def end(self, status="done", **more):
        for rank in range(2):
            record = {"rank": rank, "time": 1e9 + 103.0, "status": 0, "peak_memory_bytes": 300_000_000}
            (self.path / contract.exit_file(rank)).write_text(json.dumps(record))
        report = {"status": status, "exit_status": 0, "steps": 4, "last_validation": None, "ranks": [], **more}
        (self.path / contract.REPORT_FILE).write_text(json.dumps(report))


def failed_run(path, source):
    """A run whose rank 1 was killed, with the report that a launcher wrote of such a run."""
    run = MadeRun(path)
    run.steps(1, 4)
    report = json.loads(source.read_text())
    (path / contract.REPORT_FILE).write_text(json.dumps({**report, "run_id": path.name}))
    return run


def elastic_run(path):
    """A run that lasts, of which worker 1 was lost after step 4 and worker 2 has come after step 6; worker 0 waits for it."""
    run = MadeRun(path, more_workers=3)
    write_launcher(path)  # this process
    for rank in range(3):
        run.record(rank, kind="started", time=1e9, pid=1)
    run.steps(1, 4)
    run.steps(5, 8, ranks=(0,))
    run.steps(7, 8, ranks=(2,))
    first = {"what": "epoch", "epoch": 1, "members": [0, 1], "step": 0, "reasons": [], "computed_anew": 0}
    lost = {"epoch": 2, "members": [0], "step": 4, "reasons": ["worker-0001 was killed by SIGKILL"], "computed_anew": 3}
    came = {"epoch": 3, "members": [0, 2], "step": 6, "reasons": ["worker-0002 joined"], "computed_anew": 0}
    run.members(first, {**first, **lost}, {"what": "resumed", "epoch": 2, "pause_s": 0.078}, {**first, **came})
    run.waits(0, 2)
    return run


def serving_run(path):
    """A serving run of two ranks that is active, has answered, and has written where its chat page is."""
    run = MadeRun(path, name="serve", roles=("head", "stage"), config={"serve_config": {}})
    write_launcher(path)  # this process
    run.answers(3, 120)
    run.answers(5, 210, open_texts=2)
    (path / DOOR_FILE).write_text(json.dumps(DOOR))
    return run
