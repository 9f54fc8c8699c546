"""What a head says first, for tests: `HELLO`, and `replace(HELLO, ...)` for another one."""

import hashlib

from ttlaunch.serving import wire

SHA = hashlib.sha256(b"weights").hexdigest()
HELLO = wire.Hello(
    model="data_parallel 30",
    weights_sha256=SHA,
    step=30,
    recipe="data_parallel",
    vocabulary=256,
    context=64,
    split="stages",
    ranks=3,
    precision="fp32",
    torch="2.13.0+cpu",
    cpu="x86-64-v3",
    threads=1,
    exact=True,
    tokenizer_sha256=SHA,
    template_sha256=SHA,
    max_streams=8,
)
