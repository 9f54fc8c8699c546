"""Places that no sink could write to are said before a run starts, not after it (D21, E6)."""

import pytest


@pytest.mark.parametrize(
    ("sink", "reason"),
    [
        ("prometheus=folder", "it is a folder, and a file was expected"),
        ("prometheus=file/m.prom", "HERE/file is no folder"),
        ("prometheus=file/a/b/m.prom", "HERE/file is no folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(ttlaunch, here, sink, reason):
    (here / "file").write_text("in the way")
    (here / "folder").mkdir()
    answer = ttlaunch(f"run data_parallel --sink {sink}")
    expected = f"error[P032]: `--sink {sink}` cannot be written: {reason.replace('HERE', str(here))}\n\n"
    assert (2, "", expected) == (answer.status, answer.stdout, answer.stderr)
    assert ["file", "folder"] == sorted(path.name for path in here.iterdir())


def test_a_home_of_nobody_is_a_folder_of_that_name(ttlaunch, here):
    """As in a shell; Python's own `expanduser` raises."""
    assert 0 == ttlaunch("plan data_parallel").status
    answer = ttlaunch("run data_parallel --dry-run --sink prometheus=~nobody-at-all/m.prom")
    assert (0, "") == (answer.status, answer.stderr)
    assert [] == list(here.iterdir())
