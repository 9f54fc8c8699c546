"""Every engine that the tests know is put through `conformance.py`."""

import pytest

pytest.register_assert_rewrite("tests.engines.conformance")
from tests.engines.conformance import *  # noqa: E402, F403 - its fixtures and all of its tests

pytestmark = pytest.mark.mpi
