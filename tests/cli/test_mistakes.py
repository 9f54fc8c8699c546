"""Mistakes in options, arguments and names of commands: a diagnostic with what was meant, also as JSON."""

import json

import pytest

from ttlaunch.cli.main import app

MEANT = {
    "run data_parallel --steps 5": ["training_config.steps=5"],
    "run --batch-size=8 data_parallel": ["training_config.batch_size=8"],
    "plan data_parallel -steps 5": ["training_config.steps=5"],
    "chaos data_parallel --reduction fast": ["data_parallel_config.reduction=fast"],
    "simulate data_parallel --stpes 5": ["training_config.steps=5"],
    "run data_parallel --seed 1": ["training_config.seed=1", "data_config.seed=1"],
    "run data_parallel --tie-embeddings": ["transformer_config.tie_embeddings=VALUE"],
    "validate local --recipe sync_ps --num-servers 2": ["sync_ps_config.num_servers=2"],
    "run --data-path 'my text.txt' not_a_recipe": ["'training_config.data_path=my text.txt'"],
}


@pytest.mark.parametrize("line", MEANT)
def test_a_key_that_is_used_as_an_option_is_answered_with_set(ttlaunch, line):
    answer = ttlaunch(line)
    hints = [text.removeprefix("hint: ") for text in answer.stderr.splitlines() if text.startswith("hint: ")]
    assert (2, "") == (answer.status, answer.stdout)
    assert [f"did you mean `--set {text}`?" for text in MEANT[line]] == hints


def test_every_last_part_of_a_key_of_a_training_file_is_recognised(ttlaunch):
    text = ttlaunch("recipes show data_parallel").stdout.partition("# train.yaml")[2]
    names = {line.split(":")[0].strip() for line in text.splitlines() if line.startswith("  ") and ":" in line}
    assert len(names) > 50
    for name in sorted(names - {"naive", "verbose"}):
        answer = ttlaunch(f"run data_parallel --{name.replace('_', '-')}=x")
        assert f".{name}=x`?" in answer.stderr, name


def test_options_of_a_script_are_not_taken_for_keys(ttlaunch, here):
    (here / "work.py").write_text("")
    answer = ttlaunch("run work.py --steps 5 --lr=3 --on local")
    expected = "write the arguments of the script after `--`: `ttlaunch run work.py -- --steps 5 --lr=3 --on local`"
    assert expected in answer.stderr
    assert "--set" not in answer.stderr


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("run --master-port 29500 -n 2 work.py", "leave `--master-port` out: ttlaunch starts all hosts"),
        ("run --rdzv_backend=c10d --nproc-per-node 2 work.py", "leave `--rdzv_backend` out: ttlaunch starts all hosts"),
        ("plan --tee 3 work.py --lr 1", "leave `--tee` out: each rank has its log"),
        ("run --role worker work.py", "leave `--role` out: ttlaunch needs nothing in its place"),
        ("run -n 2 -m package.train --lr 1", "a module goes behind `--`: `-- python -m MODULE`"),
        ("submit --no-python ls", "a program goes behind `--`: `-- PROGRAM`"),
    ],
)
def test_an_option_of_torchrun_that_is_not_needed_is_not_taken_for_the_scripts(ttlaunch, here, line, hint):
    (here / "work.py").write_text("")
    answer = ttlaunch(line)
    assert (2, True) == (answer.status, f"hint: {hint}" in answer.stderr), answer.stderr
    assert 1 == answer.stderr.count("hint: ")


def test_an_option_behind_the_script_is_the_scripts_even_if_torchrun_has_it(ttlaunch, here):
    (here / "work.py").write_text("")
    answer = ttlaunch("run work.py --role worker --on local")
    assert "`ttlaunch run work.py -- --role worker --on local`" in answer.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lr 0.01", "training_config.learning_rate=0.01"),
        ("--workers=3", "multihost_config.num_workers=3"),
        ("--override training.batch_size=16", "training.batch_size=16"),
    ],
)
def test_an_option_of_another_launcher_is_answered_with_the_key(ttlaunch, typed, meant):
    answer = ttlaunch(f"run data_parallel {typed}")
    assert f"hint: did you mean `--set {meant}`?\n" in answer.stderr


def test_dashes_alone_make_no_option_alike(ttlaunch):
    answer = ttlaunch("metrics latest --ly")
    assert "did you mean" not in answer.stderr
    assert "hint: `ttlaunch metrics --help` lists all" in answer.stderr


def test_options_after_dashes_belong_to_the_program(ttlaunch):
    answer = ttlaunch("plan --ranks 2 --format json -- sh -c true --steps 5")
    assert 0 == answer.status
    assert ["sh", "-c", "true", "--steps", "5"] == json.loads(answer.stdout)["command"]["command"]


WRONG = {
    "run data_parallel --ranks 0": "`--ranks` is `0`; a number of at least 1 was expected",
    "run data_parallel --ranks abc": "`--ranks` is `abc`; a whole number was expected",
    "run data_parallel --grace never": "`--grace` is `never`; a number was expected",
    "schema mgdd": "`FILE` is `mgdd`; `bindings`, `sub-contexts`, `mgd`, `cluster` or `train` was expected",
    "run": "missing argument `RECIPE|FOLDER|SCRIPT`",
    "run data_parallel --set": "option `--set` requires an argument",
    "rnu": "`ttlaunch` has no command `rnu`",
    "weights exprot": "`ttlaunch weights` has no command `exprot`",
    "report --on lab": "`ttlaunch report` has no option `--on`",
    "doctor --hosts nowhere": "`--hosts`: there is no host `nowhere` in local",
    "run data_parallel --rnaks 2": "`ttlaunch run` has no option `--rnaks`",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_in_what_was_typed_has_the_words_of_diagnostics(ttlaunch, line):
    answer = ttlaunch(line)
    assert (2, "", f"error[P009]: {WRONG[line]}") == (answer.status, answer.stdout, answer.stderr.partition("\n")[0])


def test_a_wrong_format_names_the_formats(ttlaunch):
    answer = ttlaunch("plan data_parallel --format jsn")
    assert "`--format` is `jsn`; `full`, `concise`, `json` or `github` was expected" in answer.stderr
    assert "did you mean `json`?" in answer.stderr


def test_no_command_has_two_options_of_the_same_name():
    """The one that is declared later would be the only one that can be given."""
    for name, command in _commands():
        options = [word for one in command.params for word in (*one.opts, *one.secondary_opts)]
        assert sorted(set(options)) == sorted(options), name


def _commands():
    from typer.main import get_command  # noqa: PLC0415 - only this needs it

    for name, command in get_command(app).commands.items():
        below = getattr(command, "commands", None)
        yield from ((f"{name} {inner}", one) for inner, one in below.items()) if below else [(name, command)]


@pytest.mark.parametrize("name", [name for name, _ in _commands()])
def test_an_unknown_option_of_any_command_is_json_with_format_json(ttlaunch, name):
    answer = ttlaunch(f"{name} --nonsense --format json")
    assert (2, "") == (answer.status, answer.stderr)
    (found,) = json.loads(answer.stdout)["diagnostics"]
    assert ("P009", f"`ttlaunch {name}` has no option `--nonsense`") == (found["code"], found["message"])
