"""What no file has of the ranks' output is said at the end, with the host and the reason."""

from ttlaunch.app.run_diagnostics import lost_output_diagnostics
from ttlaunch.diagnostics import render


def rank(number, **unkept):
    reason = "No space left on device" if unkept else None
    return {"rank": number, "host": f"box-{number}", "unkept_output": unkept, "unkept_reason": reason}


def test_a_run_whose_output_is_all_there_says_nothing():
    assert [] == lost_output_diagnostics([rank(0), {"rank": 1, "host": "box", "role": "worker"}])


def test_the_first_rank_is_named_with_the_number_of_bytes():
    assert (
        "warning[R056]: 1 byte of rank 3's stderr could not be kept\n"
        " = note: 1 byte of rank 3's stderr on box-3: no space left on device\n"
        "\n"
        "hint: make room there; `remote_folder:` in cluster.yaml and `--runs-dir` choose another place"
    ) == render(lost_output_diagnostics([rank(0), rank(3, stderr=1)]))


def test_many_are_counted():
    (found,) = lost_output_diagnostics([rank(number, stdout=9) for number in range(7)])
    assert "9 bytes of rank 0's stdout could not be kept and 6 more" == found.message
    assert (6, "and 2 more; `report.json` has all") == (len(found.notes), found.notes[-1])
