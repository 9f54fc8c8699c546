"""A few mutated GGUF files, tokenizers and chat templates; `benchmarks/fuzz.py` gives ten thousand of each (E22)."""

import importlib
import sys
from pathlib import Path

import pytest

for _library in ("gguf", "jinja2", "tokenizers"):
    pytest.importorskip(_library)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module("fuzz")
    for name in {name for name in sys.modules if name.startswith("fuzz")} - before:
        del sys.modules[name]


@pytest.mark.parametrize("target", ["gguf", "tokenizers", "templates"])
def test_what_strangers_write_ends_in_an_answer_or_a_refusal(fuzz, target):
    assert [] == fuzz.run(target, seed=7, first=0, count=8)
