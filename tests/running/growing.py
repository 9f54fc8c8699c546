"""Run a script with ranks that are added while it runs: a rank is added when another one prints `add RANK`.

What a rank prints as `tell RANK TEXT` reaches the socket for orders of the other rank, again and again.

    python tests/running/growing.py '{"target": "work.py", "ranks": 3, "first": 2}'

It prints the run's report as JSON. The argument has the fields of `RunSpec`.
"""

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path

from ttlaunch import contract
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.execute import RunOptions, execute_plan
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.running.logs.output import SilentView


class AddingView(SilentView):
    """Adds each rank that another one asks for."""

    def __init__(self, run):
        self.run = run
        self.added = set()

    def tick(self, ranks):
        logs = [self.run.folder.file(contract.stdout_file(state.row.rank)) for state in ranks]
        printed = "".join(log.read_text() for log in logs if log.exists())
        # A line may not be there as a whole yet.
        for rank, text in re.findall(r"^tell (\d+) (.*)\n", printed, re.MULTILINE):
            self.run.controller.tell(int(rank), text.encode())
        asked = {int(rank) for rank in re.findall(r"^add (\d+)\n", printed, re.MULTILINE)}
        for rank in sorted(asked - self.added):
            self.added.add(rank)
            self.run.controller.add([ranks[rank]])


def main():
    dialogue = Unattended()
    prepared = prepare(RunSpec(**json.loads(sys.argv[1])), dialogue)
    outcome = execute_plan(
        prepared, RunOptions(Path("runs")), dialogue, watched_by=lambda run: nullcontext(AddingView(run))
    )
    print(json.dumps({**outcome.report.as_json(), "scratch_is_left": outcome.scratch.exists()}))


if __name__ == "__main__":
    main()
