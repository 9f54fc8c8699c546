"""Messages between two ranks, frame by frame: whatever order frames and calls come in, each receive gets its message."""

import random

import pytest

from tests.runtime.damaged import refuses_any_other_bytes, refuses_each_flipped_bit
from ttlaunch.runtime.comm.grpc.channels import EAGER_BYTES, INLINE_BYTES, Fence, Incoming, Outgoing, Transfer
from ttlaunch.runtime.comm.grpc.frames import (
    CHUNK_BYTES,
    HEADER_BYTES,
    MOST_BYTES,
    BadFrameError,
    Frame,
    Kind,
    Layout,
    pack,
    parse,
)

UINT8 = 8
WHOLE = Frame(Kind.DATA, 1, 2, 3, 4, Layout(UINT8, (40,), 40), 0, memoryview(bytes(range(7, 207, 5))))


def transfer(content):
    return Transfer(Layout(UINT8, (len(content),), len(content)), memoryview(bytearray(content)))


def empty(size):
    return transfer(bytes(size))


def feed(end, frames):
    for frame in frames:
        end.feed(frame)


class Pair:
    """A sender and a receiver, and the frames between them."""

    def __init__(self, **options):
        self.sender, self.receiver = Outgoing(**options), Incoming("rank 1 (worker)")
        self.frames, self.answers = [], []

    def pump(self):
        """Carry frames until none is left."""
        while self.send() or self.deliver() or self.answer() or self.return_answer():
            pass

    def send(self):
        taken = self.sender.take()
        if taken is None:
            return False
        parts, finished = taken
        self.frames.append(b"".join(parts))
        if finished is not None:
            finished.done = True
        return True

    def deliver(self):
        if self.frames:
            self.receiver.feed(parse(self.frames.pop(0)))
            return True
        return False

    def answer(self):
        taken = self.receiver.take()
        if taken is None:
            return False
        self.answers.append(b"".join(taken[0]))
        return True

    def return_answer(self):
        if self.answers:
            self.sender.feed(parse(self.answers.pop(0)))
            return True
        return False


SIZES = (0, 1, 5, INLINE_BYTES, INLINE_BYTES + 1, CHUNK_BYTES, CHUNK_BYTES + 3, 3 * CHUNK_BYTES)


@pytest.mark.parametrize("inline_bytes", [INLINE_BYTES, -1])
@pytest.mark.parametrize("seed", range(40))
def test_every_receive_gets_its_message_in_any_order_of_events(seed, inline_bytes):
    rng, pair = random.Random(seed), Pair(inline_bytes=inline_bytes)  # noqa: S311 - no secret
    messages = [(rng.choice((0, 1, 7)), rng.randbytes(rng.choice(SIZES))) for _ in range(12)]
    to_send, to_receive = list(messages), sorted(messages, key=lambda _: rng.random())
    expected = {tag: [content for its_tag, content in messages if its_tag == tag] for tag in (0, 1, 7)}
    sends, receives = [], []

    def post_send():
        if not to_send:
            return False
        tag, content = to_send.pop(0)
        sends.append(transfer(content))
        pair.sender.post(sends[-1], tag=tag)
        return True

    def post_receive():
        if not to_receive:
            return False
        tag, _ = to_receive.pop(0)
        content = expected[tag].pop(0)
        receives.append((empty(len(content)), content))
        pair.receiver.post(receives[-1][0], tag=tag)
        return True

    events = [post_send, post_receive, pair.send, pair.deliver, pair.answer, pair.return_answer]
    while any(event() for event in sorted(events, key=lambda _: rng.random())):
        pass
    assert all(one.done and one.error is None for one in sends)
    assert [content for _, content in receives] == [bytes(box.view) for box, _ in receives]
    assert ([], []) == (pair.sender.abandon(), pair.receiver.abandon())


def test_a_receiver_that_asks_for_nothing_keeps_at_most_its_share():
    pair = Pair()
    sent = [transfer(bytes(INLINE_BYTES)) for _ in range(4 * EAGER_BYTES // INLINE_BYTES)]
    for one in sent:
        pair.sender.post(one, tag=0)
    pair.pump()
    kept = sum(one.done for one in sent) * INLINE_BYTES
    assert EAGER_BYTES // 2 < kept <= EAGER_BYTES
    boxes = [empty(INLINE_BYTES) for _ in sent]
    for box in boxes:
        pair.receiver.post(box, tag=0)
    pair.pump()
    assert all(one.done for one in (*sent, *boxes))


def test_a_message_that_nobody_has_asked_for_holds_up_no_other():
    pair, large, small = Pair(), transfer(bytes(5 * CHUNK_BYTES)), transfer(b"soon")
    pair.sender.post(large, tag=1)
    pair.sender.post(small, tag=2)
    box = empty(4)
    pair.receiver.post(box, tag=2)
    pair.pump()
    assert (True, False, b"soon") == (small.done, large.done, bytes(box.view))


def test_a_small_message_does_not_wait_for_a_large_one_that_is_being_sent():
    pair, large, small = Pair(), transfer(bytes(8 * CHUNK_BYTES)), transfer(b"soon")
    pair.receiver.post(empty(8 * CHUNK_BYTES), tag=1)
    pair.sender.post(large, tag=1)
    while not pair.frames or len(pair.frames[-1]) < CHUNK_BYTES:
        assert pair.send() or pair.deliver() or pair.answer() or pair.return_answer()
    pair.sender.post(small, tag=2)
    for _ in range(3):
        pair.send()
    assert (True, False) == (small.done, large.done)


def test_no_frame_has_more_of_a_tensor_than_it_may():
    pair = Pair()
    content = bytes(range(256)) * (CHUNK_BYTES // 128) + b"ended"
    sent, received = transfer(content), empty(len(content))
    pair.receiver.post(received, tag=0)
    pair.sender.post(sent, tag=0)
    pair.answer(), pair.return_answer()
    while pair.send():
        pass
    payloads = [len(frame.payload) for frame in map(parse, pair.frames) if frame.kind is Kind.DATA]
    assert [CHUNK_BYTES] * 2 + [5] == payloads
    pair.pump()
    assert received.done
    assert bytes(received.view) == content


def test_messages_travel_at_once_if_the_receiver_has_asked_before():
    pair, box = Pair(), empty(2 * CHUNK_BYTES)
    pair.receiver.post(box, tag=3)
    assert pair.answer()
    assert pair.return_answer()
    pair.sender.post(transfer(b"x" * 2 * CHUNK_BYTES), tag=3)
    while pair.send():
        pass
    assert [Kind.DATA] * 2 == [parse(data).kind for data in pair.frames]


@pytest.mark.parametrize("sent", [3, 2 * INLINE_BYTES])
@pytest.mark.parametrize("expected", [4, 3 * INLINE_BYTES])
@pytest.mark.parametrize("inline_bytes", [INLINE_BYTES, -1])
def test_a_message_that_does_not_fit_fails_alone(sent, expected, inline_bytes):
    pair, box, next_box = Pair(inline_bytes=inline_bytes), empty(expected), empty(sent)
    for _ in range(2):
        pair.sender.post(transfer(b"n" * sent), tag=0)
    pair.receiver.post(box, tag=0)
    pair.pump()
    pair.receiver.post(next_box, tag=0)
    pair.pump()
    assert f"rank 1 (worker) sent uint8 of shape ({sent},), expected uint8 of shape ({expected},)" == str(box.error)
    assert b"n" * sent == bytes(next_box.view)


def receiving(epoch, incarnation=0):
    return Fence(
        lambda number: Incoming("rank 1", epoch=number, incarnation=incarnation), epoch=epoch, incarnation=incarnation
    )


def data_frame(content, *, epoch, incarnation=0):
    return Frame(
        Kind.DATA, 0, 0, epoch, incarnation, Layout(UINT8, (len(content),), len(content)), 0, memoryview(content)
    )


def test_frames_of_an_earlier_epoch_or_life_are_dropped_and_counted():
    fence, box = receiving(2, incarnation=1), empty(3)
    fence.end.post(box, tag=0)
    for epoch, incarnation, content in ((1, 1, b"old"), (2, 0, b"him"), (2, 1, b"new")):
        fence.feed(data_frame(content, epoch=epoch, incarnation=incarnation))
    assert (b"new", 2) == (bytes(box.view), fence.dropped)


def test_what_comes_of_a_later_epoch_is_received_in_that_epoch():
    fence, before, box = receiving(2), empty(3), empty(3)
    fence.end.post(before, tag=0)
    fence.feed(data_frame(b"now", epoch=5))
    assert [before] == fence.abandon()
    fence.begin(5)
    fence.end.post(box, tag=0)
    assert (bytes(3), b"now", 0) == (bytes(before.view), bytes(box.view), fence.dropped)


def test_of_two_later_epochs_the_last_one_is_kept():
    fence = receiving(0)
    for epoch, content in ((1, b"one"), (2, b"two"), (1, b"uno")):
        fence.feed(data_frame(content, epoch=epoch))
    assert 1 == fence.dropped
    fence.begin(1)  # whoever sent that has gone on to epoch 2
    fence.begin(2)
    box = empty(3)
    fence.end.post(box, tag=0)
    assert b"two" == bytes(box.view)


def test_more_than_the_share_of_a_later_epoch_is_refused():
    fence = receiving(0)
    frames = [
        Frame(Kind.DATA, 0, n, 1, 0, Layout(UINT8, (999,), 999), payload=memoryview(bytes(999))) for n in range(2000)
    ]
    with pytest.raises(BadFrameError):
        feed(fence, frames)


class FencedPair(Pair):
    """A pair whose ends are fenced."""

    def __init__(self):
        super().__init__()
        self.fences = Fence(lambda epoch: Outgoing(epoch=epoch), epoch=0, incarnation=0), receiving(0)
        self.epochs = [0, 0]
        self.renew()

    def renew(self):
        self.sender, self.receiver = (fence.end for fence in self.fences)

    def begin(self, side):
        """Let one side go on to the next epoch; return what it abandons."""
        left = self.fences[side].abandon()
        self.epochs[side] += 1
        self.fences[side].begin(self.epochs[side])
        self.renew()
        return left

    def deliver(self):
        if self.frames:
            self.fences[1].feed(parse(self.frames.pop(0)))
            return True
        return False

    def return_answer(self):
        if self.answers:
            self.fences[0].feed(parse(self.answers.pop(0)))
            return True
        return False


@pytest.mark.parametrize("seed", range(60))
def test_messages_of_two_epochs_never_mix_in_any_order_of_events(seed):
    """Each side begins the epochs when it likes, with messages and grants of the others on their way."""
    rng, pair = random.Random(seed), FencedPair()  # noqa: S311 - no secret
    abandoned, boxes = [], []
    to_post = [[(epoch, n) for epoch in range(3) for n in range(4)] for _ in range(2)]
    sizes = {message: rng.choice(SIZES) for message in to_post[0]}

    def post(side):
        if not to_post[side]:
            return False
        epoch, number = to_post[side][0]
        if epoch > pair.epochs[side]:
            abandoned.extend((box, bytes(box.view)) for box in pair.begin(side))
            return True
        to_post[side].pop(0)
        size = sizes[epoch, number]
        if side:
            boxes.append((empty(size), epoch, number))
            pair.receiver.post(boxes[-1][0], tag=0)
        else:
            pair.sender.post(transfer(bytes([16 * epoch + number]) * size), tag=0)
        return True

    events = [lambda: post(0), lambda: post(1), pair.send, pair.deliver, pair.answer, pair.return_answer]
    while any(event() for event in sorted(events, key=lambda _: rng.random())):
        pass
    assert all(bytes(box.view) == content for box, content in abandoned)
    for box, epoch, number in boxes:
        content = bytes([16 * epoch + number]) * len(box.view)
        assert not box.done or bytes(box.view) == content
        assert box.done or epoch < 2


LARGE = Layout(UINT8, (2 * CHUNK_BYTES,), 2 * CHUNK_BYTES)
SMALL = Layout(UINT8, (4,), 4)


@pytest.mark.parametrize(
    "frames",
    [
        [Frame(Kind.GRANT, 0, 0)],
        [Frame(Kind.CREDIT, 0, 0, offset=5)],
        [Frame(Kind.DATA, 0, 0, layout=LARGE, payload=memoryview(bytes(CHUNK_BYTES)))],
        [Frame(Kind.DATA, 0, 0, layout=SMALL, payload=memoryview(b"four"))] * 2,
        [Frame(Kind.DATA, 0, 0, layout=SMALL, offset=2, payload=memoryview(b"ur"))],
        [Frame(Kind.DATA, 5, 0, layout=LARGE, offset=7, payload=memoryview(b"x"))],
        [Frame(Kind.ANNOUNCE, 0, number, layout=LARGE) for number in range(70_000)],
        [
            Frame(Kind.DATA, 0, n, layout=Layout(UINT8, (999,), 999), payload=memoryview(bytes(999)))
            for n in range(2000)
        ],
    ],
)
def test_a_receiver_refuses_what_no_sender_sends(frames):
    receiver = Incoming("rank 1")
    receiver.post(empty(LARGE.total), tag=5)
    with pytest.raises(BadFrameError):
        feed(receiver, frames)


@pytest.mark.parametrize(
    "frames",
    [
        [Frame(Kind.CREDIT, 0, 0, offset=2**40)],
        [Frame(Kind.ANNOUNCE, 0, 0)],
        [Frame(Kind.DATA, 0, 0)],
        [Frame(Kind.GRANT, tag, number) for tag in range(300) for number in range(300)],
    ],
)
def test_a_sender_refuses_what_no_receiver_answers(frames):
    sender = Outgoing()
    sender.post(transfer(b"four"), tag=0)
    with pytest.raises(BadFrameError):
        feed(sender, frames)


def test_a_frame_arrives_as_it_was_sent():
    frame = Frame(Kind.DATA, 30_001, 2**40, 3, 4, Layout(0, (2, 3), 24), 8, memoryview(b"0123456789abcdef"))
    data = pack(frame)
    assert (HEADER_BYTES + 16, frame) == (len(data), parse(data))


@pytest.mark.parametrize(
    "change",
    [
        {"layout": Layout(0, (2, 3), 25)},
        {"layout": Layout(0, (-2, -3), 24)},
        {"layout": Layout(0, (2**62, 2**62), 24)},
        {"offset": 9},
        {"kind": Kind.GRANT},
    ],
)
def test_a_header_that_contradicts_itself_is_refused(change):
    values = {"kind": Kind.DATA, "layout": Layout(0, (2, 3), 24), "offset": 8, "payload": memoryview(bytes(16))}
    with pytest.raises(BadFrameError):
        parse(pack(Frame(tag=0, number=0, **values | change)))


def test_no_damaged_frame_is_taken_for_a_whole_one():
    refuses_each_flipped_bit(parse, pack(WHOLE))


def test_no_bytes_make_the_parser_raise_anything_else():
    refuses_any_other_bytes(parse, pack(WHOLE), longest=MOST_BYTES)


def test_a_frame_holds_no_more_than_its_limit():
    pair = Pair()
    pair.sender.post(transfer(bytes(3 * CHUNK_BYTES)), tag=0)
    pair.receiver.post(empty(3 * CHUNK_BYTES), tag=0)
    seen = []
    while pair.send() or pair.deliver() or pair.answer() or pair.return_answer():
        seen += [len(data) for data in pair.frames]
    assert MOST_BYTES == max(seen)
