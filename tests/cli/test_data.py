"""D18: datasets and tokenizers of the usual libraries, made here and read from the disk alone, as files to train on."""

import os
import subprocess
import sys

import pytest

from tests.runtime.layouts import train
from ttlaunch import contract
from ttlaunch.spec.recipe.corpus import CorpusError, read_corpus

TEXTS = [f"story {at}: a fox that had {at} friends went home, and {at} friends went with it." for at in range(60)]
MAKE = """\
import sys
from datasets import Dataset, DatasetDict
texts = sys.stdin.read().splitlines()
Dataset.from_dict({"text": texts, "number": list(range(len(texts)))}).save_to_disk("stories")
DatasetDict({"train": Dataset.from_dict({"body": texts}), "test": Dataset.from_dict({"body": texts[:1]})}).save_to_disk("split")
"""


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """Arrow folders, saved by the library in a process of its own: it may warn of what it likes."""
    folder = tmp_path_factory.mktemp("data")
    command = [sys.executable, "-W", "ignore", "-c", MAKE]
    subprocess.run(command, cwd=folder, input="\n".join(TEXTS), text=True, check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture
def tokenizer(here):
    """A byte-pair encoding, trained on the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: PLC0415

    known = Tokenizer(models.BPE(unk_token="?"))  # noqa: S106 - a token, not a password
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    known.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=90, special_tokens=["?"], show_progress=False))
    known.save(str(here / "tokenizer.json"))
    return known


def run(folder, line):
    process = subprocess.run(
        [sys.executable, "-m", "ttlaunch", *line.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return process.returncode, process.stdout, process.stderr.strip()


@pytest.mark.parametrize("options", ["stories book-1.txt", "split book-2.txt --column body"])
def test_the_texts_of_a_dataset_become_a_file(stories, options):
    status, said, errors = run(stories, f"data {options}")
    text = "\n".join(TEXTS) + "\n"
    name = options.split()[1]
    assert (0, f"wrote {name}: 60 texts, {len(text):,} bytes\n", "") == (status, said, errors)
    assert text == (stories / name).read_text()


ASK = """\
import sys
from pathlib import Path
from ttlaunch.spec.recipe.adapters import AdapterError, read_dataset
for folder, column, split in (("stories", "body", ""), ("split", "text", "all"), ("stories", "number", "")):
    try:
        print(list(read_dataset(Path(folder), column=column, split=split)))
    except AdapterError as error:
        print(error)
"""


def test_a_column_and_a_split_that_are_not_there_are_named(stories):
    command = [sys.executable, "-W", "ignore", "-c", ASK]
    process = subprocess.run(command, cwd=stories, capture_output=True, text=True, timeout=120, check=True)
    assert [
        "stories has no column 'body'; it has text, number",
        "split has no split 'all'; it has train, test",
        "row 0 of column 'number' of stories is no text",
    ] == process.stdout.splitlines()


def test_tokens_are_those_of_the_tokenizer_and_can_be_trained_on(ttlaunch, here, tokenizer, tmp_path):
    (here / "book.txt").write_text("\n".join(TEXTS))
    answer = ttlaunch("data book.txt tokens.txt --tokenizer tokenizer.json")
    assert (0, "") == (answer.status, answer.stderr)
    corpus = read_corpus(here / "tokens.txt")
    assert tokenizer.encode("\n".join(TEXTS)).ids == list(corpus.ids)
    assert tokenizer.get_vocab_size() == corpus.vocabulary_of_ids
    sizes = {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
    training = {"steps": 30, "tokenizer_type": "ids", "batch_size": 8, "validation_interval": 30, "learning_rate": 1e-2}
    trained = {
        layout: train(
            layout,
            tmp_path / layout,
            {"training_config": training, "transformer_config": sizes},
            data=here / "tokens.txt",
        )
        for layout in ("single", "data parallel")
    }
    losses = trained["single"].by_step(contract.KIND_VALIDATION, "loss")
    assert losses[30] < 0.7 * losses[0]
    assert trained["single"].sha256 == trained["data parallel"].sha256


def test_a_file_is_not_overwritten_unless_asked(ttlaunch, here):
    (here / "book.txt").write_text("a text")
    (here / "out.txt").write_text("mine")
    answer = ttlaunch("data book.txt out.txt --tokenizer no.json")  # said before the time is spent
    assert (2, "mine") == (answer.status, (here / "out.txt").read_text())
    assert "error[P009]: out.txt already exists\n\nhint: `--force` overwrites it" == answer.stderr.strip()
    assert 0 == ttlaunch("data book.txt out.txt --force").status
    assert "a text\n" == (here / "out.txt").read_text()


def test_standard_output_is_no_file_to_train_on(ttlaunch, here):
    """It would be a file of that name."""
    (here / "book.txt").write_text("a text")
    answer = ttlaunch("data book.txt - --format concise")
    assert (2, "error[P009]: `-` is no file that a training could read\n") == (answer.status, answer.stderr)
    assert ["book.txt"] == [path.name for path in here.iterdir()]


def test_a_tokenizer_that_is_none_is_named(ttlaunch, here):
    (here / "book.txt").write_text("a text")
    (here / "tokenizer.json").write_text("{}")
    answer = ttlaunch("data book.txt out.txt --tokenizer tokenizer.json")
    assert 2 == answer.status
    assert answer.stderr.startswith("error[P009]: tokenizer.json makes no tokens of the texts: it is no tokenizer: ")
    answer = ttlaunch("data book.txt out.txt --tokenizer other.json")
    assert 2 <= answer.status <= 5
    assert "other.json" in answer.stderr
    (here / "tokenizer.json").unlink()
    os.mkfifo(here / "tokenizer.json")  # nobody writes to it
    answer = ttlaunch("data book.txt out.txt --tokenizer tokenizer.json")
    assert 2 <= answer.status <= 5
    assert not (here / "out.txt").exists()


def cut_by(tokenizer, folder, expression):
    from tokenizers import Regex, pre_tokenizers  # noqa: PLC0415 - an extra

    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(expression), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_tokenizer_with_parts_of_its_own_is_used_and_cuts_no_text_off(ttlaunch, here, tokenizer):
    tokenizer.enable_truncation(5)
    cut_by(tokenizer, here, "[^ ]{3}")
    (here / "book.txt").write_text("\n".join(TEXTS))
    assert 0 == ttlaunch("data book.txt tokens.txt --tokenizer tokenizer.json").status
    tokenizer.no_truncation()
    assert tokenizer.encode("\n".join(TEXTS)).ids == list(read_corpus(here / "tokens.txt").ids)


def test_a_tokenizer_that_makes_too_much_of_a_text_is_ended(ttlaunch, here, tokenizer):
    """Each of twelve steps makes eight letters of one."""
    from tokenizers import normalizers  # noqa: PLC0415 - an extra

    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 8)] * 12)
    tokenizer.save(str(here / "tokenizer.json"))
    (here / "book.txt").write_text("a" * 100)
    answer = ttlaunch("data book.txt tokens.txt --tokenizer tokenizer.json")
    assert (2, False) == (answer.status, (here / "tokens.txt").exists())
    assert answer.stderr.startswith("error[P009]: tokenizer.json makes no tokens of the texts: ")


@pytest.mark.parametrize("count", [1, 3])
def test_tokens_at_the_ends_of_a_text_are_there_once(ttlaunch, here, tokenizer, monkeypatch, count):
    """However many pieces a text is encoded in."""
    monkeypatch.setattr("ttlaunch.running.pretrained.read_tokenizer._CHUNK", 1 if count > 1 else 10**6)
    from tokenizers.processors import TemplateProcessing  # noqa: PLC0415 - an extra

    tokenizer.post_processor = TemplateProcessing(single="? $A ?", special_tokens=[("?", 0)])
    tokenizer.save(str(here / "tokenizer.json"))
    text = "\n".join(story.replace(".", "") for story in TEXTS[:count])
    (here / "book.txt").write_text(text)
    assert 0 == ttlaunch("data book.txt tokens.txt --tokenizer tokenizer.json").status
    found = list(read_corpus(here / "tokens.txt").ids)
    assert tokenizer.encode(text).ids == found
    assert (0, 0, 2) == (found[0], found[-1], found.count(0))


@pytest.mark.parametrize("package", ["datasets", "tokenizers"])
def test_a_library_that_is_not_installed_is_named_with_the_command_that_installs_it(bare_python, here, package):
    python, environment = bare_python(hidden=(package,))
    (here / "book").mkdir()
    (here / "book" / ("dataset_info.json" if package == "datasets" else "text.txt")).write_text("{}")
    process = subprocess.run(
        [python, "-m", "ttlaunch", "data", "book", "out.txt", "--tokenizer", "tokenizer.json"],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    expected = f"error[C088]: the package {package} is not installed\n\nhint: `pip install 'ttlaunch[{package}]'`"
    assert (3, expected) == (process.returncode, process.stderr.strip())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2 3", "no token ids in these: its first line is not `ttlaunch token ids, of a vocabulary of NUMBER`"),
        ("ttlaunch token ids, of a vocabulary of 9\n1 2 x", "these has more than token ids below its first line"),
        ("ttlaunch token ids, of a vocabulary of 9\n1 9", "these has token 9, and its first line says there are 9"),
    ],
)
def test_a_file_that_has_no_tokens_is_refused(tmp_path, text, message):
    (tmp_path / "these").write_text(text)
    with pytest.raises(CorpusError) as caught:
        _ = read_corpus(tmp_path / "these").ids
    assert message == str(caught.value).replace(f"{tmp_path}/", "")
