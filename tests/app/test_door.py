"""Where a serving run listens, and to whom it opens: what cannot be is refused before anything starts."""

import json
import socket
from dataclasses import replace

import pytest

from ttlaunch.app.door import DoorOptions, Silences, check_door, open_ports
from ttlaunch.diagnostics import LaunchError

HERE = DoorOptions(api_port=0, page_port=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (replace(HERE, host="0.0.0.0"), ["others can reach `--host 0.0.0.0`, so clients need a key"]),  # noqa: S104
        (replace(HERE, host="nosuch.invalid"), ["clients need a key", "`--host nosuch.invalid` is no address"]),
        (DoorOptions(api_port=5051, page_port=5051), ["`--port` and `--api-port` are both 5051"]),
        (replace(HERE, names=("box", "a b", "box:80")), ["`--allow-host a b`", "`--allow-host box:80`"]),
    ],
)
@pytest.mark.parametrize("check", [check_door, open_ports])
def test_what_no_server_can_do_is_refused_once_and_by_name(options, expected, check):
    with pytest.raises(LaunchError) as refused:
        check(options)
    messages = [one.message for one in refused.value.diagnostics]
    assert len(expected) == len(messages)
    assert all(part in message for part, message in zip(expected, messages, strict=True))
    assert all(one.hints for one in refused.value.diagnostics)


def test_a_port_that_is_taken_may_be_free_when_the_server_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = replace(HERE, api_port=taken.getsockname()[1])
        check_door(options)
        with pytest.raises(LaunchError, match="address already in use"):
            open_ports(options)


def test_clients_learn_which_host_or_rank_does_not_answer_until_it_does(tmp_path):
    """A stage that SIGSTOP has stopped is named as on the terminal; a rank that no plan has is named by its number."""
    rows = [{"rank": rank, "host": "box", "slot": rank, "role": "stage", "local_rank": rank} for rank in range(2)]
    recipe = {"name": "serve", "folder": "/nowhere"}
    plan = {"recipe": recipe, "layout": None, "hash": "a", "config": {}, "topology": "local", "ranks": rows}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    silences, told = Silences(tmp_path), []
    for event in (
        {"event": "start"},
        {"event": "rank_stopped", "rank": 1, "seconds": 5.0},
        {"event": "host_silent", "host": "far"},
        {"event": "rank_goes_on", "rank": 1, "seconds": 9.0},
        {"event": "host_back", "host": "far"},
        {"event": "rank_stopped", "rank": 7},
    ):
        silences.take(event)
        told.append(silences.reason)
    stopped = "rank 1 (stage, box) was stopped by a signal"
    expected = [None, stopped, f"far does not answer; {stopped}", "far does not answer", None]
    assert [*expected, "rank 7 was stopped by a signal"] == told
