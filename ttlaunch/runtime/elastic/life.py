"""The life of a rank as a worker of an elastic run: opens what it needs before its role is called, and closes it at the end."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from ttlaunch import contract
from ttlaunch.membership.messages import Member, Seat
from ttlaunch.runtime.comm.grpc.communicator import GrpcCommunicator
from ttlaunch.runtime.comm.grpc.directory import Directory, Peer, Way, read_directory
from ttlaunch.runtime.elastic.ends import AbandonedError, LeftError
from ttlaunch.runtime.elastic.member import ElasticMember
from ttlaunch.runtime.elastic.orders import OrdersSocket
from ttlaunch.runtime.elastic.usage import UsageReports
from ttlaunch.runtime.stop_order import StopOrder
from ttlaunch.runtime.telemetry.records import ProgressWriter
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.world import Rank, World


class ElasticLife:
    """What a worker has open while it lives.

    Attributes:
        communicator: Its transport, in which it is alone until an epoch begins.
        member: What its role uses.
    """

    def __init__(
        self,
        world: World,
        number: Rank,
        environment: MutableMapping[str, str],
        *,
        records: ProgressWriter,
        traffic: TrafficCounter,
        stop_order: StopOrder,
    ) -> None:
        """Listen for other workers and for orders.

        Raises:
            CommunicationError: This worker cannot listen where the others expect it.
            OSError: The socket for orders cannot be made.
        """
        planned = read_directory(world, environment)
        own = Member(number, int(environment.get(contract.ENV_INCARNATION) or 0))
        address = planned.addresses[number]
        self._way = Way(planned.world, address.socket.parent, planned.certificates)
        self._records = records
        alone = self._way.directory([(Peer(number, own.incarnation), planned.hosts[number], address.network)], epoch=0)
        self.communicator = GrpcCommunicator(alone, rank=Rank(0))
        self.member = ElasticMember(
            Seat(own, planned.hosts[number], address.network),
            transport=self.communicator,
            place=self._directory_of,
            write=self._write,
            note=self._note,
            traffic=traffic,
            stop_order=stop_order,
            is_later=bool(world.later) and world.later[number],
        )
        self._orders = OrdersSocket(address.socket.parent, own, take=self.member.take, abandon=self.member.abandon)
        self._usage = UsageReports(lambda **fields: records.write(contract.KIND_USAGE, **fields))

    def run(self, role: Callable[[], object]) -> None:
        """Carry out the role until it ends, or this worker is to take part no longer; then say so, and take no further order."""
        try:
            role()
        except LeftError as left:
            self._note(f"{contract.worker_name(self.member.own.number)} has ended: {left}")
            if isinstance(left, AbandonedError):
                self.member.save_state()
        finally:
            self._orders.close()
            self._usage.close()
            self.member.close()

    def _directory_of(self, seats: Sequence[Seat], epoch: int) -> Directory:
        peers = [Peer(seat.member.number, seat.member.incarnation) for seat in seats]
        members = [(peer, seat.host, seat.address) for peer, seat in zip(peers, seats, strict=True)]
        return self._way.directory(members, epoch=epoch)

    def _note(self, text: str) -> None:
        self._records.write(contract.KIND_NOTE, text=text)

    def _write(self, **fields: Any) -> None:
        self._records.write(contract.KIND_MEMBER, **fields)
