"""What `ttlaunch bisect` says of the tensors that differ."""

from ttlaunch.cli.bisect import _named


def test_only_names_of_tensors_are_quoted_and_the_rest_is_counted():
    assert "2 tensors: `head` and `norm`" == _named(("head", "norm"))
    assert "5 tensors: `a`, `b`, `c` and 2 more" == _named(("a", "b", "c", "d", "e"))
