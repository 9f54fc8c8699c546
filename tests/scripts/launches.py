"""Start a script of this folder by torchrun, and find the losses that any launcher's ranks printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
# Accelerate and transformers need this variable on a machine without a GPU; ttlaunch sets it itself.
_WITHOUT_GPU = {"ACCELERATE_USE_CPU": "true"}


def losses_in(output):
    """The line with the number of ranks and the bits of each loss; None if the script did not come to its end."""
    found = re.search(r"losses (\d+ .*)", output)
    return found and found[1].strip()


def losses_by_torchrun(script, folder, *, more=None):
    """The losses of two ranks on this machine; `more` are further variables."""
    clean = {name: value for name, value in os.environ.items() if not re.match("OMP|TORCH|PRTE_|PMIX_|OPAL_", name)}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FOLDER / script)]
    environment = {**clean, **_WITHOUT_GPU, **(more or {})}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = losses_in(done.stdout)
    assert found, done.stdout + done.stderr
    return found


def start_two_at_once(folder):
    """Start the script with DistributedDataParallel twice at the same time; the losses of both, None for one that failed."""
    command = [sys.executable, "-m", "ttlaunch", "run", "-n", "2", str(FOLDER / "ddp.py")]
    started = [
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    answers = [(one.communicate(timeout=200)[0], one.returncode) for one in started]
    for output, status in answers:
        if status:
            print(output)
    return [None if status else losses_in(output) for output, status in answers]
