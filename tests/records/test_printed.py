"""The numbers that a script prints: the spellings that count, and lines that are meant to do harm."""

import math
import time

import pytest

from ttlaunch.records.printed import MOST_PAIRS, read_printed
from ttlaunch.records.ranks import Printed, Usage, read_progress


@pytest.mark.parametrize(
    ("line", "step", "values"),
    [
        ("loss=0.53 step=100 lr=1e-4", 100, {"loss": 0.53, "lr": 1e-4}),
        ("Epoch 1 | step = 7 | loss = -.5; acc=91", 7, {"loss": -0.5, "acc": 91}),
        ("[rank 0] (train/loss=1.5, val.acc=0.25) t-5=3", None, {"train/loss": 1.5, "val.acc": 0.25, "t-5": 3}),
        ("{'loss': 0.53, 'grad_norm': '1.25', 'epoch': 0.5}", None, {"loss": 0.53, "grad_norm": 1.25, "epoch": 0.5}),
        ('{"step": 3, "loss": 2.5e+1}', 3, {"loss": 25.0}),
        (" 50%|#####     | 5/10 [00:01<00:01, 49.91it/s, loss=0.5]", None, {"loss": 0.5}),
        ("\x1b[32mloss=0.5\x1b[0m \x1b[1mlr=2\x1b[m", None, {"loss": 0.5, "lr": 2}),
        ("a=1 a=2", None, {"a": 2}),
        ("n=9007199254740993", None, {"n": 9007199254740992.0}),
        ("loss=-inf", None, {"loss": -math.inf}),
    ],
)
def test_a_number_behind_its_name_is_read(line, step, values):
    assert (step, values) == read_printed(line.encode())


@pytest.mark.parametrize(
    "line",
    [
        "12:30:05 loss: 0.5 at train.py:30",  # the sign is `=`, or the name stands in quotes
        "--lr=0.1 -n=3 $HOME=1 http://host/?page=2&size=10 a==3 n<=4 x!=1",
        "time=12ms n=1,000 acc=91% v=1.2.3 id=0x1f loss=0.5/1.0 loss=0.5. part=3-4 tensor=tensor(0.5)",
        "big=1e999 long=123456789012345678901 loss=infinity loss=nano",
        "step=-1",
        "step=1.5",
        f"{'n' * 65}=1",
        "lösung=1",
        "\x1b]0;title loss=0.5\x07",  # the number is not followed by a space
        "ba\x1b[2Jloss=0.5",
        "= = =1 ''=2 '': 3 'a': b",
        "",
    ],
)
def test_what_only_looks_like_a_number_with_a_name_is_none(line):
    assert (None, {}) == read_printed(line.encode())


@pytest.mark.parametrize(
    "name",
    [
        *("password", "DB_PASSWORD", "db.passwd", "pwd", "passphrase", "user/secret", "clientSecrets", "credentials"),
        *("token", "hf_token", "accessToken", "api_key", "apikey", "API-KEY", "key", "auth", "otp", "pin"),
        *("db_pw", "jwt", "Bearer", "authorization", "session_cookie"),
    ],
)
def test_a_number_whose_name_says_that_it_is_a_secret_is_none(name):
    assert (7, {"loss": 0.5}) == read_printed(f"step=7 {name}=123456 loss=0.5".encode())
    assert (None, {}) == read_printed(f'{{"{name}": 123456}}'.encode())


@pytest.mark.parametrize(
    "name",
    [
        *(
            "tokens",
            "tokens/s",
            "num_tokens",
            "token_accuracy",
            "loss_per_token",
            "mean_token_length",
            "keys",
            "keypoints",
        ),
        *("pin_memory", "monkey", "pass", "bypass_rate", "author", "compass", "secretary", "spinning"),
    ],
)
def test_a_metric_whose_name_only_resembles_that_of_a_secret_is_read(name):
    assert (None, {name: 0.5}) == read_printed(f"{name}=0.5".encode())


def test_nan_is_a_number_that_a_script_prints():
    _, values = read_printed(b"loss=nan")
    assert math.isnan(values["loss"])


def test_a_line_has_at_most_so_many_numbers_and_a_cut_line_has_no_half_one():
    step, values = read_printed(b" ".join(b"n%d=1" % number for number in range(1_000_000)))
    assert (None, MOST_PAIRS) == (step, len(values))
    for length in range(4080, 4110):
        line = b"x" * length + b" loss=0.53125"
        assert read_printed(line)[1] in ({}, {"loss": 0.53125})


@pytest.mark.parametrize(
    "piece",
    [b"a" * 64, b"a=", b"a =", b"'a': ", b"\x1b[", b"1" * 20 + b".", b"a=1e", b"=", b"\xff'", b"a=+.", b"a-b/c."],
)
def test_no_line_takes_long(piece):
    line = piece * (1_000_000 // len(piece))
    began = time.process_time()
    for _ in range(20):
        read_printed(line)
    assert time.process_time() - began < 2.0


def test_the_records_of_printed_numbers_and_usage_are_checked():
    good = b'{"kind": "printed", "time": 1.0, "step": 3, "values": {"loss": "nan", "kind": 2}}'
    found = read_progress(good)
    assert isinstance(found, Printed)
    assert (3, ["loss", "kind"]) == (found.step, list(found.values))
    usage = read_progress(b'{"kind": "usage", "time": 1.0, "cpu_percent": 250, "memory_bytes": 4096, "count": 3}')
    assert isinstance(usage, Usage)
    assert (250, 4096, 3, None) == (usage.cpu_percent, usage.memory_bytes, usage.count, usage.gpu_percent)
    for wrong in (
        b'{"kind": "printed", "time": 1.0, "values": {"loss": "low"}}',
        b'{"kind": "printed", "time": 1.0, "step": -3, "values": {}}',
        b'{"kind": "printed", "time": 1.0}',
        b'{"kind": "usage", "time": 1.0, "cpu_percent": -1, "memory_bytes": 4096, "count": 3}',
        b'{"kind": "usage", "time": 1.0, "cpu_percent": 1e400, "memory_bytes": 4096, "count": 3}',
        b'{"kind": "usage", "time": 1.0, "cpu_percent": 1, "memory_bytes": "4 GB", "count": 3}',
    ):
        assert type(read_progress(wrong)).__name__ == "BadRecord", wrong
