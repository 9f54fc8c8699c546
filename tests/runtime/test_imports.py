"""What a rank imports and what it does not, asked of one process: to import torch takes longer than all that is asked."""

import subprocess
import sys

import pytest

CLAIMS = {
    "a backward pass imports no symbolic shapes": """
import sys, torch
from ttlaunch.runtime.model.backward import run_backward
run_backward(torch.zeros(3, requires_grad=True) * 2, torch.zeros(3))
assert "sympy" not in sys.modules
""",
    # `torch.utils.checkpoint` does when it is first called: two seconds on every rank.
    "neither bf16 nor recomputed activations import the compiler": """
from ttlaunch.recipe import TrainingConfig
from ttlaunch.runtime.model.model import computing
from ttlaunch.runtime.model.recompute import recomputed
layer = torch.nn.Linear(4, 4)
with computing(TrainingConfig(precision="bf16"), torch.device("cpu")):
    out = recomputed(layer, torch.ones(2, 4, requires_grad=True))
assert out.dtype == torch.bfloat16
out.float().sum().backward()
assert layer.weight.grad is not None
assert "torch._dynamo" not in sys.modules
""",
    # The README's main command installs that one alone.
    "the names of trainers need no package of an extra but train": """
import ttlaunch.train
assert all(getattr(ttlaunch.train, name) is not None for name in ttlaunch.train.__all__)
for name in EXTRAS:
    assert sys.modules.pop(name) is None
""",
    # Staging is there when the first tensor of a device is sent; a message between CPUs never comes so far.
    "ranks without a GPU import nothing of CUDA": """
import ttlaunch.runtime.comm.mpi, ttlaunch.runtime.comm.grpc.communicator
assert "ttlaunch.runtime.comm.cuda_copier" not in sys.modules
assert not torch.cuda.is_initialized()
""",
}
"""By claim, what asks for it, one after the other: each may use what those before it have imported."""

PROGRAM = """
import sys, traceback
EXTRAS = ("crc32c", "grpc", "sklearn", "tokenizers")
sys.modules.update(dict.fromkeys(EXTRAS, None))  # importing one of them fails
for claim, code in {claims!r}.items():
    try:
        exec(code)
        print(claim)
    except BaseException:
        traceback.print_exc()
"""


@pytest.fixture(scope="module")
def answer():
    command = [sys.executable, "-c", PROGRAM.format(claims=CLAIMS)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_rank_imports_what_it_needs_and_no_more(answer, claim):
    assert claim in answer.stdout.splitlines(), answer.stderr
    assert "" == answer.stderr
