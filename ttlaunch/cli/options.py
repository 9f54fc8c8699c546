"""The options that several commands share, each defined once with its help text and completion."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ttlaunch import contract
from ttlaunch.app.run_spec import LOCAL, RunSpec
from ttlaunch.cli.completion import complete_settings
from ttlaunch.cli.words import is_command
from ttlaunch.diagnostics import Format
from ttlaunch.quick_dataclass import dataclass

if TYPE_CHECKING:
    from ttlaunch.app.execute import RunOptions


def complete_recipes(incomplete: str) -> list[str]:
    """Complete the names of recipes in the shell."""
    from ttlaunch.spec.recipe.discovery import list_recipes

    return [recipe.name for recipe in list_recipes(Path.cwd()) if recipe.name.startswith(incomplete)]


def complete_configurations(incomplete: str) -> list[str]:
    """Complete the names of configurations in the shell."""
    from ttlaunch.spec.topology.discovery import list_configurations

    return [found.name for found in list_configurations(Path.cwd()) if found.name.startswith(incomplete)]


def complete_engines(incomplete: str) -> list[str]:
    """Complete the names of engines in the shell."""
    from ttlaunch.engines.choose import ENGINES

    return [finder.key for finder in ENGINES if finder.key.startswith(incomplete)]


On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="NAME|DIR|slurm[:PARTITION]",
        help="Cluster: a configuration's name or folder, or hosts that Slurm gives.",
        autocompletion=complete_configurations,
    ),
]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="Training file instead of the recipe's own; - is standard input."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key, e.g. training_config.batch_size=16. Repeatable.",
        autocompletion=complete_settings,
    ),
]
SharingRanks = Annotated[int, typer.Option("--ranks", min=1, metavar="N", help="Ranks that share the model.")]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        min=2,
        metavar="N",
        help="Most tokens of a text; unless given, as in training, of a folder up to 4096.",
    ),
]
Exact = Annotated[
    Literal["auto", "on", "off"],
    typer.Option("--exact", help="The bits of training: auto: where possible; on: or refuse; off: faster, without."),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME[=VALUE]",
        help="Set a variable for all ranks, also on hosts; without a value, to that of this shell. Repeatable.",
    ),
]
Naive = Annotated[
    bool,
    typer.Option(
        "--naive",
        help="Train with the recipe's naive.py: its technique in 60 lines, without validations or checkpoints.",
    ),
]
Independent = Annotated[
    bool,
    typer.Option(
        "--independent",
        help="Each rank of a script is meant to train a model of its own: no error if ranks join no group of torch.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        "-n",
        min=1,
        metavar="N",
        help="World size, if the cluster does not fix it. Sets the number of workers where only one number fits.",
    ),
]
Elastic = Annotated[
    str | None,
    typer.Option(
        "--elastic",
        metavar="MIN:MAX",
        help="Let workers come and go: each step is made by MIN to MAX of them. The parameters are those of an undisturbed run.",
    ),
]
Audit = Annotated[
    str | None,
    typer.Option(
        "--audit",
        metavar="1/K",
        help="In every K-th step, each worker also computes the micro-batches of another one; a host that computes wrong is named.",
    ),
]
NprocPerNode = Annotated[
    str | None,
    typer.Option(
        "--nproc-per-node", "--nproc_per_node", metavar="N", help="Ranks on every host, as torchrun spells it."
    ),
]
Nnodes = Annotated[
    str | None,
    typer.Option("--nnodes", metavar="N", help="Number of hosts, as torchrun spells it; the hostfile decides."),
]
Standalone = Annotated[bool, typer.Option("--standalone", help="As torchrun spells it: all ranks run on this machine.")]
Nodes = Annotated[
    int | None, typer.Option("--nodes", min=1, metavar="N", help="With --on slurm: how many hosts to ask for.")
]
TimeLimit = Annotated[
    str | None,
    typer.Option("--time", metavar="TIME", help="With --on slurm: for how long, as minutes or hours:minutes:seconds."),
]
Gres = Annotated[
    str | None, typer.Option("--gres", metavar="GRES", help="With --on slurm: devices of each host, e.g. gpu:2.")
]
Account = Annotated[str | None, typer.Option("--account", metavar="NAME", help="With --on slurm: who pays.")]
Qos = Annotated[str | None, typer.Option("--qos", metavar="NAME", help="With --on slurm: the quality of service.")]
Warm = Annotated[
    bool,
    typer.Option(
        "--warm",
        help="Import torch and torch.distributed once on each host; each rank is a fork of the process that has.",
    ),
]
HangTimeout = Annotated[
    float | None,
    typer.Option(
        "--hang-timeout",
        min=1.0,
        metavar="SECONDS",
        help="End a run that makes no progress for this long. Default: 120 s, later ten times the slowest step.",
    ),
]
Hostfile = Annotated[Path | None, typer.Option("--hostfile", metavar="FILE", help="A hostfile instead of --on.")]
RankBindings = Annotated[
    Path | None,
    typer.Option(
        "--rank-bindings",
        "--rank-binding",
        "--rank-bindings-mapping",
        metavar="FILE",
        help="Rank bindings instead of --on. Without a hostfile, all ranks run on this machine.",
    ),
]
MpiArgs = Annotated[
    str | None,
    typer.Option(
        "--mpi-args", metavar="WORDS", help="Arguments for mpirun; --host and --hostfile among them choose the hosts."
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="What starts the ranks: agents, or for recipes and programs that use MPI openmpi or hydra. Default: the program decides.",
        autocompletion=complete_engines,
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="latest|RUN|PATH",
        help="Resume from the newest complete checkpoint of all runs, from that of one run, or from the one at a path.",
    ),
]
GraceSeconds = Annotated[
    float,
    typer.Option(
        "--grace",
        min=0,
        metavar="SECONDS",
        help="How long ranks may take after Ctrl-C or SIGTERM to finish the current step and save a checkpoint. 0 ends them at once.",
    ),
]
LeaseSeconds = Annotated[
    float,
    typer.Option(
        "--lease",
        min=2,
        metavar="SECONDS",
        help="How long ranks on another host keep running without contact to this machine. Then that host ends them.",
    ),
]
ShareWith = Annotated[
    str | None,
    typer.Option(
        "--share-with",
        metavar="GROUP",
        help="Let the members of a group read the run's folder, which otherwise only you can.",
    ),
]
TraceSteps = Annotated[
    int | None,
    typer.Option(
        "--trace-steps", min=1, metavar="N", help="Number of steps to trace, from the first; 20 with `--trace` alone."
    ),
]
ProfileSteps = Annotated[
    str | None,
    typer.Option(
        "--profile-steps",
        metavar="A-B",
        help="Record these steps with torch's profiler on every rank, for ui.perfetto.dev, and measure memory in the step after them.",
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        min=0,
        metavar="N",
        help="How often to restart from the newest checkpoint when a rank fails, a host is lost or the run hangs.",
    ),
]
Sinks = Annotated[
    list[str] | None,
    typer.Option(
        "--sink",
        metavar="SINK[=PLACE]",
        help="Export metrics during the run to tensorboard=DIR, wandb[=DIR], mlflow=DIR or prometheus=FILE, lines to "
        "loki=URL or loki-file=DIR, both to otlp=URL. Repeatable.",
    ),
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="The folder that holds the run folders.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="role=R|rank=N|host=H",
        help="Show only the output of these ranks, e.g. role=worker or rank=0-3,7. Repeatable. Log files keep all output.",
    ),
]
OutputFormat = Annotated[
    Format,
    typer.Option(
        "--format",
        help="full: with excerpts of your files; concise: one line per message; json; github: CI annotations.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also print assumptions and findings.")]
PlainFormat = Annotated[Format, typer.Option("--format", help="full, concise or json.")]
NamedRun = Annotated[
    str, typer.Argument(metavar="[RUN|latest]", help="A run's id, a part of it, or a path.", show_default=False)
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|FOLDER|SCRIPT",
        help="A recipe's name, a recipe's folder, or a Python script.",
        autocompletion=complete_recipes,
        show_default=False,
    ),
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Arguments of a script.", show_default=False)
]

_OF_A_RUN: dict[str, tuple[Any, Any]] = {
    "target": (Target, inspect.Parameter.empty),
    "arguments": (Arguments, None),
    "on": (On, LOCAL),
    "config_file": (ConfigFile, None),
    "overrides": (Overrides, None),
    "ranks": (Ranks, None),
    "elastic": (Elastic, None),
    "audit": (Audit, None),
    "naive": (Naive, False),
    "independent": (Independent, False),
    "env": (Env, None),
    "hostfile": (Hostfile, None),
    "rank_bindings": (RankBindings, None),
    "mpi_args": (MpiArgs, None),
    "engine": (Engine, None),
    "runs_dir": (RunsDir, Path("runs")),
    "resume": (Resume, None),
    "nproc_per_node": (NprocPerNode, None),
    "nnodes": (Nnodes, None),
    "standalone": (Standalone, False),
    "nodes": (Nodes, None),
    "time_limit": (TimeLimit, None),
    "gres": (Gres, None),
    "account": (Account, None),
    "qos": (Qos, None),
    "warm": (Warm, False),
    "trace_steps": (TraceSteps, None),
    "profile_steps": (ProfileSteps, None),
}
"""For each field of `RunSpec`, the argument or option that sets it, and its default."""
TORCHRUN = ("nproc_per_node", "nnodes", "standalone")
SLURM = ("nodes", "time_limit", "gres", "account", "qos")
_OF_EXECUTION: dict[str, tuple[Any, Any]] = {
    "grace": (GraceSeconds, 30.0),
    "sinks": (Sinks, None),
    "hang_timeout": (HangTimeout, None),
    "lease": (LeaseSeconds, contract.LEASE_S),
    "share_with": (ShareWith, None),
    "max_restarts": (MaxRestarts, 0),
}
"""For each field of `Execution`, the option that sets it, and its default."""
CLUSTER = ("on", "config_file", "overrides", "ranks", "hostfile", "rank_bindings", "mpi_args", "engine")


RUN = (
    *(
        "target",
        "arguments",
        *CLUSTER,
        "elastic",
        "audit",
        "naive",
        "independent",
        "env",
        "runs_dir",
        "resume",
        *TORCHRUN,
        *SLURM,
        "warm",
    ),
    *("trace_steps", "profile_steps"),
)
"""What describes a run that is executed, now or by Slurm."""


@dataclass(frozen=True)
class Execution:
    """How a run is executed, as options say it."""

    grace: float
    sinks: Sequence[str] | None
    hang_timeout: float | None
    lease: float
    share_with: str | None
    max_restarts: int

    def options(self, spec: RunSpec) -> "RunOptions":
        """Return the options of the run.

        Raises:
            LaunchError: The group to share it with cannot be used.
        """
        from ttlaunch.app.execute import RunOptions, group_id

        group = None if self.share_with is None else group_id(self.share_with)
        return RunOptions(spec.runs_dir, self.grace, (), self.hang_timeout, self.lease, share_with=group)


def asks_for(*fields: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that describe a run, and pass their values to the command as one `RunSpec`.

    The command has a parameter `spec`. In place of it, typer sees one parameter for each of the fields, in their order. If
    `arguments` is among the fields, `RunSpec.is_command` says whether the target followed `--`. In place of a parameter
    `execution`, typer sees the options of `Execution`.

    Args:
        fields: The fields of `RunSpec` that are keys of `_OF_A_RUN`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        typed = {"spec": _parameters({field: _OF_A_RUN[field] for field in fields})}
        if "execution" in signature.parameters:
            typed["execution"] = _parameters(_OF_EXECUTION)
        if "arguments" in fields:
            context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
            typed["spec"] = [context, *typed["spec"]]
        parameters = [one for known in signature.parameters.values() for one in typed.get(known.name, [known])]

        @wraps(command)
        def run(**given: Any) -> None:
            values: dict[str, Any] = {"target": None, **{field: given.pop(field) for field in fields}}
            for field in ("overrides", "arguments", "env"):
                values[field] = values.get(field) or ()
            if "arguments" in fields:
                values["is_command"] = is_command(given.pop("ctx"), values["target"], values["arguments"])
            if "execution" in typed:
                given["execution"] = Execution(**{name: given.pop(name) for name in _OF_EXECUTION})
            command(spec=RunSpec(**values), **given)

        # All parameters are keyword-only, so that a required one may follow those with defaults.
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        )
        return run

    return decorate


def _parameters(options: Mapping[str, tuple[Any, Any]]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=option, default=default)
        for name, (option, default) in options.items()
    ]
