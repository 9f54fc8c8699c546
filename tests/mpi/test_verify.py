"""Receipts of real runs: the text is computed again, and is equal, or the command says where it differs."""

import json
import re

import httpx
import pytest

from tests.mpi.typed import command, train
from tests.serving.served import until
from ttlaunch.serving.receipt import hash_tokens

pytestmark = pytest.mark.mpi

SIZES = {"num_blocks": 2, "num_heads": 2, "embedding_dim": 32, "max_sequence_length": 32}
SAMPLED = ("--temperature", "0.9", "--max-tokens", "12")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of 4 steps, which has checkpoints of steps 2 and 4; and receipts of its texts."""
    folder = tmp_path_factory.mktemp("trained")
    sets = {f"transformer_config.{name}": value for name, value in SIZES.items()}
    sets |= {"training_config.steps": 4, "checkpoint_config.interval": 2}
    train(folder, "data_parallel", sets)
    newest, older = (str(*(folder / "runs").glob(f"*/checkpoints/step-{step}")) for step in (4, 2))
    for name, where, *more in (("newest", newest), ("older", older), ("private", newest, "--private")):
        done = command(folder, "generate", where, "import ", *SAMPLED, "--receipt", f"{name}.json", *more)
        assert 0 == done.returncode, done.stderr
    (folder / "prompt").write_text("import ")
    (folder / "other").write_text("import\n")
    tokens = json.loads((folder / "newest.json").read_text())["tokens"]
    tokens[7] ^= 1
    change(folder, "changed", tokens=tokens, tokens_sha256=hash_tokens(tokens), torch="2.6.0")
    change(folder, "wide", context=64)
    change(folder, "foreign", weights_sha256="0" * 64, model="/etc/passwd")
    return folder


def change(folder, name, **values):
    receipt = json.loads((folder / "newest.json").read_text()) | values
    (folder / f"{name}.json").write_text(json.dumps(receipt))


def test_the_text_of_a_receipt_is_computed_again_on_more_ranks(trained):
    done = command(trained, "verify", "newest.json", "--ranks", "2")
    assert (0, "equal: 12 tokens, and its end (`length`)") == (done.returncode, done.stdout.split("\n")[0]), done
    assert "a receipt is no signature" in done.stdout
    (manifest,) = (trained / "runs").glob("*/checkpoints/step-4/manifest.json")
    linked = json.loads((trained / "newest.json").read_text())["provenance_sha256"]
    assert json.loads(manifest.read_text())["provenance"]["sha256"] == linked
    assert f"provenance {linked[:12]}" in done.stdout
    assert "in the receipt" not in done.stdout


def test_the_checkpoint_of_the_receipts_step_is_found_in_a_run_that_went_on(trained):
    done = command(trained, "verify", "older.json", "--format", "json")
    verdict = json.loads(done.stdout)
    assert [0, True, 2] == [done.returncode, verdict["equal"], verdict["step"]]
    assert "ttlaunch.verify/1" == verdict["schema"]


def test_the_first_token_that_differs_is_named_with_what_else_is_other(trained):
    done = command(trained, "verify", "changed.json", "--format", "json")
    verdict = json.loads(done.stdout)
    receipt = json.loads((trained / "changed.json").read_text())
    message = f"token 7 is {receipt['tokens'][7]} in the receipt and {receipt['tokens'][7] ^ 1} here"
    assert [1, {"message": message, "token": 7}] == [done.returncode, verdict["difference"]]
    assert ["torch"] == list(verdict["conditions"])
    assert "2.6.0" == verdict["conditions"]["torch"]["receipt"]


def test_a_private_receipt_needs_its_prompt_and_no_other(trained):
    assert None is json.loads((trained / "private.json").read_text())["prompt_tokens"]
    done = command(trained, "verify", "private.json", "--prompt", "prompt")
    assert (0, "equal") == (done.returncode, done.stdout[:5]), done
    done = command(trained, "verify", "private.json", "--prompt", "other")
    assert (2, "") == (done.returncode, done.stdout)
    assert "the prompt is not the one of the receipt" in done.stderr


def test_receipts_of_a_server_are_confirmed_and_each_of_several_texts_stands_alone(trained):
    done = command(trained, "serve", "latest", "--port", "0", "--api-port", "0", "-d")
    assert 0 == done.returncode, done.stderr
    url = re.search(r"^API +(http://[0-9.:]+)/v1", done.stdout, re.MULTILINE).group(1)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        until(lambda: 200 == http.get("/health").status_code)
        asked = {"max_tokens": 12, "temperature": 0.9}
        said = http.post("/query", json={"text": "import ", "receipt": True, **asked}).json()
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "import ", "seed": 7, "n": 2, **asked}
        both = [one["text"] for one in http.post("/v1/completions", json=body).json()["choices"]]
    assert 0 == command(trained, "stop", "latest").returncode
    (trained / "http.json").write_text(json.dumps(said["receipt"]))
    verdict = json.loads(command(trained, "verify", "http.json", "--format", "json").stdout)
    assert [True, said["generated_text"]] == [verdict["equal"], verdict["text"]]
    done = command(trained, "generate", "latest", "import ", *SAMPLED, "--seed", "7", "-n", "2", "--format", "json")
    assert both == [one["text"] for one in json.loads(done.stdout)["choices"]]
    assert both[0] != both[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("private.json",), "the receipt is private: it has only the hash of its prompt"),
        (("newest.json", "--prompt", "prompt"), "the receipt has its prompt, so `--prompt` names a second one"),
        (("foreign.json",), "the receipt is for weights 000000000000, and latest has "),
        (("wide.json",), "the receipt has a context of 64 tokens, and its weights were trained with 32"),
        (("prompt",), "prompt is no receipt: it is no JSON"),
        (("missing.json",), "missing.json cannot be read: no such file"),
        (("newest.json", "--run", "nope"), "`nope` names no run"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_anything_starts(trained, words, message):
    before = sorted((trained / "runs").iterdir())
    done = command(trained, "verify", *words)
    assert (2, "") == (done.returncode, done.stdout)
    assert message in done.stderr
    assert before == sorted((trained / "runs").iterdir())
