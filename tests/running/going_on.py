"""Run a script over hosts that goes on without hosts that are lost, and adds a rank on each host that comes back.

    python tests/running/going_on.py LEASE_S '{"target": "work.py", "on": "lab", "ranks": 3, "first": 2, "engine": "agents"}'

The second argument has the fields of `RunSpec`. It prints a line of JSON for each event, and at the end the engine's status.
"""

import json
import sys
import time
from pathlib import Path

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.execute import RunOptions, make_ready
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.running.runs.run_folder import create_run_folder, private_files, scratch_folder
from ttlaunch.running.watch import Phase, Watch

BEGAN = time.monotonic()


def main():
    dialogue, options = Unattended(), RunOptions(Path("runs"), lease_s=float(sys.argv[1]))
    prepared = prepare(RunSpec(**json.loads(sys.argv[2])), dialogue)
    ready = make_ready(prepared, options, dialogue)
    folder = create_run_folder(options.runs_dir)
    watch = Watch(ready.plan, folder)
    with (
        private_files(folder),
        scratch_folder() as scratch,
        ready.controller(folder, watch, scratch, variables=options.variables) as controller,
    ):
        rows, engine = ready.plan.ranks, prepared.engine
        process = controller.start(engine, ready.plan.engine, folder=folder.path, environment={}, rows=rows)
        while process.poll() is None:
            watch.read_all()
            go_on(controller, watch)
            time.sleep(0.02)
        report("ended", status=process.returncode)
        report("killed", number=controller.end(lambda: None))
        process.stdout.close()
        process.stderr.close()


def go_on(controller, watch):
    for host, lost in controller.losses(watch.ranks).hosts.items():
        gone = controller.forget(host)
        report("lost", host=host, gone=list(gone), reason=lost.error.evidence, silent_s=time.time() - lost.last_heard)
        controller.rejoin(host)
    for host in controller.rejoined():
        more = [state for state in watch.ranks if state.row.host == host and state.phase is Phase.ABSENT]
        report("back", host=host)
        controller.add(more[:1])


def report(event, **values):
    print(json.dumps({"event": event, "at_s": round(time.monotonic() - BEGAN, 2), **values}), flush=True)


if __name__ == "__main__":
    main()
