"""Worlds whose ranks are threads of one process and talk over gRPC."""

import threading
from contextlib import ExitStack, contextmanager

import pytest

from ttlaunch.agent.held_port import hold_port
from ttlaunch.contract import peer_name
from ttlaunch.running.agents.certificates import make_certificates
from ttlaunch.runtime.comm.grpc.communicator import GrpcCommunicator
from ttlaunch.runtime.comm.grpc.directory import Address, Certificates, Directory


def directory_of(folder, ranks, **changes):
    addresses = [Address(folder / f"rank-{rank}.sock") for rank in range(ranks)]
    names = [f"rank {rank} (peer)" for rank in range(ranks)]
    return Directory(**{"world": "run 1", "names": names, "hosts": ["here"] * ranks, "addresses": addresses} | changes)


@contextmanager
def world(folder, ranks, **changes):
    """The communicators of a world whose ranks are threads."""
    with opened([directory_of(folder, ranks, **changes)] * ranks) as communicators:
        yield communicators


@pytest.fixture
def hosts(tmp_path):
    """`hosts(2)`: the directories of ranks that are each on a host of its own."""

    def make(ranks, *, names=peer_name):
        with ExitStack() as held:
            ports = [held.enter_context(hold_port()).getsockname()[1] for _ in range(ranks)]
        found = make_certificates({str(rank): [names(rank)] for rank in range(ranks)})
        addresses = [Address(tmp_path / f"rank-{rank}.sock", f"127.0.0.1:{port}") for rank, port in enumerate(ports)]
        return [
            directory_of(
                tmp_path,
                ranks,
                hosts=[str(other) for other in range(ranks)],
                addresses=addresses,
                certificates=Certificates(one.authority.encode(), one.own.encode(), one.key.encode()),
            )
            for one in found.values()
        ]

    return make


@contextmanager
def opened(directories, stagings=None):
    communicators = [
        GrpcCommunicator(directory, rank=rank, staging=stagings and stagings[rank])
        for rank, directory in enumerate(directories)
    ]
    try:
        yield communicators
    finally:
        in_threads([GrpcCommunicator.close] * len(communicators), communicators)


def in_threads(functions, communicators):
    errors = []

    def run(function, communicator):
        try:
            function(communicator)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(functions, communicators, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
