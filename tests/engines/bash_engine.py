"""The smallest engine there can be, which shows what a second one takes: bash starts all ranks on this machine.

`conformance.py` copies the package, puts this file beside `openmpi.py` and a line into `engines/choose.py`, and runs every
test with it. Nothing else of the package knows of it.
"""

import shutil
import subprocess

from ttlaunch import contract
from ttlaunch.diagnostics import Diagnostic
from ttlaunch.engines.base import Capability, EngineArguments, EngineReport
from ttlaunch.engines.process import start_process
from ttlaunch.planning.engine import EngineSignature, dotted
from ttlaunch.planning.launch_plan import EngineCommand, EngineNames

SIGNATURE = EngineSignature(
    title="GNU bash", program="bash", version=r"GNU bash, version (\d+\.\d+\.\d+)", oldest=(4, 3), before=(100,)
)
RANKS = """
set -m  # each shim has a process group of its own: shims ignore SIGTERM, ranks do not
count=$1; shift
end() {
    for signal in TERM KILL; do
        for pid in "${pids[@]}"; do kill -$signal -- -$pid 2> /dev/null; done
        sleep 0.3
    done
    exit $1
}
trap 'end 143' TERM
for ((rank = 0; rank < count; rank++)); do BASH_ENGINE_RANK=$rank "$@" & pids+=($!); done
for ((left = count; left > 0; )); do  # `wait -n` would miss those that end between two calls
    sleep 0.05
    for at in "${!pids[@]}"; do
        kill -0 ${pids[at]} 2> /dev/null && continue
        wait ${pids[at]} || end $?
        unset "pids[at]"; ((left--))
    done
done
"""


class Bash:
    signature = SIGNATURE
    can = Capability(0)
    pairing_repair = ""

    def __init__(self, program, version):
        self.program, self.version = program, version
        self.name = f"{SIGNATURE.title} {dotted(version)}"
        self.version_output = f"{SIGNATURE.title}, version {dotted(version)}"

    def command(self, ranks):
        assert ranks.over_hosts is None, "it reaches no other host"
        shim = (ranks.python, "-I", "-S", ranks.shim, contract.PLAN_FILE)
        argv = (self.program, "-c", RANKS, "ranks", str(len(ranks.rows)), *shim)
        names = EngineNames(launcher="bash", rank_variables=("BASH_ENGINE_RANK",), key="bash")
        return EngineCommand(self.name, argv, {}, {}, names=names)

    def start(self, command, *, folder, environment):
        return start_process(command.argv, folder=folder, environment=environment)

    def refuse_connections(self, process):
        """Nobody connects to bash."""

    def adapt_daemon(self, command, start):
        return None

    def read_output(self, output, statuses):
        return EngineReport()

    def pairs_with(self, library):
        return True


class BashFinder:
    signature = SIGNATURE
    key = "bash"
    can = Capability(0)

    def find(self, *, python, search_path):
        program = shutil.which(SIGNATURE.program, path=search_path)
        if program is None:
            return Diagnostic("H001", "no `bash` on this machine; nothing was started")
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        return Bash(program, SIGNATURE.version_in(said))

    def parse_arguments(self, text):
        return EngineArguments(), []

    def never_started(self):
        return Bash(SIGNATURE.program, SIGNATURE.oldest)
