"""The head of a serving run whose model answers with the first letter of its prompt, over and over: what belongs to whom can be seen.

`python -m tests.serving.echo_head SOCKET [--context N] [--streams N] [--waiting N] [--pace SECONDS] [--silent]`. Its tokens are bytes. A token of stream i is a pure
function of prompt, seed, choice and position, so that a stream goes on after this process has been started again.
"""

import argparse
import contextlib
import hashlib
import os
import selectors
import time
from dataclasses import replace
from pathlib import Path

from tests.serving.greeting import HELLO
from ttlaunch.serving import wire


def prompt_of(ask):
    if ask.tokens is not None:
        return bytes(ask.tokens)
    text = ask.text if ask.text is not None else "\n".join(one.content for one in ask.messages)
    return text.encode()


class Stream:
    def __init__(self, ask, context):
        self.ask = ask
        self.context = context
        self.prompt = prompt_of(ask)
        self.ids = list(ask.resumed)
        self.sent = ask.resumed_characters
        self.paused = False

    def step(self):
        """The next token: the letter, and a digit that depends on the seed in every fourth place."""
        place = len(self.ids)
        token = self.prompt[-1] if self.prompt[:1] == b"$" else self.prompt[0]
        if place % 4 == 3 and self.ask.temperature > 0:
            drawn = hashlib.sha256(f"{self.ask.seed} {self.ask.choice} {place}".encode()).digest()[0]
            token = ord("0") + drawn % 10
        self.ids.append(token)

    def text(self):
        """What has not been sent: whole characters only."""
        whole = bytes(self.ids).decode("utf-8", "ignore")
        new, self.sent = whole[self.sent :], len(whole)
        return new

    def end(self):
        text = bytes(self.ids).decode("utf-8", "ignore")
        if any(stop in text for stop in self.ask.stop):
            return "stop"
        room = self.context - len(self.prompt)
        return "length" if len(self.ids) >= min(self.ask.max_tokens, room) else None


class Head:
    def __init__(self, arguments):
        self.arguments = arguments
        self.streams = {}
        self.steps = self.rows = 0
        self.decoder = wire.Decoder(wire.TO_HEAD, sender="the door")
        self.sha = hashlib.sha256(arguments.weights.encode()).hexdigest()

    def hello(self):
        return replace(
            HELLO,
            model="echo",
            weights_sha256=self.sha,
            step=40,
            context=self.arguments.context,
            tokenizer_sha256=self.sha,
            template_sha256=hashlib.sha256((self.arguments.template or "").encode()).hexdigest(),
            chat_template=self.arguments.template,
            special_tokens={"bos_token": "Z"},
            max_streams=self.arguments.streams,
            max_waiting=self.arguments.waiting,
        )

    def take(self, message, send):
        match message:
            case wire.Ask():
                self.begin(message, send)
            case wire.Cancel(stream=number):
                if stream := self.streams.pop(number, None):
                    send(self.done(stream, "cancelled"))
            case wire.Pause(stream=number) | wire.Resume(stream=number):
                if number in self.streams:
                    self.streams[number].paused = isinstance(message, wire.Pause)
            case wire.Ping(number=number):
                if not self.arguments.silent:
                    send(wire.Pong(number=number))

    def begin(self, ask, send):
        stream = Stream(ask, self.arguments.context)
        if len(self.streams) >= self.arguments.streams + self.arguments.waiting:
            numbers = {"waiting": self.arguments.waiting}
            send(wire.Refused(stream=ask.stream, code="too_many", message="too many streams wait", numbers=numbers))
        elif len(stream.prompt) >= self.arguments.context:
            numbers = {"prompt_tokens": len(stream.prompt), "context": self.arguments.context}
            message = "the prompt does not fit into the context"
            send(wire.Refused(stream=ask.stream, code="context_too_long", message=message, numbers=numbers))
        elif not stream.prompt:
            send(wire.Refused(stream=ask.stream, code="bad_text", message="the prompt is empty", numbers={}))
        else:
            self.streams[ask.stream] = stream
            send(
                wire.Accepted(
                    stream=ask.stream,
                    seed=ask.seed or 0,
                    prompt_tokens=tuple(stream.prompt),
                    weights_sha256=self.sha,
                )
            )

    def step(self, send):
        live = [one for one in self.streams.values() if not one.paused][: self.arguments.streams]
        self.steps += bool(live)
        self.rows += len(live)
        for stream in live:
            stream.step()
            if stream.prompt.startswith(b"!") and len(stream.ids) == 5:
                os._exit(9)
            reason, message = stream.end(), None
            if stream.prompt.startswith(b"?") and len(stream.ids) == 3:
                reason, message = "error", "the model's logits are not numbers"
            logprobs = ()
            if stream.ask.logprobs is not None:
                token = chr(stream.ids[-1])
                likely = wire.Likely(id=stream.ids[-1], text=token, logprob=-0.5)
                top = (likely,) * min(stream.ask.logprobs, 1)
                logprobs = (wire.TokenLogprob(id=likely.id, text=token, logprob=-0.5, top=top),)
            tokens = (stream.ids[-1],)
            send(wire.Tokens(stream=stream.ask.stream, ids=tokens, text=stream.text(), logprobs=logprobs))
            if reason:
                del self.streams[stream.ask.stream]
                send(self.done(stream, reason, message))

    def done(self, stream, reason, message=None):
        counts = {"prompt_tokens": len(stream.prompt), "generated": len(stream.ids)}
        return wire.Done(stream=stream.ask.stream, reason=reason, message=message, **counts)

    def stats(self):
        return wire.Stats(
            streams=min(len(self.streams), self.arguments.streams),
            waiting=max(0, len(self.streams) - self.arguments.streams),
            steps=self.steps,
            rows=self.rows,
            kv_bytes_used=64 * len(self.streams),
            kv_bytes_limit=64 * self.arguments.streams,
            busy_seconds=(1.5, 2.0),
            sent_bytes=(wire.SentBytes(source=0, target=1, count=4096),),
        )

    def serve(self, connection):
        """Until the door closes: read what has come, compute a step, sleep the rest of its time."""
        ready = selectors.DefaultSelector()
        ready.register(connection, selectors.EVENT_READ)

        def send(message):
            connection.sendall(wire.encode(message))

        send(self.hello())
        told = 0.0
        while True:
            if ready.select(self.arguments.pace if self.streams else 0.25):
                received = connection.recv(1 << 16)
                if not received:
                    return
                for message in self.decoder.feed(received):
                    self.take(message, send)
            self.step(send)
            if time.monotonic() - told > 0.1:
                told = time.monotonic()
                send(self.stats())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--waiting", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--pace", type=float, default=0.002)
    parser.add_argument("--template", help="the model's chat template")
    parser.add_argument("--weights", default="weights")
    parser.add_argument("--silent", action="store_true", help="answer no ping")
    arguments = parser.parse_args()
    arguments.socket.unlink(missing_ok=True)
    with wire.listen(arguments.socket) as listening:
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                Head(arguments).serve(connection)


if __name__ == "__main__":
    main()
