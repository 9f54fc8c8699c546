"""`ttlaunch weights import`: what a folder of transformers becomes, and every way in which one is refused (E21)."""

import hashlib
import json
import shutil
import tracemalloc

import pytest

from ttlaunch.app.import_weights import find_pretrained, write_pretrained
from ttlaunch.spec.recipe.corpus import TOKENS_MARK

torch = pytest.importorskip("torch")

WIDTH, BLOCKS, TOKENS, LENGTH = 32, 2, 50, 16
CONFIG = {
    "model_type": "gpt2",
    "vocab_size": TOKENS,
    "n_positions": LENGTH,
    "n_embd": WIDTH,
    "n_layer": BLOCKS,
    "n_head": 2,
    "activation_function": "gelu",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}
MATRICES = {
    "attn.c_attn": (WIDTH, 3 * WIDTH),
    "attn.c_proj": (WIDTH, WIDTH),
    "mlp.c_fc": (WIDTH, 4 * WIDTH),
    "mlp.c_proj": (4 * WIDTH, WIDTH),
}


def gpt2_tensors(blocks=BLOCKS, *, width=WIDTH):
    """The tensors of a GPT-2 with random values, by their names in transformers."""
    draw = torch.Generator().manual_seed(3)
    matrices = {name: tuple(side * width // WIDTH for side in shape) for name, shape in MATRICES.items()}
    shapes = {
        "transformer.wte.weight": (TOKENS, width),
        "transformer.wpe.weight": (LENGTH, width),
        "transformer.ln_f.weight": (width,),
        "transformer.ln_f.bias": (width,),
        "lm_head.weight": (TOKENS, width),
    }
    for block in range(blocks):
        shapes |= {f"transformer.h.{block}.{n}.{k}": (width,) for n in ("ln_1", "ln_2") for k in ("weight", "bias")}
        shapes |= {f"transformer.h.{block}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"transformer.h.{block}.{name}.bias": shape[1:] for name, shape in matrices.items()}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def save(folder, tensors, config=CONFIG):
    from safetensors.torch import save_file  # noqa: PLC0415 - needs torch

    folder.mkdir(exist_ok=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def save_shards(folder, shards, places=None, config=CONFIG):
    from safetensors.torch import save_file  # noqa: PLC0415 - needs torch

    folder.mkdir(exist_ok=True)
    for name, tensors in shards.items():
        save_file({key: one.contiguous() for key, one in tensors.items()}, folder / name)
    weight_map = places or {key: name for name, tensors in shards.items() for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def imported(path):
    from safetensors.torch import load_file  # noqa: PLC0415 - needs torch

    return load_file(path)


def test_every_tensor_gets_our_name_and_shape(ttlaunch, here):
    theirs = gpt2_tensors()
    save(here / "m", theirs)
    answer = ttlaunch("weights import m w --format json")
    assert 0 == answer.status, answer.stderr
    facts = json.loads(answer.stdout)
    assert (hashlib.sha256((here / "w").read_bytes()).hexdigest(), TOKENS) == (facts["sha256"], facts["vocabulary"])
    ours = imported(here / "w")
    assert len(theirs) == len(ours) == facts["tensors"]
    for mine, name, turned in (
        ("embedding.token.weight", "transformer.wte.weight", False),
        ("head.output.weight", "lm_head.weight", False),
        ("blocks.1.attention_in.weight", "transformer.h.1.attn.c_attn.weight", True),
        ("blocks.0.feed_forward_out.weight", "transformer.h.0.mlp.c_proj.weight", True),
        ("blocks.0.feed_forward_out.bias", "transformer.h.0.mlp.c_proj.bias", False),
    ):
        assert torch.equal(ours[mine], theirs[name].T if turned else theirs[name])
    assert {
        "num_blocks": 2,
        "num_heads": 2,
        "embedding_dim": 32,
        "max_sequence_length": 16,
        "tie_embeddings": False,
        "activation": "gelu",
    } == {key.removeprefix("transformer_config."): value for key, value in facts["set"].items()}


def test_the_sizes_are_said_as_options(ttlaunch, here):
    save(here / "m", gpt2_tensors())
    answer = ttlaunch("weights import m w")
    assert "wrote 29 tensors to w\n" in answer.stdout
    assert "--set transformer_config.tie_embeddings=false\n" in answer.stdout


def test_shards_a_base_model_and_old_buffers_give_the_same_file(ttlaunch, here):
    theirs = gpt2_tensors()
    save(here / "m", theirs)
    names = sorted(theirs)
    save_shards(
        here / "s",
        {"a.safetensors": {n: theirs[n] for n in names[:9]}, "b.safetensors": {n: theirs[n] for n in names[9:]}},
    )
    base = {name.removeprefix("transformer."): one for name, one in theirs.items()}
    save(here / "b", {**base, "h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.1.attn.masked_bias": torch.tensor(-1e4)})
    for folder in "msb":
        assert 0 == ttlaunch(f"weights import {folder} {folder}.w").status
    assert (here / "m.w").read_bytes() == (here / "s.w").read_bytes() == (here / "b.w").read_bytes()
    assert 0 == ttlaunch("weights import m/model.safetensors f.w").status
    assert (here / "m.w").read_bytes() == (here / "f.w").read_bytes()
    assert 0 == ttlaunch("weights diff m s").status
    assert 1 == ttlaunch("weights diff m b").status
    assert ttlaunch("weights stats s").stdout.endswith("29 tensors, 0 values that are not finite\n")


def test_shards_are_read_piece_by_piece(here):
    """At any time no more is in memory than the tensor that has to be turned round, and a piece: not its shard (W7)."""
    theirs = gpt2_tensors(width=512)
    names = sorted(theirs)
    shards = {f"model-{part}.safetensors": {name: theirs[name] for name in names[part::3]} for part in range(3)}
    save_shards(here / "m", shards, config=CONFIG | {"n_embd": 512})
    peaks = []
    for place in range(2):  # what threads of earlier tests or a first import take in one of them, they take once
        tracemalloc.start()
        try:
            write_pretrained(find_pretrained("m"), here / f"w{place}", source="m", wrote=lambda _: None)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    peak = min(peaks)
    assert len(theirs) == len(imported(here / "w1"))
    largest, whole = max(one.nbytes for one in theirs.values()), sum(one.nbytes for one in theirs.values())
    assert largest < peak < largest + (3 << 20) < whole / 3


def test_half_precision_keeps_its_bits(ttlaunch, here):
    theirs = {name: one.bfloat16() for name, one in gpt2_tensors().items()}
    save(here / "m", theirs)
    assert 0 == ttlaunch("weights import m w").status
    assert torch.equal(
        theirs["transformer.h.0.mlp.c_fc.weight"].T, imported(here / "w")["blocks.0.feed_forward_in.weight"]
    )


def test_a_tied_head_may_be_stored_only_if_it_is_the_embedding(ttlaunch, here):
    tied, theirs = {**CONFIG, "tie_word_embeddings": True}, gpt2_tensors()
    save(here / "other", theirs, tied)
    answer = ttlaunch("weights import other w")
    assert (2, True) == (answer.status, "differs from `transformer.wte.weight`" in answer.stderr)
    save(here / "same", {**theirs, "lm_head.weight": theirs["transformer.wte.weight"].clone()}, tied)
    del theirs["lm_head.weight"]
    save(here / "once", theirs, tied)
    assert [0, 0] == [ttlaunch(f"weights import {folder} {folder}.w").status for folder in ("same", "once")]
    assert (here / "same.w").read_bytes() == (here / "once.w").read_bytes()
    assert "head.output.weight" not in imported(here / "once.w")


def test_every_wrong_tensor_is_named_at_once_with_the_nearest_name(ttlaunch, here):
    theirs = gpt2_tensors()
    theirs["transformer.h.0.mlp.c_fcc.weight"] = theirs.pop("transformer.h.0.mlp.c_fc.weight")
    theirs["transformer.wpe.weight"] = torch.zeros(LENGTH + 1, WIDTH)
    theirs["transformer.ln_f.bias"] = torch.zeros(WIDTH, dtype=torch.int64)
    save(here / "m", theirs)
    answer = ttlaunch("weights import m w --format concise")
    assert (2, False) == (answer.status, (here / "w").exists())
    for said in (
        "tensor `transformer.h.0.mlp.c_fc.weight` is missing; the file has `transformer.h.0.mlp.c_fcc.weight`",
        "tensor `transformer.h.0.mlp.c_fcc.weight` is unknown; the model lacks `transformer.h.0.mlp.c_fc.weight`",
        "tensor `transformer.wpe.weight` has the shape [17, 32], and the configuration says [16, 32]",
        "tensor `transformer.ln_f.bias` has values of type I64",
    ):
        assert said in answer.stderr


def test_very_many_wrong_tensors_are_counted(ttlaunch, here):
    save(here / "m", {**gpt2_tensors(), **{f"more.{number}": torch.zeros(1) for number in range(2000)}})
    answer = ttlaunch("weights import m w --format concise")
    assert (2, 21) == (answer.status, len(answer.stderr.splitlines()))
    assert "1980 reasons more" in answer.stderr


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "gpt_neo"}, "only `gpt2` and `llama` are imported"),
        ({"model_type": "gtp2"}, "did you mean `gpt2`?"),
        ({"model_type": None}, "`model_type` is None"),
        ({"model_type": ["gpt2"]}, "only `gpt2` and `llama` are imported"),
        ({"activation_function": "relu"}, "`activation_function` is 'relu'"),
        ({"layer_norm_epsilon": 1e-6}, "`layer_norm_epsilon` is 1e-06"),
        ({"n_inner": 100}, "`n_inner` is 100"),
        ({"n_head": 5}, "`n_head` is 5, which does not divide `n_embd`, 32"),
        ({"n_head": 0}, "`n_head` is 0"),
        ({"n_layer": 2**50}, "`n_layer` is 1125899906842624, and the files have 2 blocks"),
        ({"n_layer": -1}, "`n_layer` is -1"),
        ({"n_embd": "wide"}, "`n_embd` is "),
        ({"n_embd": 2**52}, "and the configuration says"),
        ({"scale_attn_weights": False}, "`scale_attn_weights` is false"),
        ({"scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx` is true"),
        ({"add_cross_attention": True}, "`add_cross_attention` is true"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "which is never run"),
        ({"quantization_config": {"bits": 4}}, "only plain values are read"),
    ],
)
def test_a_model_that_ours_cannot_be_is_refused(ttlaunch, here, changed, said):
    save(here / "m", gpt2_tensors(), {**CONFIG, **changed})
    answer = ttlaunch("weights import m w")
    assert (2, True, False) == (answer.status, said in answer.stderr, (here / "w").exists()), answer.stderr


def shards_with(places, **files):
    def prepare(folder):
        save_shards(folder, files or {"a.safetensors": gpt2_tensors()}, places)

    return prepare


def text_in(name, text):
    def prepare(folder):
        save(folder, gpt2_tensors())
        (folder / name).write_text(text)

    return prepare


def only(name, data):
    def prepare(folder):
        folder.mkdir()
        (folder / name).write_bytes(data)

    return prepare


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (shards_with({"x": "../m/a.safetensors"}), "no plain name of a file"),
        (shards_with({"x": "/dev/zero"}), "no plain name of a file"),
        (shards_with({"x": ".."}), "no plain name of a file"),
        (shards_with({"x": "a\x00b"}), "no plain name of a file"),
        (shards_with({"x": "nowhere.safetensors"}), "nowhere.safetensors cannot be read: no such file or directory"),
        (
            shards_with({"x": "a.safetensors"}, **{"a.safetensors": {"y": torch.zeros(1)}}),
            "says that `x` is in `a.safetensors`, which does not have it",
        ),
        (shards_with({"x": 3}), "`weight_map.x` is 3"),
        (shards_with([1]), "`weight_map` is "),
        (text_in("config.json", "[1]"), "config.json: it is no object"),
        (text_in("config.json", "{"), "config.json: "),
        (text_in("config.json", "[" * 100_000), "config.json: "),
        (text_in("config.json", '{"n_layer": 1e999}'), "config.json: "),
        (only("pytorch_model.bin", b"PK\x03\x04"), "pytorch_model.bin is a pickle"),
        (only("model.safetensors", b"PK\x03\x04" + bytes(50)), "model.safetensors: it is no safetensors file"),
        (only("readme", b""), "the folder has neither model.safetensors nor"),
    ],
)
def test_a_folder_that_is_none_is_refused(ttlaunch, here, prepare, said):
    prepare(here / "m")
    if not (here / "m" / "config.json").exists():
        (here / "m" / "config.json").write_text(json.dumps(CONFIG))
    answer = ttlaunch("weights import m w")
    assert (2, True, False) == (answer.status, said in answer.stderr, (here / "w").exists()), answer.stderr


def test_files_that_are_missing_links_or_pickles(ttlaunch, here):
    save(here / "m", gpt2_tensors())
    (here / "torch.bin").write_bytes(b"\x80\x02}q\x00.")
    (here / "zip.pt").write_bytes(b"PK\x03\x04")
    for source, said in {
        "torch.bin": "torch.bin is a pickle",
        "zip.pt": "zip.pt is a pickle",
        "nowhere": "nowhere cannot be read: no such file or directory",
        "/dev/zero": "/dev/zero cannot be read: ",
        "''": "an empty text names no folder and no file",
    }.items():
        answer = ttlaunch(f"weights import {source} w")
        assert (2, True) == (answer.status, said in answer.stderr), answer.stderr
    (here / "link").symlink_to(here / "m")
    assert 0 == ttlaunch("weights import link w").status
    answer = ttlaunch("weights import link w")
    assert (2, True) == (answer.status, "w already exists" in answer.stderr)
    answer = ttlaunch("weights import m no/such/folder/w")
    assert (2, True) == (answer.status, "no/such/folder/w cannot be written" in answer.stderr)
    shutil.rmtree(here / "m")
    assert 2 == ttlaunch("weights import link v").status


def test_the_activation_of_gpt2_has_our_name(ttlaunch, here):
    for theirs in ("gelu_new", "gelu_pytorch_tanh"):
        save(here / theirs, gpt2_tensors(), {**CONFIG, "activation_function": theirs})
        assert (
            "--set transformer_config.activation=gelu_new\n" in ttlaunch(f"weights import {theirs} {theirs}.w").stdout
        )


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "activation"), [(False, "gelu"), (True, "gelu_new")])
def test_the_weights_of_transformers_compute_the_same_in_our_model(ttlaunch, here, tied, activation):
    import transformers  # noqa: PLC0415 - it takes seconds to import

    from tests.runtime.serving.served_models import configuration  # noqa: PLC0415 - needs torch
    from ttlaunch.runtime.model.model import Model  # noqa: PLC0415 - needs torch

    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        activation_function=activation,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(here / "m", max_shard_size="100KB")
    assert 0 == ttlaunch("weights import m w").status
    cfg = configuration(length=LENGTH, tied=tied, activation=activation)
    ours = Model(cfg, vocabulary=TOKENS, blocks=range(2), has_embedding=True, has_head=True)
    weights = imported(here / "w")
    assert set(weights) == {name for name, _ in ours.named_parameters()} - ({"head.output.weight"} if tied else set())
    ours.flatten(torch.device("cpu"))
    for name, parameter in ours.named_parameters():
        parameter.data.copy_(weights[name] if name in weights else weights["embedding.token.weight"])
    texts = torch.randint(TOKENS, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (ours(texts).float() - theirs(texts).logits).abs().max() <= 1e-5


def plan(ttlaunch, *options):
    words = ["--set checkpoint_config.initial_weights=hf:m", *(f"--set {option}" for option in options)]
    return ttlaunch(f"plan data_parallel --format concise {' '.join(words)}")


def test_a_training_takes_the_sizes_of_the_folder(ttlaunch, here):
    """The recipe's own file has other sizes, which are nobody's wish; those of an option or of the user's file are."""
    save(here / "m", {**gpt2_tensors(5), **with_tokens(256)}, {**CONFIG, "vocab_size": 256, "n_layer": 5})
    taken = plan(ttlaunch)
    assert 0 == taken.status, taken.stderr
    same = plan(ttlaunch, "transformer_config.num_blocks=5")
    assert 0 == same.status, same.stderr
    other = plan(ttlaunch, "transformer_config.num_blocks=3", "transformer_config.tie_embeddings=true")
    assert 3 == other.status
    assert "[C042]: `num_blocks` is 3, and the model in " in other.stderr
    assert "[C042]: `tie_embeddings` is true, and the model in " in other.stderr
    (here / "t.yaml").write_text("transformer_config: {num_heads: 4}\ncheckpoint_config: {initial_weights: 'hf:m'}\n")
    answer = ttlaunch("plan data_parallel -c t.yaml --format concise")
    assert (3, True) == (answer.status, "[C042]: `num_heads` is 4, and the model in " in answer.stderr)


def test_a_model_of_another_type_cannot_begin_with_a_gpt2(ttlaunch, here):
    save(here / "m", {**gpt2_tensors(), **with_tokens(256)}, {**CONFIG, "vocab_size": 256})
    for kind in ("mlp", "conv"):
        answer = plan(ttlaunch, f"training_config.model_type={kind}")
        assert (3, True) == (answer.status, f"`model_type` is `{kind}`, and the model in " in answer.stderr)


def with_tokens(count):
    return {name: torch.zeros(count, WIDTH) for name in ("transformer.wte.weight", "lm_head.weight")}


def test_a_training_with_another_number_of_tokens_is_refused(ttlaunch, here):
    save(here / "m", gpt2_tensors())
    answer = plan(ttlaunch)
    assert (3, True) == (
        answer.status,
        "has 50 tokens, and the training data with `tokenizer_type` `byte` has 256" in answer.stderr,
    )
    for count, status in ((50, 0), (60, 3)):
        (here / "tokens").write_text(f"{TOKENS_MARK} {count}\n" + " ".join(str(n % 50) for n in range(20_000)))
        answer = plan(ttlaunch, "training_config.tokenizer_type=ids", "training_config.data_path=tokens")
        assert status == answer.status, answer.stderr


@pytest.mark.parametrize("mistake", ["auto_map", "shape", "nowhere", "shard"])
def test_a_folder_to_begin_with_is_checked_in_the_plan(ttlaunch, here, mistake):
    if mistake == "shard":
        shards_with({"x": "../m/a.safetensors"})(here / "m")
    elif mistake != "nowhere":
        wrong = {"auto_map": {}} if mistake == "auto_map" else {"n_positions": 5}
        save(here / "m", gpt2_tensors(), {**CONFIG, **wrong})
    answer = plan(ttlaunch)
    assert (3, 1) == (answer.status, answer.stderr.count("error[")), answer.stderr
    assert "[C042]" in answer.stderr


def test_a_folder_that_changes_after_its_sizes_were_taken_is_never_left_out(ttlaunch, here, monkeypatch):
    from ttlaunch.app import import_weights  # noqa: PLC0415 - the function below is replaced in it

    save(here / "m", {**gpt2_tensors(), **with_tokens(256)}, {**CONFIG, "vocab_size": 256})
    whole = import_weights.find_pretrained

    def once(where):
        found = whole(where)
        (here / "m" / "model.safetensors").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(import_weights, "find_pretrained", once)
    answer = plan(ttlaunch)
    assert (3, True) == (answer.status, "[C042]" in answer.stderr), answer.stderr
