"""The training configuration: defaults, the file, `--set` on top, and the resolved file that loads again."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import Field

from ttlaunch.diagnostics import render
from ttlaunch.recipe import Layout, Problem, Recipe, Section, TrainingFile
from ttlaunch.spec.recipe.config import check_config, load_config, naive_config, render_commented, render_resolved
from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe
from ttlaunch.spec.recipe.sections import TrainingConfig

STAGES = "multihost_config.pipeline_parallel_config"
RECIPES = ["fabric_minimal", "hierarchical_parallel", "pipeline_parallel"]


def declared(recipe):
    return load_recipe(find_recipe(recipe, working_folder=Path("/")))


@pytest.fixture
def load(here):
    """`load(text, overrides…)`: the configuration of a recipe, and its diagnostics as text."""

    def read(text, *overrides, recipe="hierarchical_parallel"):
        path = None
        if text is not None:
            path = here / "train.yaml"
            path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_config(declared(recipe), path, name="train.yaml", overrides=overrides)

    return read


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_resolved_file_loads_again_and_is_the_same(load, recipe):
    text = Path(find_recipe(recipe, working_folder=Path("/")).train_file).read_text()
    first = load(text, "multihost_config.socket_type=mpi", recipe=recipe)
    again = load(render_resolved(declared(recipe), first), recipe=recipe)
    assert render(again.diagnostics) == ""
    assert again.config == first.config


def test_a_resolved_pipeline_of_any_length_agrees_with_itself(load):
    stages = "multihost_config: {pipeline_parallel_config: {blocks_per_rank: [1, 1, 1]}}\ntransformer_config: {num_blocks: 3}\n"
    recipe = declared("pipeline_parallel")
    again = load(render_resolved(recipe, load(stages, recipe="pipeline_parallel")), recipe="pipeline_parallel")
    assert [] == check_config(recipe, again, recipe.layouts[-1])


PIPELINE_OF_SIX = "multihost_config: {pipeline_parallel_config: {num_blocks: 6, blocks_per_rank: [4, 2]}}\n"


def mistakes(loaded):
    recipe = declared("pipeline_parallel")
    return [one.code for one in [*loaded.diagnostics, *check_config(recipe, loaded, recipe.layouts[-1])]]


@pytest.mark.parametrize(
    "text",
    [
        PIPELINE_OF_SIX,
        PIPELINE_OF_SIX + "transformer_config: {embedding_dim: 32}\n",
        PIPELINE_OF_SIX + "transformer_config: {num_blocks: 6}\n",
        "transformer_config: {num_blocks: 6}\n" + PIPELINE_OF_SIX.replace("num_blocks: 6, ", ""),
        "transformer_config: {num_blocks: 6}\n" + PIPELINE_OF_SIX.replace("num_blocks: 6", "num_blocks: null"),
    ],
)
def test_the_number_of_blocks_needs_one_of_its_two_keys(load, text):
    loaded = load(text, recipe="pipeline_parallel")
    assert ([], 6) == (mistakes(loaded), loaded.checked.transformer_config.num_blocks)
    again = load(render_resolved(declared("pipeline_parallel"), loaded), recipe="pipeline_parallel")
    assert ([], 6) == (mistakes(again), again.checked.transformer_config.num_blocks)


def test_two_numbers_of_blocks_contradict_each_other_wherever_they_are_written(load):
    both = load(PIPELINE_OF_SIX + "transformer_config: {num_blocks: 4}\n", recipe="pipeline_parallel")
    option = load(PIPELINE_OF_SIX, "transformer_config.num_blocks=4", recipe="pipeline_parallel")
    assert ["C015"] == mistakes(both) == mistakes(option)


def test_the_blocks_of_a_model_come_from_the_line_that_gives_them(load):
    loaded = load(PIPELINE_OF_SIX, recipe="pipeline_parallel")
    assert "train.yaml:1" == loaded.origin("transformer_config.num_blocks")
    assert "default" == load("", recipe="pipeline_parallel").origin("transformer_config.num_blocks")


def test_the_blocks_of_the_built_in_pipeline_are_changed_with_two_values(load):
    text = find_recipe("pipeline_parallel", working_folder=Path("/")).train_file.read_text()
    changes = ("transformer_config.num_blocks=6", f"{STAGES}.blocks_per_rank=[3, 3]")
    assert [] == mistakes(load(text, *changes, recipe="pipeline_parallel"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipes_own_file_has_no_mistakes(load, recipe):
    found = find_recipe(recipe, working_folder=Path("/"))
    loaded = load(found.train_file.read_text(), recipe=recipe)
    assert render(loaded.diagnostics) == ""


@pytest.mark.parametrize(
    ("value", "comment"),
    [("7  # why", "why"), ('"a # b"  # c # d', "c # d"), ("{0: 2}  # e", "e"), ("a#b", ""), ("[1,\n  2]  # f", "")],
)
def test_a_comment_is_what_stands_behind_a_value(load, value, comment):
    assert load(f"training_config:\n  steps: {value}\n  seed: 3  # other\n").comment("training_config.steps") == comment


def test_a_commented_file_names_the_choices_that_a_description_leaves_out_and_quotes_only_what_has_to_be(load):
    loaded = load("training_config:\n  data_path: 'yes'\n  response_template: '- x'\n")
    text = render_commented(declared("hierarchical_parallel"), loaded)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "optimizer: adamw # adamw, sgd: update rule" in lines
    assert "dropout_prob: 0.0 # share of activations dropped while training" in lines
    assert load(text).config == loaded.checked


def test_a_commented_file_says_what_each_section_and_key_is(load):
    lines = render_commented(
        declared("zero"), load("zero_config:\n  stage: 1  # the least\n", recipe="zero")
    ).splitlines()
    said = {line.partition("#")[0].strip(): line.partition("# ")[2] for line in lines if line}
    assert ("What the workers share instead of keeping it whole.", "the least") == (
        said["zero_config:"],
        said["stage: 1"],
    )
    assert TrainingConfig.__doc__.partition("\n")[0] == said["training_config:"]
    assert said["optimizer: adamw"].endswith(TrainingConfig.model_fields["optimizer"].description)
    assert 1 == len({line.index("#") for line in lines if line})


def test_every_resolved_value_says_where_it_came_from(load):
    loaded = load("training_config:\n  steps: 7\n  seed: 3\n", "training_config.seed=4", "device_config={}")
    lines = render_resolved(declared("hierarchical_parallel"), loaded).splitlines()
    assert "  steps: 7  # train.yaml:2" in lines
    assert "  seed: 4  # --set" in lines
    assert "  batch_size: 16  # default" in lines


@pytest.mark.parametrize("text", ["a: b", "- x", "# no", "tab\there", "ü", "'", "null", " ", "1e3", "yes", "a\\nb"])
def test_a_text_value_survives_being_resolved(load, text):
    quoted = '"' + text.replace("\t", "\\t") + '"'
    loaded = load(f"training_config:\n  data_path: {quoted}\n")
    expected = loaded.checked.training_config.data_path
    again = load(render_resolved(declared("hierarchical_parallel"), loaded))
    assert again.checked.training_config.data_path == expected


def test_every_text_of_a_resolved_file_is_quoted_and_nothing_else_is(load):
    lines = render_resolved(declared("zero"), load(None, recipe="zero")).splitlines()
    for line in ('optimizer: "adamw"', "steps: 100", "data_path: null", "use_clip_grad_norm: true"):
        assert f"  {line}  # default" in lines


@pytest.mark.parametrize(
    "text",
    [
        b"training_config:\r\n  steps: 7\r\n",
        b"\xef\xbb\xbftraining_config:\n  steps: 7\n",
        b"training_config: {steps: 7}",
    ],
    ids=["crlf", "bom", "flow"],
)
def test_files_of_other_editors_are_read(load, text):
    assert load(text).checked.training_config.steps == 7


def test_no_file_means_defaults(load):
    assert load(None).checked.training_config.steps == 100


def test_the_last_set_wins_and_other_keys_stay(load):
    loaded = load("training_config: {steps: 7, seed: 3}", "training_config.steps=8", "training_config.steps=9")
    assert (loaded.checked.training_config.steps, loaded.checked.training_config.seed) == (9, 3)


def test_set_may_make_a_section_that_the_file_lacks(load):
    loaded = load("training_config: {steps: 7}", "multihost_config.num_workers=5")
    assert loaded.checked.multihost_config.num_workers == 5


def test_set_may_replace_a_whole_section(load):
    loaded = load("training_config: {steps: 7, seed: 3}", "training_config={steps: 8}")
    assert (loaded.checked.training_config.steps, loaded.checked.training_config.seed) == (8, 0)


def test_set_without_a_value_means_null(load):
    assert (
        load("training_config: {num_epochs: 2}", "training_config.num_epochs=").checked.training_config.num_epochs
        is None
    )


def test_set_keeps_what_follows_the_first_equals_sign(load):
    assert load(None, "training_config.data_path=a=b").checked.training_config.data_path == "a=b"


def test_values_point_at_their_places(load):
    loaded = load("training_config:\n  steps: 7\n", "training_config.seed=4")
    assert [str(loaded.span(f"training_config.{key}")) for key in ("steps", "seed", "batch_size")] == [
        "train.yaml:2:10",
        "--set:1:22",
        "None",
    ]


def test_several_mistakes_of_file_and_set_are_told_at_once(load):
    """D17: keys and types of `--set` are checked like those of a file, with the key that was meant."""
    assert 16 == load(None, "training_config.batch_size=16").checked.training_config.batch_size
    loaded = load("training_config: {steps: 0}", "training_config.sed=4", "nonsense", "training_config.batch_size=many")
    assert sorted(d.code for d in loaded.diagnostics) == ["C004", "C005", "C005", "C017"]
    (unknown,) = [diagnostic for diagnostic in loaded.diagnostics if diagnostic.code == "C004"]
    assert ("did you mean `seed`?",) == unknown.hints


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{learning_rate: 5.0e3}", "`learning_rate` is 5000; adamw is not known to train above 1"),
        ("{learning_rate: 500, optimizer: sgd}", "`learning_rate` is 500; sgd is not known to train above 100"),
        ("{learning_rate: 0.01, weight_decay: 10}", "`weight_decay` takes 10% off every matrix in every step"),
        ("{epsilon: 1.0e8}", "`epsilon` is 1e+08, which hides the second moment of every gradient"),
        ("{epsilon: 1.0e8, optimizer: sgd}", None),
        ("{learning_rate: 1.0, weight_decay: 0.05}", None),
    ],
)
def test_a_rate_with_which_nothing_learns_is_a_warning(load, text, message):
    recipe = declared("hierarchical_parallel")
    found = check_config(recipe, load(f"training_config: {text}\n"), recipe.layouts[-1])
    assert [("C028", "warning", message)][: message is not None] == [(d.code, d.severity, d.message) for d in found]


def test_strings_are_found_at_any_depth_with_their_keys(load):
    strings = dict(load("training_config: {data_path: book.txt}\n").strings())
    assert strings["training_config.data_path"] == "book.txt"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("type: cosine, warmup_steps: 10, hold_steps: 40", "warm-up and hold take all 50 steps"),
        ("type: linear, warmup_steps: 60", "warm-up and hold take all 50 steps"),
        ("type: linear, warmup_steps: 10, hold_steps: 39", None),
        ("type: constant, warmup_steps: 10, hold_steps: 40", None),
    ],
)
def test_a_rate_that_never_falls_is_a_warning(load, schedule, message):
    loaded = load(f"training_config: {{steps: 50}}\nscheduler_config: {{{schedule}}}\n")
    recipe = declared("hierarchical_parallel")
    found = check_config(recipe, loaded, recipe.layouts[0])
    expected = [("C032", "warning", f"the learning rate never falls: {message}")][: message is not None]
    assert expected == [(d.code, d.severity, d.message) for d in found]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training_config.response_template", "''"),
        ("training_config.instruction_template", "5"),
        ("training_config.early_stop_patience", "0"),
        ("training_config.early_stop_min_delta", "-0.1"),
        ("training_config.log_layer_grad_norms", "often"),
        ("training_config.precision", "fp8"),
        ("training_config.activation_checkpointing", "3"),
        ("scheduler_config.hold_steps", "-1"),
        ("loss_scale_config.initial_power", "101"),
        ("loss_scale_config.growth_interval", "0"),
        ("loss_scale_config.min_power", "-25"),
        ("loss_scale_config.max_power", "0.5"),
    ],
)
def test_a_value_out_of_bounds_is_one_mistake_at_its_place(load, key, value):
    loaded = load(None, f"{key}={value}")
    (diagnostic,) = loaded.diagnostics
    assert "C005" == diagnostic.code
    assert key.split(".")[1] in diagnostic.message


class Own(Section):
    rate: int = Field(description="the rate")


class ConfigOfOwn(TrainingFile):
    own_config: Own


def about_absent_stages(_config, _layout):
    """A rule about a key of a section that there is not."""
    yield Problem("C015", "no stages", f"{STAGES}.replicas", "here", others=(("own_config.rate", "that"),))


LAYOUT = Layout("a", trainer=1)
OWN = Recipe(summary="", config=ConfigOfOwn, layouts=[LAYOUT], checks=[about_absent_stages])


@pytest.mark.parametrize(
    ("text", "report"),
    [
        (None, "error[C006]: `own_config` is missing in the training file\n --> defaults:1:1\n"),
        (b"own_config: {}", "error[C006]: `rate` is missing in `own_config`\n --> -:1:1\n"),
        (b"[1]", "error[C005]: - is not a training file; keys and values were expected\n --> -:1:1\n"),
    ],
    ids=["no file", "standard input", "a list"],
)
def test_a_mistake_has_a_place_whether_it_stands_in_a_file_or_not(text, report):
    assert render(load_config(OWN, None, standard_input=text).diagnostics).startswith(report)


def test_a_problem_with_a_key_of_an_absent_section_points_at_the_other_key():
    loaded = load_config(OWN, None, standard_input=b"own_config: {rate: 4}\n")
    (found,) = check_config(OWN, loaded, OWN.layouts[0])
    assert (None, ()) == (found.primary, found.notes)
    assert [("that", "-", 1, 20, 1)] == [
        (label.text, label.span.source.name, label.span.line, label.span.column, label.span.length)
        for label in found.secondary
    ]


@pytest.mark.parametrize(
    ("key", "text", "column"),
    [
        ("own_config", b"own_config: {rate: 4}", 1),
        ("own_config.rate", b"own_config: {rate: 4}", 14),
        (f"{STAGES}.replicas", b"multihost_config: {pipeline_parallel_config: {replicas: 2}}", 47),
    ],
)
def test_a_key_that_nothing_reads_is_marked_at_any_depth_where_it_is_given(key, text, column):
    recipe = replace(OWN, unread=[key, "data_config.seed"])
    (found,) = [one for one in load_config(recipe, None, standard_input=text).diagnostics if one.code == "C018"]
    assert (f"nothing in this recipe reads `{key}`", (f"remove `{key.rpartition('.')[2]}`",)) == (
        found.message,
        found.hints,
    )
    assert ("set, but without effect", column) == (found.primary.text, found.primary.span.column)


def test_a_check_that_names_a_key_of_no_section_is_reported_with_its_line():
    def misspelled(_config, _layout):
        yield Problem("C015", "too many", "own_config.rates", "here", others=(("own_config", "all"),))

    recipe = replace(OWN, checks=[misspelled])
    problem, mistake = check_config(recipe, load_config(OWN, None, standard_input=b"own_config: {rate: 4}"), LAYOUT)
    assert ("C015", "too many") == (problem.code, problem.message)
    key = "a check of the recipe names `own_config.rates`, which is no key of the configuration"
    assert ("P006", f"{key}; did you mean `own_config.rate`?") == (mistake.code, mistake.message)
    assert (f"the check is `misspelled`, {__file__}:{misspelled.__code__.co_firstlineno}",) == mistake.notes


def test_the_naive_form_has_the_same_configuration_without_checkpoints():
    recipe = declared("zero")
    loaded = load_config(recipe, None, overrides=["checkpoint_config.interval=7", "training_config.steps=9"])
    plain, found = naive_config("zero", recipe, loaded)
    assert (None, 9, []) == (plain.config.checkpoint_config.interval, plain.config.training_config.steps, found)
    assert loaded.config.checkpoint_config.keep == plain.config.checkpoint_config.keep
    assert (7, loaded.root) == (loaded.config.checkpoint_config.interval, plain.root)
    loaded = load_config(recipe, None, overrides=["transformer_config.tie_embeddings=true"])
    plain, (refused,) = naive_config("zero", recipe, loaded)
    assert plain.config is None
    assert (
        "C090",
        "`transformer_config.tie_embeddings` is `true`; the naive form of `zero` trains only with `false`",
    ) == (
        refused.code,
        refused.message,
    )
    assert ("`--set transformer_config.tie_embeddings=false`, or leave `--naive` out",) == refused.hints
    assert ("expected `false`", 35) == (refused.primary.text, refused.primary.span.column)
