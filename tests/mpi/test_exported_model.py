"""A trained model that leaves: transformers continues a text as `ttlaunch generate` does (E21)."""

import json

import pytest

from tests.forked import FORKED
from tests.mpi.typed import command, train

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    sets = {"training_config.steps": 20, "transformer_config.num_blocks": 3, "transformer_config.embedding_dim": 64}
    train(folder, "data_parallel", sets)
    return folder


def test_transformers_continues_a_text_as_the_run_does(trained):
    exported = command(trained, "weights", "export", "latest", "model", "--as", "hf")
    assert 0 == exported.returncode, exported.stderr
    assert "and the tokenizer to model" in exported.stdout
    assert [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] == sorted(path.name for path in (trained / "model").iterdir())
    words = ("generate", "latest", "import os", "--max-tokens", "30", "--temperature", "0", "--format", "json")
    ours = json.loads(command(trained, *words).stdout)["choices"][0]["tokens"]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - it takes seconds to import

    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    given = tokenizer("import os", return_tensors="pt").input_ids
    found = model.generate(given, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, given.shape[1] :]
    assert ours == found.tolist()


def test_a_folder_is_trained_further_to_the_same_bits_on_any_number_of_ranks(trained):
    """The exported model, transposed and renamed, begins where the file with its plain weights does."""
    if not (trained / "model").exists():
        assert 0 == command(trained, "weights", "export", "latest", "model", "--as", "hf").returncode
    exported = command(trained, "weights", "import", "model", "plain.safetensors", "--format", "json")
    sizes = json.loads(exported.stdout)["set"]
    steps = {"training_config.steps": 3, "training_config.seed": 7}
    begins = [
        ("data_parallel", 1, {"checkpoint_config.initial_weights": "hf:model"}),
        ("zero", 2, {"checkpoint_config.initial_weights": "hf:model", "zero_config.stage": 3}),
        ("data_parallel", 2, {"checkpoint_config.initial_weights": "plain.safetensors", **sizes}),
    ]
    found = set()
    for number, (recipe, ranks, sets) in enumerate(begins):
        options = [f"{key}={str(value).lower()}" for key, value in (steps | sets).items()]
        words = [word for option in options for word in ("--set", option)]
        ended = command(trained, "run", recipe, "-n", str(ranks), "--runs-dir", f"runs-{number}", *FORKED, *words)
        assert 0 == ended.returncode, ended.stderr
        file = f"trained-{number}.safetensors"
        assert 0 == command(trained, "weights", "export", "latest", file, "--runs-dir", f"runs-{number}").returncode
        found.add((trained / file).read_bytes())
    assert 1 == len(found)
    assert found != {(trained / "plain.safetensors").read_bytes()}


def test_a_llama_of_transformers_is_trained_further_to_the_same_bits_and_leaves_again(tmp_path, caplog):
    """Shards, joined matrices, a tied head, on 1 rank, 2 ranks and as shards of ZeRO; greedy tokens are those of the run."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - it takes seconds to import

    from tests.runtime.llamas import random_llama  # noqa: PLC0415 - needs transformers

    random_llama(vocab_size=256, tie_word_embeddings=True).save_pretrained(tmp_path / "llama", max_shard_size="60KB")
    assert (tmp_path / "llama" / "model.safetensors.index.json").is_file()
    begins = [("data_parallel", 1), ("data_parallel", 2), ("zero", 2)]
    found = set()
    for recipe, ranks in begins:
        sets = {
            "training_config.steps": 3,
            "training_config.learning_rate": 0.01,
            "transformer_config.max_sequence_length": 48,
        }
        sets["checkpoint_config.initial_weights"] = "hf:llama"
        words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        ended = command(tmp_path, "run", recipe, "-n", str(ranks), "--format", "json", *FORKED, *words)
        assert 0 == ended.returncode, ended.stderr
        found.add(json.loads(ended.stdout)["parameters_sha256"])
    assert 1 == len(found)
    exported = command(tmp_path, "weights", "export", "latest", "again", "--as", "hf")
    assert 0 == exported.returncode, exported.stderr
    words = ("generate", "latest", "def f", "--max-tokens", "20", "--temperature", "0", "--format", "json")
    ours = json.loads(command(tmp_path, *words).stdout)["choices"][0]["tokens"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert 64 == model.config.max_position_embeddings  # not 48: training on shorter texts takes nothing away
    longer = [command(tmp_path, "serve", "latest", "--dry-run", "--max-context", most) for most in ("64", "65")]
    assert [0, 2] == [one.returncode for one in longer]
    assert "8 texts of 64 tokens" in longer[0].stdout
    given = torch.tensor([list(b"def f")])
    theirs = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert ours == theirs[0, given.shape[1] :].tolist()


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(trained):
    average = command(trained, "weights", "export", "latest", "averaged", "--as", "hf", "--average")
    assert (2, True) == (average.returncode, "has no average of the weights" in average.stderr)
    nowhere = command(trained, "weights", "export", "latest", "no/such/folder", "--as", "hf")
    assert 2 <= nowhere.returncode <= 5
    assert "Traceback" not in nowhere.stderr
    there = command(trained, "weights", "export", "latest", "runs", "--as", "hf")
    assert (2, True) == (there.returncode, "already exists" in there.stderr)
    assert {"averaged", "no"}.isdisjoint(path.name for path in trained.iterdir())


def test_a_gguf_is_trained_spoken_with_and_exported_with_its_own_tokenizer(tmp_path):
    """One step on one rank; transformers continues the exported folder's text with the tokens of `generate FOLDER`."""
    pytest.importorskip("gguf")
    from tests.untrusted.gguf_files import write_gguf  # noqa: PLC0415 - needs gguf

    write_gguf(tmp_path / "m.gguf", types={"attn_qkv": "Q4_0"}, tokenizer={"template": "{{ messages[0].content }}"})
    assert 0 == command(tmp_path, "weights", "import", "m.gguf", "m", "--as", "hf").returncode
    sets = ("checkpoint_config.initial_weights=hf:m", "training_config.steps=1", "training_config.batch_size=2")
    words = [word for one in sets for word in ("--set", one)]
    ended = command(tmp_path, "run", "data_parallel", "-n", "1", *words)
    assert 0 == ended.returncode, ended.stderr
    exported = command(tmp_path, "weights", "export", "latest", "model", "--as", "hf")
    assert 0 == exported.returncode, exported.stderr
    words = ("generate", "model", "hello world 12", "--max-tokens", "8", "--temperature", "0", "--format", "json")
    said = command(tmp_path, *words)
    assert 0 == said.returncode, said.stderr
    ours = json.loads(said.stdout)["choices"][0]["tokens"]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - it takes seconds to import

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert ("{{ messages[0].content }}", "<|end|>") == (tokenizer.chat_template, tokenizer.eos_token)
    given = tokenizer("hello world 12", return_tensors="pt").input_ids
    assert given.shape[1] < len("hello world 12")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = model.generate(given, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, given.shape[1] :]
    assert ours == found.tolist()
