"""A rank without a launcher: a context over a communicator inside the process, and small configurations."""

import json
import queue
from collections import defaultdict

import pytest
import torch

from ttlaunch.recipe import TrainingFile
from ttlaunch.runtime.comm.protocol import CommunicationError
from ttlaunch.runtime.comm.reduction import GradientTree
from ttlaunch.runtime.data.text import TextData
from ttlaunch.spec.recipe.corpus import read_corpus

from .pipelines import PipelineRuns

FOX = "the quick brown fox jumps over the lazy dog, and then it rests for a while. " * 40


class QueueCommunicator:
    """Messages between ranks that are threads, or one after the other, of this process."""

    def __init__(self, rank, mailboxes):
        self.rank = rank
        self.sent = []
        self._mailboxes = mailboxes

    def send(self, tensor, *, dest, tag=0):
        self.sent.append((dest, tensor.numel() * tensor.element_size()))
        self._mailboxes[self.rank, dest, tag].put(tensor.detach().clone())

    def recv(self, tensor, *, source, tag=0):
        message = self._mailboxes[source, self.rank, tag].get(timeout=20)
        if message.shape != tensor.shape or message.dtype != tensor.dtype:
            raise CommunicationError(f"rank {source} sent {tuple(message.shape)}, expected {tuple(tensor.shape)}")
        tensor.copy_(message)


class LocalContext:
    """The part of `RankContext` that building and training one whole model needs."""

    rank = step = 0
    role = "trainer"
    device = torch.device("cpu")
    elastic = None

    def __init__(self, cfg, corpus):
        self._data = TextData(corpus, cfg)
        self.said = []

    def position(self, role):
        return 0

    def result(self, name, value):
        self.said.append((name, value))

    def report_not_finite(self, step, *, micro_batch, loss):
        self.said.append(("not finite", step, micro_batch, loss))

    def note(self, text):
        self.said.append(("note", text))

    def data(self, cfg):
        return self._data

    def watch(self, model, *, values):
        pass

    def gradient_tree(self, weights_N):
        return GradientTree(weights_N.numel())


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def communicators():
    mailboxes = defaultdict(queue.Queue)
    return lambda count: [QueueCommunicator(rank, mailboxes) for rank in range(count)]


@pytest.fixture
def fox(tmp_path):
    """A short text."""
    path = tmp_path / "text.txt"
    path.write_text(FOX)
    return path


@pytest.fixture
def train(tmp_path, fox):
    """`train(pipeline, ranks=…, SECTION={…})`: one process or a pipeline; see `PipelineRuns`."""
    return PipelineRuns(tmp_path, fox)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """`alone(SECTION={…})`: one process, trained once for all tests of a file that compare with it."""
    folder, found = tmp_path_factory.mktemp("alone"), {}
    text = folder / "text.txt"
    text.write_text(FOX)
    train = PipelineRuns(folder, text)

    def run(**sections):
        key = json.dumps(sections)
        if key not in found:
            found[key] = train(**sections)
        return found[key]

    return run


@pytest.fixture(scope="session")
def corpus():
    return read_corpus(None)


@pytest.fixture
def make_cfg():
    def make(*, training=None, transformer=None, **sections):
        small = {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
        return TrainingFile.model_validate(
            {
                "training_config": {"batch_size": 8, "micro_batch_size": 2} | (training or {}),
                "transformer_config": small | (transformer or {}),
            }
            | sections
        )

    return make


@pytest.fixture
def make_context(corpus):
    return lambda cfg: LocalContext(cfg, corpus)
