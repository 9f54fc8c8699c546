"""What only a limited child reads, for `fuzz.py`: GGUF files, tokenizers, chat templates.

Each case has a child of its own with the limits of production. It is a fork of this process instead of a new interpreter,
which would take a hundred times as long; the rest, from the limits to the diagnostic, is what a user's file meets.
"""

import importlib
import json
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fuzz_cases import Sample, Target

from ttlaunch.app.import_weights import find_pretrained
from ttlaunch.diagnostics import LaunchError
from ttlaunch.running.pretrained.gguf import read_gguf_tokenizer
from ttlaunch.running.pretrained.read_folder import PretrainedError
from ttlaunch.running.pretrained.read_tokenizer import TOKENIZER, read_tokenizer
from ttlaunch.running.pretrained.tokenizer_json import tokenizer_json
from ttlaunch.untrusted import child
from ttlaunch.untrusted.child import UntrustedError, read_limited

BUSY_S = 120.0
"""Seconds after which a child counts as stuck."""
WIDTH, TOKENS, LENGTH = 32, 4, 2
SHAPES = {"token_embd.weight": (TOKENS, WIDTH), "position_embd.weight": (LENGTH, WIDTH)}
SHAPES |= {f"output_norm.{kind}": (WIDTH,) for kind in ("weight", "bias")}
SHAPES |= {f"blk.0.{name}.{kind}": (WIDTH,) for name in ("attn_norm", "ffn_norm") for kind in ("weight", "bias")}
for _name, _shape in {
    "attn_qkv": (96, 32),
    "attn_output": (32, 32),
    "ffn_up": (128, 32),
    "ffn_down": (32, 128),
}.items():
    SHAPES |= {f"blk.0.{_name}.weight": _shape, f"blk.0.{_name}.bias": _shape[:1]}
TEMPLATE = (
    "{% set n = namespace(k=0) %}{% macro say(m) %}{{ m.role|upper }}{% endmacro %}{% for m in messages if m.content %}"
    "{% set n.k = n.k + loop.index0 * 3 %}{{ say(m) }}: {{ m['content'] | trim | tojson }}{{ eos_token ~ n.k }}"
    "{% if loop.last and not m.role == 'user' %}{{ raise_exception('user last') }}{% endif %}{% endfor %}"
    "{% for i in range(n.k) %}{{ '%s-%d' | format('a' * 3, i ** 2) }}{% endfor %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " naïve?\n"}]


class Forked:
    """A child that is a fork, with what `Child` uses of a process."""

    def __init__(self, arguments: tuple[str, ...], descriptor: int) -> None:
        program = importlib.import_module("ttlaunch.untrusted.__main__")
        task, _, cpu_s, memory, _ = arguments
        answers = program.find_task(task)
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            os.dup2(theirs_in, 0)
            os.dup2(theirs_out, 1)
            os.close(ours_in)
            os.close(ours_out)
            file = os.fdopen(max(descriptor, 0), "rb", closefd=False)
            program.sys.stdin = os.fdopen(0, "r", closefd=False)
            program.do(answers, file, cpu_s=int(cpu_s), memory=int(memory))
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")
        self.status: int | None = None

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 30.0) -> int:
        """Return its status as `Popen` does."""
        deadline = time.monotonic() + timeout
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout)
            else:
                time.sleep(0.0005)
        return self.status


def gguf() -> Target:
    """Whole files: each is a model in which every tensor fits, or refused; its tokenizer is converted or refused."""
    folder, undo = Path(tempfile.mkdtemp(prefix="fuzz-gguf-")), _with_forks()
    file = folder / "m.gguf"

    def read(content: bytes) -> None:
        file.write_bytes(content)
        try:
            model = find_pretrained(str(file))
            for tensor in model.weights.values():
                repr((tensor.shape, tensor.dtype))
        finally:
            if content.startswith(b"GGUF"):
                read_gguf_tokenizer(file)

    files = [_whole_gguf(), _whole_gguf(has_pieces=True)]
    for whole in files:
        read(whole)  # as it is, it is a model; otherwise every case would be refused for one reason
    return Target(
        [Sample(whole, read) for whole in files],
        (LaunchError, UntrustedError),
        close=lambda: undo(folder),
        longer_s=BUSY_S,
    )


def tokenizers() -> Target:
    """Files of tokenizers: each is taken, and encodes a text, or refused."""
    folder, undo = Path(tempfile.mkdtemp(prefix="fuzz-tokenizers-")), _with_forks()

    def read(content: bytes) -> None:
        (folder / TOKENIZER).write_bytes(content)
        repr(read_tokenizer(folder))
        with (folder / TOKENIZER).open("rb") as file, child.Child("tokenizer", file=file) as one:
            one.send({"tokens": []})
            one.send({"text": "def main():\n    return 'naïve' * 12\n"}, is_last=True)
            one.answer()

    ours = tokenizer_json("char", vocabulary=5, alphabet=[97, 98, 99, 100, 10])
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [split, {"type": "Digits", "individual_digits": True}]}
    added = {
        "id": 5,
        "content": "<|end|>",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    other = {**ours, "pre_tokenizer": steps, "normalizer": {"type": "NFC"}, "added_tokens": [added]}
    other["model"] = {**ours["model"], "vocab": {**ours["model"]["vocab"], "ab": 5}, "merges": [["a", "b"]]}
    words = tokenizer_json("ids", vocabulary=4)
    unigram = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["▁", -1.0], ["a", -2.5], ["▁a", -3.0]],
        "byte_fallback": False,
    }
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    pieces = {**ours, "model": unigram, "pre_tokenizer": space, "decoder": space}
    samples = [Sample(json.dumps(one).encode(), read) for one in (ours, other, words, pieces)]
    return Target(samples, (PretrainedError, UntrustedError), close=lambda: undo(folder), longer_s=BUSY_S)


def templates() -> Target:
    """Chat templates: each makes a text, or is refused."""
    undo = _with_forks()

    def read(content: bytes) -> None:
        variables = {"messages": MESSAGES, "add_generation_prompt": True, "eos_token": "</s>", "tools": None}
        read_limited("chat", {"template": content.decode(errors="replace"), "variables": variables})

    read(TEMPLATE.encode())
    return Target([Sample(TEMPLATE.encode(), read)], (UntrustedError,), close=undo, longer_s=BUSY_S)


def _with_forks() -> Callable[..., None]:
    """Let children be forks; returns what ends that, and removes a folder."""
    before, child.start = child.start, Forked

    def undo(folder: Path | None = None) -> None:
        child.start = before
        if folder is not None:
            shutil.rmtree(folder)

    return undo


def _whole_gguf(*, has_pieces: bool = False) -> bytes:
    """Return a model whose tokens are pairs of bytes, or pieces with scores."""
    numbers = {"gpt2.context_length": LENGTH, "gpt2.embedding_length": WIDTH, "gpt2.block_count": 1}
    numbers |= {"gpt2.attention.head_count": 2, "tokenizer.ggml.eos_token_id": 3}
    epsilon = struct.pack("<f", 1e-5)
    values = [_text("general.architecture") + struct.pack("<I", 8) + _text("gpt2")]
    values += [_text(key) + struct.pack("<II", 4, value) for key, value in numbers.items()]
    values += [_text("gpt2.attention.layer_norm_epsilon") + struct.pack("<I", 6) + epsilon]
    values += [
        _text(f"tokenizer.ggml.{key}") + struct.pack("<I", 8) + _text(one)
        for key, one in (("model", "llama" if has_pieces else "gpt2"), ("pre", "gpt-2"))
    ]
    if has_pieces:
        values.append(_text("tokenizer.ggml.scores") + struct.pack("<IIQ4f", 9, 6, 4, -1, -2, -3, 0))
    for key, texts in {"tokens": ["a", "b", "ab", "<|end|>"], "merges": ["a b"]}.items():
        listed = b"".join(map(_text, texts))
        values.append(_text(f"tokenizer.ggml.{key}") + struct.pack("<IIQ", 9, 8, len(texts)) + listed)
    values.append(_text("tokenizer.ggml.token_type") + struct.pack("<IIQ4i", 9, 5, 4, 1, 1, 1, 3))
    infos, place = [], 0
    for name, shape in SHAPES.items():
        kind, size = (
            (2, shape[0] * shape[1] // 32 * 18)
            if "ffn_up.weight" in name
            else (0, 4 * shape[0] * (shape[1:] or (1,))[0])
        )
        infos.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, place))
        place += -(-size // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(values)) + b"".join(values) + b"".join(infos)
    return head + bytes(-len(head) % 32 + place)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
