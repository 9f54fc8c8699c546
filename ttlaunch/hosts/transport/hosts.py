"""Choose the `Transport` for a line of the hostfile: this machine, a Slurm job, or SSH."""

from ttlaunch.hosts.transport.address import HostAddress
from ttlaunch.hosts.transport.key_ring import KeyRing
from ttlaunch.hosts.transport.local import LocalTransport, is_this_machine
from ttlaunch.hosts.transport.transport import Transport


def open_transport(address: HostAddress, *, keys: KeyRing | None = None, job: str | None = None) -> Transport:
    """Make the transport for a host, without connecting.

    Args:
        address: Names of this machine need no sshd.
        keys: Private keys, shared by all hosts so that each is read and unlocked once.
        job: The Slurm job that the host belongs to; None to reach it over SSH.
    """
    if is_this_machine(address.name):
        return LocalTransport(address.name)
    if job is not None:
        from ttlaunch.hosts.transport.slurm import SlurmTransport  # noqa: PLC0415 - only for hosts of a Slurm job

        return SlurmTransport(address.name, job)
    from ttlaunch.hosts.transport.ssh import SshTransport  # noqa: PLC0415 - 0.1 s that one machine alone does not need

    return SshTransport(address, keys=keys)
