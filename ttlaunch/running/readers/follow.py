"""Follow a run through its folder, from any process: the ranks' reports and output, and the supervisor's messages.

The run does not depend on this reader. A view that is started late shows everything from the beginning.
"""

from collections.abc import Collection, Iterator
from itertools import chain

from ttlaunch import contract
from ttlaunch.diagnostics.terminal_text import clean_output
from ttlaunch.running.logs.fold import ShownOutput
from ttlaunch.running.logs.output import View
from ttlaunch.running.lost_hosts import connection_after
from ttlaunch.running.report import Report
from ttlaunch.running.runs.facts import MEMBERS_FILE, RunFacts, joined_row
from ttlaunch.running.runs.files import Tail
from ttlaunch.running.runs.run_folder import RunFolder, clock_in, supervisor_file
from ttlaunch.running.watch import Phase, Watch

_STREAMS = ("stdout", "stderr")


class FollowedRun:
    """Shows a run on a view; call `poll` a few times a second, and `finish` when the run has ended."""

    def __init__(self, folder: RunFolder, facts: RunFacts, view: View, *, only: Collection[int]) -> None:
        """Begin with the first report and line of output.

        Args:
            folder: The run's folder.
            facts: The facts in the run's plan.
            view: The view that shows the run.
            only: The ranks whose output is shown.
        """
        self._view = view
        self._watch = Watch(facts, folder)
        self._printed = ShownOutput(folder.path, facts.ranks, only=only, streams=_STREAMS)
        self._supervisor = {stream: Tail(folder.file(supervisor_file(stream))) for stream in _STREAMS}
        self._events = Tail(folder.file(contract.EVENTS_FILE))
        self._members = Tail(folder.file(MEMBERS_FILE)) if facts.is_elastic else None
        self._report = folder.file(contract.REPORT_FILE)

    @property
    def has_ended(self) -> bool:
        """Whether the run's report exists; after it, only restarts can follow."""
        return self._report.is_file()

    def poll(self) -> None:
        """Show what is new."""
        self._read_events()  # first: it corrects the clocks of the records that follow
        self._read_members()
        for state, record in self._watch.look():
            self._view.record(state, record)
        for stream, line in chain(self._printed.poll(), self.messages()):
            self._view.output(stream, line)
        self._printed.note_last(self._watch.ranks)
        self._view.tick(self._watch.ranks)

    def _read_events(self) -> None:
        """Mark the ranks of silent and lost hosts and learn the hosts' clocks, from the supervisor's events."""
        for line in self._events.read():
            event = contract.read_record(line) or {}
            if (clock := clock_in(event)) is not None:
                self._watch.set_clock(*clock)
            connection = connection_after(str(event.get("event")))
            if connection is None:
                continue
            for state in self._watch.ranks:
                if state.row.host == event.get("host"):
                    state.connection = connection

    def _read_members(self) -> None:
        """Follow the workers that join an elastic run, and the ranks that its epochs give to all."""
        ranks = self._watch.ranks
        for line in self._members.read() if self._members else ():
            entry = contract.read_record(line) or {}
            row = joined_row(entry, len(ranks), role=ranks[0].row.role)
            if row is not None:
                self._watch.add(row)
            members = entry.get("members")
            if isinstance(members, list):
                places = {number: place for place, number in enumerate(members) if type(number) is int}
                for state in ranks:
                    state.place = places.get(state.row.rank)

    def messages(self) -> Iterator[tuple[str, bytes]]:
        """Yield new messages of the supervisor, each with its stream and without control sequences."""
        for stream, tail in self._supervisor.items():
            for line in tail.read():
                yield stream, clean_output(line, colour=False)

    def finish(self, report: Report | None) -> None:
        """Show what is left, and each rank's final state; without a report, also output whose order was not recorded."""
        self._read_members()
        for state, record in self._watch.records():
            self._view.record(state, record)
        for stream, line in self._printed.finish(rest=report is None):
            self._view.output(stream, line)
        ended = {row["rank"]: row["state"] for row in report.ranks} if report else {}
        for state in self._watch.ranks:
            state.phase = Phase(ended.get(state.row.rank, state.phase))
        self._printed.note_last(self._watch.ranks)
        self._view.tick(self._watch.ranks)
