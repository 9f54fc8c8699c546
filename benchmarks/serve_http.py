"""What HTTP costs a serving run: tokens per second of 8 streams through the door, beside the same engine asked in its own process.

    python benchmarks/serve_http.py [--rounds 5] [--tokens 100] [--blocks 6] [--width 256]

One process has a model with random weights, an engine of 8 streams and one thread of torch. In turns it computes 8 texts by itself, and 8 texts
for clients of a real door (`python -m ttlaunch.serving.door`), which get them as events. The engine has one core, door and clients have
the other one. Printed are medians over the rounds of

- tokens per second, and their ratio: at least 0.95;
- processor time by token: of the engine alone, of the engine when it is asked, of the door. On a machine that does other things too these are
  the figures to compare, and the ratio of the first two is what a calm machine shows as long as the door has time left;
- the time of `GET /health` while the engine computes long prompts: at most 50 ms;
- tokens per second of 7 clients beside one that asks for 20 probabilities of each token and reads none, and beside one that reads them: at least 0.9.

Ends with 1 if a limit is missed.
"""

import argparse
import asyncio
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STREAMS = 8
LEAST_RATIO = 0.95
MOST_HEALTH_S = 0.05
LEAST_BESIDE = 0.9
_CONTEXT = 256


def main() -> int:
    """Measure, and print the figures with their limits; with `head` as the first word, be the engine's process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each text (default 100)")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--head", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.head:
        _be_head(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return _measure(options, Path(folder) / "serve.sock")


def _measure(options: argparse.Namespace, place: Path) -> int:
    cores = sorted(os.sched_getaffinity(0))
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "blocks", "width")]
    head = subprocess.Popen(
        [sys.executable, __file__, "--head", str(place), *sizes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.sched_setaffinity(head.pid, {cores[0]})
    assert head.stdin is not None
    assert head.stdout is not None
    head.stdout.readline()
    os.sched_setaffinity(0, {cores[-1]})
    door = subprocess.Popen(
        [sys.executable, "-m", "ttlaunch.serving.door", "--socket", str(place), "--api-port", "0", "--port", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert door.stdin is not None
    assert door.stdout is not None
    port = json.loads(door.stdout.readline())["api_port"]
    alone, asked, health, beside = [], [], [], []
    try:
        asyncio.run(_until_healthy(port))
        for _ in range(options.rounds):
            head.stdin.write(b"alone\n")
            head.stdin.flush()
            alone.append(json.loads(head.stdout.readline()))
            asyncio.run(_until_healthy(port))
            asked.append(_ask(port, tokens=options.tokens, processes=(head.pid, door.pid)))
            health += asyncio.run(_times_of_health(port))
            speeds = [asyncio.run(_beside(port, tokens=options.tokens, reads=reads)) for reads in (True, False)]
            beside.append(speeds[1] / speeds[0])
    finally:
        door.stdin.close()
        door.wait()
        head.stdin.close()
        head.wait()
    return _report(alone, asked, health, beside)


def _ask(port: int, *, tokens: int, processes: tuple[int, int]) -> dict[str, float]:
    before = [_processor_s(pid) for pid in processes]
    begun = time.perf_counter()
    asyncio.run(_all_texts(port, tokens=tokens))
    took = time.perf_counter() - begun
    count = STREAMS * tokens
    head, door = ((_processor_s(pid) - start) / count for pid, start in zip(processes, before, strict=True))
    return {"tokens_per_s": count / took, "head_s": head, "door_s": door, "busy": head * count / took}


async def _all_texts(port: int, *, tokens: int) -> None:
    bodies = [
        {"text": chr(97 + one) * 16, "max_tokens": tokens, "seed": one, "use_memory": False} for one in range(STREAMS)
    ]
    answers = await asyncio.gather(*(_post(port, "/chat", body) for body in bodies))
    for answer in answers:
        assert b'"num_tokens":%d' % tokens in answer[-4000:], answer[-400:]


async def _beside(port: int, *, tokens: int, reads: bool) -> float:
    """Tokens per second of all clients but one, which asks for much, and reads it or not."""
    body = {"prompt": "z" * 16, "max_tokens": 200, "logprobs": 20, "stream": True}
    request = _request("/v1/completions", body)
    much = socket.socket()
    much.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    much.setblocking(False)  # noqa: FBT003 - the method takes no keyword
    await asyncio.get_running_loop().sock_connect(much, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=much)
    writer.write(request)
    reading = asyncio.create_task(reader.read()) if reads else None
    if reading is None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's transports of sockets have it
    begun = time.perf_counter()
    bodies = [{"text": chr(97 + one) * 16, "max_tokens": tokens, "seed": one, "use_memory": False} for one in range(7)]
    await asyncio.gather(*(_post(port, "/chat", body) for body in bodies))
    took = time.perf_counter() - begun
    if reading is not None:
        await reading
    writer.transport.abort()
    return len(bodies) * tokens / took


async def _post(port: int, path: str, body: dict[str, Any]) -> bytes:
    return await _exchange(port, _request(path, body))


def _request(path: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(text), text)


async def _exchange(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def _health(port: int) -> bytes:
    return await _exchange(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")


async def _until_healthy(port: int) -> None:
    while b" 200 " not in (await _health(port))[:20]:  # noqa: ASYNC110 - another process becomes healthy
        await asyncio.sleep(0.05)


async def _times_of_health(port: int) -> list[float]:
    """The times of `/health` while long prompts are computed."""
    body = {"text": "long " * 48, "max_tokens": 4, "use_memory": False}
    asking = [asyncio.create_task(_post(port, "/query", body | {"seed": one})) for one in range(STREAMS)]
    times = []
    while not all(one.done() for one in asking) or not times:
        begun = time.perf_counter()
        await _health(port)
        times.append(time.perf_counter() - begun)
        await asyncio.sleep(0.02)
    return times


def _processor_s(pid: int) -> float:
    """Processor time of a process so far."""
    return time.clock_gettime((~pid << 3) | 2)  # the kernel's number for the clock of another process


def _report(
    alone: list[dict[str, float]], asked: list[dict[str, float]], health: list[float], beside: list[float]
) -> int:
    def median(rows: list[dict[str, float]], name: str) -> float:
        return statistics.median(row[name] for row in rows)

    ratio = statistics.median(b["tokens_per_s"] / a["tokens_per_s"] for a, b in zip(alone, asked, strict=True))
    worst = max(health)
    own, served, door = median(alone, "head_s"), median(asked, "head_s"), median(asked, "door_s")
    lines = [
        f"in process: {median(alone, 'tokens_per_s'):.0f} tokens/s, {own * 1e6:.0f} us of processor time a token",
        f"over HTTP:  {median(asked, 'tokens_per_s'):.0f} tokens/s, {served * 1e6:.0f} us a token, and {door * 1e6:.0f} us of the door",
        f"HTTP / in process: {ratio:.3f} (limit {LEAST_RATIO}); by processor time of the engine {own / served:.3f}",
        f"the engine computed {median(asked, 'busy'):.3f} of the time",
        f"GET /health during prefill: median {statistics.median(health) * 1e3:.1f} ms, most {worst * 1e3:.1f} ms (limit 50 ms)",
        f"others beside a client that reads nothing / one that reads: {(others := statistics.median(beside)):.2f} (limit {LEAST_BESIDE})",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(ratio < LEAST_RATIO or worst > MOST_HEALTH_S or others < LEAST_BESIDE)


def _be_head(options: argparse.Namespace) -> None:
    """Be the engine's process: answer over the socket, and compute texts alone at each line on stdin."""
    import torch

    torch.set_num_threads(1)
    from tests.runtime.serving.served_models import configuration, random_model, whole_part
    from tests.serving.greeting import HELLO
    from ttlaunch.runtime.serving.ask import Limits
    from ttlaunch.runtime.serving.asking import AskService
    from ttlaunch.runtime.serving.engine import Engine
    from ttlaunch.runtime.serving.forward import WholeModel
    from ttlaunch.runtime.serving.text import ByteTokenizer
    from ttlaunch.serving import wire

    cfg = configuration(length=_CONTEXT, width=options.width, blocks=options.blocks, heads=4)
    model = random_model(cfg, vocabulary=256)

    def make_engine() -> Engine:
        limits = Limits(max_streams=STREAMS, max_waiting=32, context=_CONTEXT, guesses=False)
        return Engine(WholeModel(whole_part(cfg, model, slots=STREAMS)), ByteTokenizer(), limits)

    tokenizer: Any = ByteTokenizer()
    service = AskService(make_engine(), wire.listen(options.head), hello=HELLO, tokenizer=tokenizer, beat=lambda: None)
    alone = make_engine()
    orders = selectors.DefaultSelector()
    orders.register(sys.stdin.buffer, selectors.EVENT_READ)
    _compute_alone(alone, tokens=8)
    os.write(1, b"ready\n")
    while True:
        service.serve(wait_s=0.01)
        if orders.select(0):
            if not os.read(0, 64):
                return
            os.write(1, json.dumps(_compute_alone(alone, tokens=options.tokens)).encode() + b"\n")


def _compute_alone(engine: Any, *, tokens: int) -> dict[str, float]:
    from ttlaunch.runtime.serving.ask import Ask, Sampling

    begun, used = time.perf_counter(), time.process_time()
    for one in range(STREAMS):
        engine.submit(Ask(one + 1, chr(97 + one) * 16, tokens, Sampling(temperature=0.8, seed=one)))
    while not engine.is_idle:
        engine.step()
    count = STREAMS * tokens
    took, processor = time.perf_counter() - begun, time.process_time() - used
    return {"tokens_per_s": count / took, "head_s": processor / count}


if __name__ == "__main__":
    sys.exit(main())
