"""Run the rank of a worker that has registered with a run elsewhere, in a run folder of its own on this machine."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.outcome import Outcome
from ttlaunch.app.registering import registered
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError
from ttlaunch.engines.agents import Agents
from ttlaunch.errors import RunFolderError
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.running.guard import guarded
from ttlaunch.running.membership.link import CoordinatorLink
from ttlaunch.running.membership.taking_part import JoinedRank, Participation, Wish
from ttlaunch.running.rank_controller import LocalRankController
from ttlaunch.running.runs.facts import facts_of
from ttlaunch.running.runs.record_inputs import write_inputs
from ttlaunch.running.runs.run_folder import RunFolder, create_run_folder, private_files, scratch_folder
from ttlaunch.running.watch import Watch

TOKEN_FILE = "worker.token"  # noqa: S105 - the name of a file
"""In the worker's own run folder, for its user alone: the token with which it registers again under its number."""


def run_worker(
    plan: LaunchPlan,
    link: CoordinatorLink,
    dialogue: Dialogue,
    *,
    config: str,
    runs_dir: Path,
    variables: Mapping[str, str],
    wish: Wish,
) -> tuple[Participation, Outcome]:
    """Start the rank of the plan's last row, and return when it has ended.

    Args:
        plan: The result of `worker_plan.numbered`.
        link: The connection to the coordinator, which this function starts and closes.
        dialogue: Receives warnings.
        config: The text of the run's configuration, for the folder.
        runs_dir: Where the folder is made.
        variables: What the rank gets besides what its plan says: who it is, where it listens, and its certificate.
        wish: Counts how often the user asked to end.

    Raises:
        LaunchError: The folder cannot be made; the run hears that the worker has ended.
    """
    link.start()
    try:
        folder = _make_folder(plan, runs_dir, dialogue, config=config, token=link.welcome.token)
        daemons = plan.engine.names.daemons
        with (
            private_files(folder),
            scratch_folder() as scratch,
            guarded(folder.run_id, scratch, daemons=daemons),
            registered(plan, folder, dialogue),
        ):
            controller = LocalRankController(
                folder.run_id, scratch=scratch, run_folder=folder.path, daemons=daemons, variables=variables
            )
            rank = JoinedRank(
                plan=plan,
                folder=folder,
                scratch=scratch,
                watch=Watch(plan, folder),
                controller=controller,
                link=link,
                engine=Agents(sys.executable),
            )
            participation = rank.take_part(wish, os.environ)
        return participation, Outcome(participation.report, facts_of(plan), folder, scratch)
    finally:
        link.close()


def _make_folder(plan: LaunchPlan, runs_dir: Path, dialogue: Dialogue, *, config: str, token: str) -> RunFolder:
    try:
        folder = create_run_folder(runs_dir)
        with private_files(folder):
            dialogue.warn(write_inputs(plan, folder, resolved_config=config, shell=os.environ))
        with open(folder.file(TOKEN_FILE), "w", encoding="ascii", opener=_open_for_user) as file:
            file.write(f"{token}\n")
    except (RunFolderError, OSError) as error:
        hint = "`--runs-dir DIR` makes run folders somewhere else"
        raise LaunchError([Diagnostic("H008", str(error), hints=(hint,), blame=Blame.HOSTS)]) from error
    return folder


def _open_for_user(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
