"""Folders of our models are what transformers loads: no warning, the same logits, the same greedy tokens, the same texts (E21)."""

import logging

import pytest

from tests.runtime.serving.served_models import configuration, random_model, random_texts
from ttlaunch.running.checkpoints.derived_tensors import Transposed
from ttlaunch.running.checkpoints.tensor_file import read_bytes, read_header, write_tensors
from ttlaunch.running.pretrained.tokenizer_json import tokenizer_json
from ttlaunch.running.pretrained.write_folder import write_model_folder

torch = pytest.importorskip("torch")

ALPHABET = sorted(ord(character) for character in "\n abcdefghijklmnopqrstuvwxyzäß€😀")


def stored(model, path):
    """The parameters of a model as tensors of a file."""
    from safetensors.torch import save_file  # noqa: PLC0415 - needs torch

    save_file({name: value.detach().clone() for name, value in model.named_parameters()}, path)
    return read_header(path)


def written(tmp_path, *, tokens="byte", vocabulary=256, alphabet=(), **sizes):
    cfg = configuration(**sizes)
    model = random_model(cfg, vocabulary=vocabulary)
    folder = tmp_path / "model"
    tokenizer = tokenizer_json(tokens, vocabulary=vocabulary, alphabet=alphabet)
    weights = stored(model, tmp_path / "ours.safetensors")
    write_model_folder(
        folder,
        weights,
        model_type=cfg.training_config.model_type,
        sizes=cfg.transformer_config.model_dump(),
        texts={"tokenizer.json": tokenizer},
    )
    return cfg, model, folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("GPT2", {}),
        ("GPT2", {"tied": True, "activation": "gelu_new"}),
        ("Llama", {"num_kv_heads": 2, "mlp_dim": 40, "norm_epsilon": 1e-6}),
        ("Llama", {"tied": True, "rope_theta": 5e5, "rope_scaling": {"factor": 2.0, "original_length": 16}}),
    ],
    ids=["gpt", "gpt tied", "llama", "llama tied"],
)
def test_transformers_computes_the_same(tmp_path, caplog, kind, sizes):
    import transformers  # noqa: PLC0415 - it takes seconds to import

    cfg, model, folder = written(tmp_path, model_type="llama" if kind == "Llama" else "gpt", length=48, **sizes)
    transformers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert [] == [record.getMessage() for record in caplog.records]
    assert all(not wrong for wrong in loading.values()), loading
    assert type(theirs).__name__ in {"GPT2LMHeadModel", "LlamaForCausalLM"}
    assert type(theirs).__name__.startswith(kind)
    texts = torch.tensor(random_texts(cfg, vocabulary=256))
    with torch.no_grad():
        ours_BTV, theirs_BTV = model(texts).float(), theirs(texts).logits
    assert (ours_BTV - theirs_BTV).abs().max() <= 1e-5
    tokens = texts[:1, :8]
    with caplog.at_level(logging.WARNING):
        answer = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=30)
    assert [] == [record.getMessage() for record in caplog.records]
    with torch.no_grad():
        for _ in range(30):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert tokens.tolist() == answer.tolist()


@pytest.mark.slow
def test_transformers_loads_the_tokenizer(tmp_path):
    import transformers  # noqa: PLC0415 - it takes seconds to import

    _, _, folder = written(tmp_path, tokens="char", vocabulary=len(ALPHABET), alphabet=ALPHABET)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "das maß\n  ist voll 😀"
    assert [ALPHABET.index(ord(character)) for character in text] == tokenizer(text)["input_ids"]
    assert text == tokenizer.decode(tokenizer(text)["input_ids"])


def loaded(tmp_path, content):
    import json  # noqa: PLC0415

    import tokenizers  # noqa: PLC0415

    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), "utf-8")
    return tokenizers.Tokenizer.from_file(str(path))


@pytest.mark.parametrize("text", ["", "def main():\n    pass\n", "äß€😀 \x00\x7f", "  two  spaces  ", "a" * 3000])
def test_bytes_are_the_tokens_of_a_byte_tokenizer(tmp_path, text):
    tokenizer = loaded(tmp_path, tokenizer_json("byte", vocabulary=256))
    assert list(text.encode()) == tokenizer.encode(text).ids
    assert text == tokenizer.decode(list(text.encode()))


def test_each_byte_alone_has_its_number(tmp_path):
    tokenizer = loaded(tmp_path, tokenizer_json("byte", vocabulary=256))
    assert 256 == tokenizer.get_vocab_size()
    assert [[byte] for byte in range(128)] == [tokenizer.encode(chr(byte)).ids for byte in range(128)]


def test_numbers_are_the_words_of_a_tokenizer_of_ids(tmp_path):
    tokenizer = loaded(tmp_path, tokenizer_json("ids", vocabulary=12))
    assert [3, 11, 0] == tokenizer.encode("3 11  0").ids
    assert "3 11 0" == tokenizer.decode([3, 11, 0])


def test_a_tokenizer_has_as_many_tokens_as_the_model():
    with pytest.raises(ValueError, match="the model has 255 tokens, its tokenizer 256"):
        tokenizer_json("byte", vocabulary=255)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(3, 5), (1, 4), (4, 1), (0, 3), (3, 0)])
def test_a_transposed_matrix_is_what_torch_makes_of_it(tmp_path, dtype, shape):
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - needs torch

    matrix = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
    save_file({"a": matrix}, tmp_path / "one")
    [tensor] = read_header(tmp_path / "one").values()
    write_tensors(tmp_path / "two", {"a": Transposed(tensor), "b": tensor})
    found = load_file(tmp_path / "two")
    assert torch.equal(matrix.T, found["a"])
    assert torch.equal(matrix, found["b"])
    assert b"".join(read_bytes(tensor)) == b"".join(read_bytes(read_header(tmp_path / "two")["b"]))


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path):
    cfg = configuration(blocks=1, length=16)
    weights = stored(random_model(cfg, vocabulary=256), tmp_path / "ours.safetensors")
    (tmp_path / "ours.safetensors").unlink()  # the files of the checkpoint are gone in the meantime
    tokenizer = tokenizer_json("byte", vocabulary=256)
    with pytest.raises(FileNotFoundError):
        write_model_folder(
            tmp_path / "m",
            weights,
            model_type="gpt",
            sizes=cfg.transformer_config.model_dump(),
            texts={"tokenizer.json": tokenizer},
        )
    assert [] == list(tmp_path.iterdir())
