"""`ttlaunch export`: write a run as YAML for Kubernetes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch import contract
from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import print_json, print_lines, print_text, show_diagnostics, write_file
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import PlainFormat, asks_for
from ttlaunch.diagnostics import (
    Diagnostic,
    Format,
    LaunchError,
    Source,
    did_you_mean,
    has_errors,
    listed,
    shown,
    usage_error,
    usage_mistake,
)

if TYPE_CHECKING:
    from ttlaunch.app.resolve import ResolvedSpec
    from ttlaunch.planning.kubernetes import PodRun
    from ttlaunch.spec.recipe.config import LoadedConfig

EXAMPLES = """\
[bold]ttlaunch export data_parallel --to mpijob --image registry.example/train:1 --hosts 2[/bold]   print an MPIJob for the MPI Operator

[bold]ttlaunch export train.py --to jobset --image registry.example/train:1 --hosts 2 --slots 8 --resource nvidia.com/gpu=8 --env HF_TOKEN --out job.yaml -- --lr 0.1[/bold]
"""
_RESOURCE = re.compile(r"[a-z0-9A-Z]([a-zA-Z0-9._/-]*[a-zA-Z0-9])?\Z")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?\Z")


@asks_for("target", "arguments", "config_file", "overrides", "ranks", "naive", "env")
def export(
    *,
    spec: RunSpec,
    to: Annotated[str, typer.Option("--to", metavar="jobset|mpijob", help="The kind of object to write.")],
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="Container image of all pods, with ttlaunch, MPI and sshd.")
    ],
    hosts: Annotated[int, typer.Option("--hosts", min=1, max=1000, metavar="N", help="Number of worker pods.")],
    slots: Annotated[
        int, typer.Option("--slots", min=1, max=1000, metavar="N", help="Ranks that may run in each worker pod.")
    ] = 1,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the job. Default: that of the recipe or script."),
    ] = None,
    resources: Annotated[
        list[str] | None,
        typer.Option(
            "--resource", metavar="NAME=QUANTITY", help="Limit of each worker, e.g. nvidia.com/gpu=8. Repeatable."
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Output file; without it, standard output.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file.")] = False,
    form: PlainFormat = Format.FULL,
) -> None:
    """Write a run as a JobSet or an MPIJob for Kubernetes, after checking that its ranks fit the pods.

    The file holds no value that looks like a secret: such variables are read from a Secret of the cluster.
    """
    from ttlaunch.planning.kubernetes import (
        TARGETS,
        PodRun,
        default_name,
        plan_jobset,
        plan_mpijob,
    )

    if to not in TARGETS:
        raise usage_error(
            f"`--to {shown(to)}` is not known; {listed(TARGETS)} was expected", *did_you_mean(to, TARGETS)
        )
    name = name or default_name(Path(str(spec.target)).name)
    limits, mistakes = _limits(resources or ())
    variables, secret, wrong = _variables(spec.env)
    mistakes += [*wrong, *_secrets_in_words(spec), *_wrong_words(spec, name=name, image=image)]
    if mistakes:
        raise LaunchError(mistakes)
    run = PodRun(name, image, hosts, slots, (), limits, variables, ())
    # Secrets are in the cluster, not in this shell, so ranks are planned without the variables.
    found = resolve(replace(spec, env=()), dialogue=TerminalDialogue(form), hosts=Source("--hosts", run.hostfile))
    if wrong := list(found.diagnostics) if has_errors(found.diagnostics) else _without_room(found, spec.ranks or 0):
        raise LaunchError(wrong)
    secret = list(dict.fromkeys([*secret, *_references(found.choice.loaded if found.choice else None)]))
    run = replace(run, command=_command(spec, [*variables, *secret]), secrets=secret)
    objects = (plan_jobset if to == "jobset" else plan_mpijob)(run)
    show_diagnostics(found.diagnostics, form=form)
    if write is not None:
        write_file(write, _text(run, to, objects).encode(), force=force)
    if form is Format.JSON:
        content = {"to": to, "name": name, "file": str(write) if write else None, "objects": objects, "secrets": secret}
        print_json({**content, "diagnostics": [one.as_json() for one in found.diagnostics]}, schema="export")
    elif write is None:
        print_text(_text(run, to, objects))
    else:
        print_lines([f"wrote {write}"])


def _without_room(found: "ResolvedSpec", ranks: int) -> list[Diagnostic]:
    """Report ranks of a script for which the pods have no slots; those of a recipe are compared by its plan."""
    if found.choice is not None or found.topology is None or ranks <= len(found.topology.slots):
        return []
    from ttlaunch.planning.room import more_ranks_than_slots

    return [more_ranks_than_slots(found.topology, ranks)]


def _wrong_words(spec: RunSpec, *, name: str, image: str) -> list[Diagnostic]:
    """Report a name or an image that no pod can have, and a training file that no pod can read."""
    from ttlaunch.planning.kubernetes import name_problem

    problem = name_problem(name)
    found = [usage_mistake(f"`--name {shown(name)}`: {problem}")] if problem else []
    if not image.strip() or not image.isprintable():
        found.append(usage_mistake(f"`--image {shown(image)}` is no image"))
    if spec.config_file == "-":
        found.append(usage_mistake("`-c -`: the pods have no standard input", "give a file of the image"))
    return found


def _limits(texts: Sequence[str]) -> tuple[dict[str, str], list[Diagnostic]]:
    limits: dict[str, str] = {}
    found: list[Diagnostic] = []
    for text in texts:
        name, _, quantity = text.partition("=")
        if _RESOURCE.match(name) and _QUANTITY.match(quantity):
            limits[name] = quantity
        else:
            message = f"`--resource {shown(text)}` is no resource with its quantity"
            found.append(usage_mistake(message, "such as `nvidia.com/gpu=8` or `memory=64Gi`"))
    return limits, found


def _secrets_in_words(spec: RunSpec) -> list[Diagnostic]:
    """Report what looks like a secret among the words that the YAML would keep."""
    from ttlaunch.planning.secrets import mask_arguments

    settings = [text for text in spec.overrides if contract.referred_variable(text.partition("=")[2]) is None]
    words = [*settings, str(spec.target), *spec.arguments]
    masked = [text for text, word in zip(mask_arguments(words), words, strict=True) if text != word]
    hint = "give it as a variable, `--env NAME`, whose value stays in a Secret of the cluster"
    return [
        usage_mistake(f"`{shown(text)}` looks like a secret, which the file would keep", hint, code="P056")
        for text in masked
    ]


def _variables(texts: Sequence[str]) -> tuple[dict[str, str], list[str], list[Diagnostic]]:
    """Divide the variables of `--env` into values that the file may hold and names whose values come from a Secret."""
    from ttlaunch.planning.secrets import is_secret
    from ttlaunch.spec.topology.variables import given_variables

    referred = {text.partition("=")[0]: _referred(text) for text in texts}
    unknown_here = {name: "" for name in referred.values() if name is not None}
    given, found = given_variables(texts, environment=unknown_here)
    secret = [name for name, value in given.items() if referred[name] is not None or is_secret(name, value)]
    found = [one for one in found if has_errors([one])]
    return {name: value for name, value in given.items() if name not in secret}, secret, found


def _referred(text: str) -> str | None:
    name, equals, value = text.partition("=")
    return contract.referred_variable(value) if equals else name


def _references(loaded: "LoadedConfig | None") -> list[str]:
    """Return the variables that the training file refers to as `env:NAME`."""
    named = (contract.referred_variable(value) for _, value in loaded.strings()) if loaded else ()
    return [name for name in named if name is not None]


def _command(spec: RunSpec, variables: Sequence[str]) -> list[str]:
    """Return the launcher's command line: the same run, with the hostfile of the pods."""
    from ttlaunch.planning.kubernetes import HOSTFILE_FOLDER

    target = str(spec.target)
    words = ["ttlaunch", "run", *([] if spec.is_command else [target]), "--hostfile", f"{HOSTFILE_FOLDER}/hostfile"]
    words += ["-c", spec.config_file] if spec.config_file else []
    words += [word for setting in spec.overrides for word in ("--set", setting)]
    words += ["--ranks", str(spec.ranks)] if spec.ranks else []
    words += ["--naive"] if spec.naive else []
    words += [word for name in variables for word in ("--env", name)]
    rest = [*([target] if spec.is_command else []), *spec.arguments]
    return [*words, *(["--", *rest] if rest else [])]


def _text(run: "PodRun", to: str, objects: Sequence[Mapping[str, Any]]) -> str:
    """Return the file: comments with the commands that make what the objects refer to, and the objects."""
    from ttlaunch.planning.kubernetes import render_yaml

    lines = ["No server has run this file. See docs/how-to/export-to-kubernetes.md for what the image needs."]
    if to == "jobset":
        lines += [f"ssh-keygen -q -t ed25519 -N '' -f {run.name}-key"]
        files = f"--from-file=ssh-privatekey={run.name}-key --from-file=ssh-publickey={run.name}-key.pub"
        lines += [f"kubectl create secret generic {run.name}-ssh {files}"]
    if run.secrets:
        lines += [f"kubectl create secret generic {run.name}-env --from-env-file=FILE"]
        lines += [f"FILE has a line NAME=VALUE for each of: {' '.join(run.secrets)}"]
    return "".join(f"# {line}\n" for line in lines) + render_yaml(objects)
