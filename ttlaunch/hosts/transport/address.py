"""How a host is to be reached, as hostfile and cluster.yaml say; the ssh configuration may say more."""

from pathlib import Path

from ttlaunch.quick_dataclass import dataclass


@dataclass(frozen=True)
class HostAddress:
    """What hostfile and cluster.yaml say about reaching a host; None leaves it to the ssh configuration.

    Attributes:
        name: As in the hostfile; the ssh configuration may give it another meaning.
        user: `user@` of the hostfile's line, else `user` of cluster.yaml.
        port: `port` of cluster.yaml.
        identity_file: `identity_file` of cluster.yaml.
    """

    name: str
    user: str | None = None
    port: int | None = None
    identity_file: Path | None = None
