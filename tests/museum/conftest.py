"""One thread, and one training text, for all exhibits."""

import pytest
import torch

from ttlaunch.spec.recipe.corpus import read_corpus


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus():
    return read_corpus(None)
