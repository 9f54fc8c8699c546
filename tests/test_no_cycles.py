"""The cycle collector is paused within a block, and afterwards as it was."""

import gc

import pytest

from ttlaunch.no_cycles import collection_paused


def test_it_is_paused_inside_and_back_afterwards():
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_back_after_an_exception():
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled()
