"""The tokenizer of a model of others: every text of the default corpus comes back, and only the checked file is used."""

import hashlib
import json

import pytest

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("gguf")
from tests.untrusted.gguf_files import TOKENS, write_gguf  # noqa: E402 - needs gguf
from ttlaunch.running.pretrained.gguf import read_gguf_tokenizer  # noqa: E402
from ttlaunch.running.pretrained.read_tokenizer import encode_text  # noqa: E402
from ttlaunch.running.pretrained.read_tokenizer import read_tokenizer as find_tokenizer  # noqa: E402
from ttlaunch.running.pretrained.tokenizer_json import tokenizer_json  # noqa: E402
from ttlaunch.runtime.serving.folder_tokenizer import read_tokenizer  # noqa: E402
from ttlaunch.spec.recipe.corpus import read_corpus  # noqa: E402
from ttlaunch.untrusted.child import UntrustedError  # noqa: E402


def written(folder, content):
    folder.mkdir()
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "tokenizer.json").write_bytes(data)
    return folder / "tokenizer.json", hashlib.sha256(data).hexdigest()


def of_gguf(tmp_path, cut="gpt-2"):
    write_gguf(tmp_path / "m.gguf", tokenizer={"cut": cut})
    return written(tmp_path / cut, read_gguf_tokenizer(tmp_path / "m.gguf")[1])


def joined(made, ids):
    return b"".join(map(made.piece, ids)).decode()


def test_the_default_corpus_comes_back_and_pieces_are_tokens_of_the_whole(tmp_path):
    """The limited child encodes the text, the first part of that corpus, in pieces; the library itself encodes it at once."""
    file, sha256 = of_gguf(tmp_path)
    text = read_corpus(None).characters[:600_000]
    ids = [token for piece in encode_text(text, file) for token in piece]
    assert tokenizers.Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids == ids
    assert text == joined(read_tokenizer(str(file), sha256=sha256, vocabulary=TOKENS, ends=()), ids)


@pytest.mark.parametrize("cut", ["smollm", "llama-bpe", "qwen2"])
def test_other_cuts_are_the_same_in_pieces(tmp_path, cut, monkeypatch):
    monkeypatch.setattr("ttlaunch.running.pretrained.read_tokenizer._CHUNK", 500)
    file, _ = of_gguf(tmp_path, cut)
    text = read_corpus(None).characters[:60_000] + "naïve\r\n\n  end.\n\nEnd 12\n3"
    ids = [token for piece in encode_text(text, file) for token in piece]
    assert tokenizers.Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids == ids


def trained_tokenizer(kind, text):
    """A tokenizer that begins a text with a space, as SentencePiece's do, saved as the library saves it."""
    lines, unknown = [*text.split("\n"), "\n"], "<unk>"
    if kind == "Unigram":
        made = tokenizers.Tokenizer(tokenizers.models.Unigram())
        made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
        trainer = tokenizers.trainers.UnigramTrainer(vocab_size=300, unk_token=unknown, special_tokens=[unknown])
    else:
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=unknown, byte_fallback=True))
        steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        made.normalizer = tokenizers.normalizers.Sequence(steps)
        made.decoder = tokenizers.decoders.Metaspace()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[unknown], show_progress=False)
    made.train_from_iterator(lines, trainer)
    return made


@pytest.mark.parametrize("kind", ["Unigram", "BPE"])
def test_a_tokenizer_that_begins_a_text_with_a_space_goes_on_without_one(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("ttlaunch.running.pretrained.read_tokenizer._CHUNK", 500)
    text = read_corpus(None).characters[:20_000]
    made = trained_tokenizer(kind, text)
    file, sha256 = written(tmp_path / kind, made.to_str().encode())
    ids = [token for piece in encode_text(text, file) for token in piece]
    assert made.encode(text, add_special_tokens=False).ids == ids
    served = read_tokenizer(str(file), sha256=sha256, vocabulary=made.get_vocab_size(), ends=())
    assert f" {text}" == joined(served, ids)


def test_the_reason_why_a_tokenizer_is_refused_is_that_of_its_reader(tmp_path):
    file, _ = written(tmp_path / "w", {"model": {"type": "WordPiece", "vocab": {}}})
    with pytest.raises(UntrustedError, match="has the part 'WordPiece'"):
        list(encode_text("a", file))
    unknown = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    file, _ = written(tmp_path / "u", {"version": "1.0", "model": unknown})
    with pytest.raises(UntrustedError, match="it has no tokens for a text: WordLevel error"):
        list(encode_text("b", file))


def test_special_tokens_are_no_text_and_more_rows_than_tokens_are_none(tmp_path):
    file, sha256 = of_gguf(tmp_path)
    made = read_tokenizer(str(file), sha256=sha256, vocabulary=TOKENS + 20, ends=[TOKENS - 1])
    ids = made.encode("<|begin|>hello<|end|>")
    assert (3, TOKENS - 2, TOKENS - 1) == (len(ids), ids[0], ids[-1])
    assert "hello" == joined(made, [*ids, TOKENS + 19])
    assert {TOKENS - 1} == made.ends
    with pytest.raises(ValueError, match="surrogate"):
        made.encode("a\ud800")
    small = read_tokenizer(str(file), sha256=sha256, vocabulary=10, ends=())
    with pytest.raises(ValueError, match="and the model has 10 tokens"):
        small.encode("~~")


def test_our_own_tokenizers_come_back_too(tmp_path):
    for kind, text, options in (
        ("byte", "naïve 🙂\n", {"vocabulary": 256}),
        ("char", "abc", {"vocabulary": 3, "alphabet": [97, 98, 99]}),
        ("ids", "3 1 2 ", {"vocabulary": 5}),
    ):
        file, sha256 = written(tmp_path / kind, tokenizer_json(kind, **options))
        made = read_tokenizer(str(file), sha256=sha256, vocabulary=options["vocabulary"], ends=())
        assert text == joined(made, made.encode(text))
        assert options["vocabulary"] == find_tokenizer(tmp_path / kind).vocabulary


def test_another_file_than_the_checked_one_is_refused(tmp_path):
    file, sha256 = of_gguf(tmp_path)
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ValueError, match="has changed since it was checked"):
        read_tokenizer(str(file), sha256=sha256, vocabulary=TOKENS, ends=())
