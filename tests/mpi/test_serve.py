"""Serving runs with real ranks: the bits are those of one process's forward pass, whatever part of the model each rank has (D12)."""

import hashlib
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.mpi.typed import command, train
from tests.recipes.peers import write_peers
from ttlaunch import contract
from ttlaunch.app.ask_head import serving
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.serve import ServeOptions, find_served
from ttlaunch.diagnostics import LaunchError
from ttlaunch.runtime.checkpoint.checkpoints import held_tensors
from ttlaunch.runtime.checkpoint.reader import read_tensors
from ttlaunch.runtime.model.model import Model
from ttlaunch.serving import wire
from ttlaunch.spec.recipe.sections import TrainingFile

pytestmark = pytest.mark.mpi

SIZES = {"num_blocks": 3, "num_heads": 4, "embedding_dim": 64, "max_sequence_length": 64}
PROMPTS = ("import os\n", "d", "class Thing(object):\n    def __init__(self", "x = [1, 2")
WAYS = {
    "one rank": ServeOptions(),
    "three stages": ServeOptions(ranks=3, split="stages"),
    "columns of two": ServeOptions(ranks=2, split="columns"),
}
"""Columns of four have the same logits below, and two stages serve in `test_generate_prints_the_text_or_why_it_does_not_fit_and_the_run_is_done`."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run that two stages have trained."""
    folder = tmp_path_factory.mktemp("trained")
    sets = {f"transformer_config.{name}": value for name, value in SIZES.items()}
    sets |= {"training_config.steps": 30, "multihost_config.pipeline_parallel_config.blocks_per_rank": "[1,2]"}
    train(folder, "pipeline_parallel", sets, ranks=2)
    return folder


def answers(folder, options, settings, *, prompts=PROMPTS):
    """Ask one run for all prompts at once, in each setting in turn; returns the tokens with their logarithms by setting, prompt and
    place, and the head's hello."""
    spec, _ = find_served("latest", replace(options, until_left=True), runs_dir=Path("runs"), working_folder=folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with serving(spec, Unattended()) as head:
            told, numbers = [], itertools.count(1)
            for each in settings:
                asks = [
                    wire.Ask(stream=next(numbers), text=text, max_tokens=20, logprobs=5, **each) for text in prompts
                ]
                found = {ask.stream: [] for ask in asks}
                for message in head.answers(asks):
                    if isinstance(message, wire.Tokens):
                        found[message.stream] += message.logprobs
                told.append(list(found.values()))
            return told, head.hello


@pytest.fixture(scope="module")
def forward(trained):
    """What the forward pass of training gives, in one process: greedy tokens with their logarithms, by prompt."""
    checkpoint = next((trained / "runs").glob("*/checkpoints/step-30"))
    manifest = json.loads((checkpoint / contract.CHECKPOINT_MANIFEST).read_text())
    config = {name: manifest["config"][name] for name in ("training_config", "transformer_config")}
    model = Model(
        TrainingFile.model_validate(config), vocabulary=256, blocks=range(3), has_embedding=True, has_head=True
    )
    model.flatten(torch.device("cpu"))
    files = [{"path": str(checkpoint / name), "sha256": entry["sha256"]} for name, entry in manifest["files"].items()]
    read_tensors(files, into=dict(held_tensors(model)))

    @torch.no_grad()
    def greedy(text):
        tokens, found = list(text.encode()), []
        for _ in range(20):
            padded = torch.zeros(1, SIZES["max_sequence_length"], dtype=torch.int64)
            padded[0, : len(tokens)] = torch.tensor(tokens)
            logits_V = model(padded)[0, len(tokens) - 1]
            tokens.append(int(logits_V.argmax()))
            found.append((tokens[-1], logits_V))
        return found

    return [greedy(text) for text in PROMPTS]


def test_tokens_and_bits_are_those_of_the_forward_pass_of_training_in_every_way(trained, forward):
    """The logarithms are computed in one place from logits, so equal ones come from equal bits of the likeliest logits."""
    hashes, weights = set(), set()
    for options in WAYS.values():
        (greedy, drawn), hello = answers(trained, options, [{"temperature": 0.0}, {"temperature": 0.8, "seed": 11}])
        assert hello.exact
        assert options.ranks == hello.ranks
        assert [[token for token, _ in one] for one in forward] == [[one.id for one in stream] for stream in greedy]
        for stream, one in zip(greedy, forward, strict=True):
            for served, (token, logits_V) in zip(stream, one, strict=True):
                assert served.logprob == pytest.approx(float(logits_V.double().log_softmax(0)[token]), abs=1e-6)
        weights.add(hello.weights_sha256)
        told = [
            (one.id, one.logprob, [(top.id, top.logprob) for top in one.top])
            for each in (*greedy, *drawn)
            for one in each
        ]
        hashes.add(hashlib.sha256(repr(told).encode()).hexdigest())
    assert 1 == len(hashes)
    report = json.loads(
        next((trained / "runs").glob("*/checkpoints/step-30")).parents[1].joinpath("report.json").read_text()
    )
    assert {report["parameters_sha256"]} == weights


LOGITS_ON_RANKS = f"""
import hashlib, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.runtime.serving.on_ranks import InSteps, take_part
from tests.runtime.serving.served_models import cached_logits, configuration, random_model, random_texts, training_logits

def peer(cfg, ctx):
    for length in (64, 128, 160, 256):
        model = configuration(length=length, blocks=3)
        texts = random_texts(model)
        found = [training_logits(random_model(model), texts)] if ctx.rank == 0 else []
        for split, count in (("stages", 3), ("columns", 4)):
            head = lambda served: cached_logits(InSteps(served), texts, chunks=(1, 7, 64))
            if ctx.rank < count:
                logits = take_part(ctx, model, split, count, head=head)
                found += [logits] if ctx.rank == 0 else []
        if ctx.rank == 0:
            ctx.note(" ".join([str(length), *(hashlib.sha256(one.numpy().tobytes()).hexdigest() for one in found)]))
"""


def test_raw_logits_of_real_ranks_are_those_of_training_at_every_length(run_ranks, tmp_path):
    """S1: every position of three texts; three stages, and columns of four."""
    run = run_ranks(write_peers(tmp_path / "logits", LOGITS_ON_RANKS), ["peer"] * 4, timeout_s=200)
    assert run.error(0) is None, run.error(0)["traceback"]
    notes = [record["text"].split() for record in run.records(0, "note")]
    assert ["64", "128", "160", "256"] == [length for length, *_ in notes]
    assert [1] * 4 == [len(set(hashes)) for _, *hashes in notes]
    assert [3] * 4 == [len(hashes) for _, *hashes in notes]


@pytest.mark.core
def test_generate_prints_the_text_or_why_it_does_not_fit_and_the_run_is_done(trained):
    refused = command(trained, "generate", "latest", "a" * 100)
    assert refused.returncode
    assert "100 tokens of the prompt" in refused.stderr
    assert "context is 64" in refused.stderr
    one = command(trained, "generate", "latest", PROMPTS[0], "--temperature", "0", "--max-tokens", "20")
    two = command(trained, "generate", "latest", PROMPTS[0], "--temperature", "0", "--max-tokens", "20", "--ranks", "2")
    assert (0, 0) == (one.returncode, two.returncode), one.stderr + two.stderr
    assert one.stdout == two.stdout
    assert one.stdout.startswith(PROMPTS[0])
    newest = max((trained / "runs").iterdir())
    assert "done" == json.loads((newest / "report.json").read_text())["status"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ServeOptions(ranks=4), "4 ranks cannot share 3 blocks as stages"),
        (ServeOptions(ranks=5, split="columns"), "5 ranks cannot share 4 heads of attention"),
        (ServeOptions(max_context=65), "`--max-context 65` exceeds the 64 tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(trained, options, message):
    with pytest.raises(LaunchError) as refused:
        find_served("latest", options, runs_dir=Path("runs"), working_folder=trained)
    assert refused.value.diagnostics[0].message.startswith(message)


def test_without_the_bits_of_training_it_says_so(trained):
    options = ServeOptions(ranks=2, exact="off")
    ((text,),), hello = answers(trained, options, [{"temperature": 0.0}], prompts=PROMPTS[:1])
    assert (False, "it was asked for with `--exact off`") == (hello.exact, hello.why_not_exact)
    assert 20 == len(text)


def test_a_rank_whose_part_breaks_a_rule_is_named_by_the_head(tmp_path):
    sets = {"num_blocks": 2, "num_heads": 2, "embedding_dim": 32, "max_sequence_length": 33}
    train(
        tmp_path,
        "data_parallel",
        {f"transformer_config.{name}": value for name, value in sets.items()} | {"training_config.steps": 1},
    )
    _, hello = answers(tmp_path, ServeOptions(ranks=2), [{}], prompts=["a"])
    assert not hello.exact
    assert "a block of 1 rows" in hello.why_not_exact
    assert "rank 1 found rules that do not hold for its part" in hello.why_not_exact
    with pytest.raises(LaunchError, match="logits with the bits of training cannot be had"):
        answers(tmp_path, ServeOptions(ranks=2, exact="on"), [{}], prompts=["a"])
