"""Every engine that the tests know is put through `conformance.py`."""

import pytest

from tests.engines.conformance import *  # noqa: F403 - its fixture and all of its tests

pytestmark = pytest.mark.mpi
