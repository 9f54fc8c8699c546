"""Python imports this when a rank of a program starts: it has the rank's exceptions and its use of torch written down.

The shim puts this folder first on the rank's PYTHONPATH, with the path that the rank is to have in `TTLAUNCH_PYTHONPATH`, and the
file to write in `TTLAUNCH_EXCEPTIONS`. Both are removed here, so other processes that the rank starts get the environment that
they were meant to have: this file leaves no other trace. A `sitecustomize` of the user's or of the machine's is imported as if this one
were not there.
"""

import os
import sys

_STACKS_SIGNAL = 62  # as `contract.STACKS_SIGNAL`
_HIGH = 900


class NoMpiError(ImportError):
    """A rank that runs without MPI was to use it."""


class _WithoutMpi:
    """Refuses MPI in a rank that runs without it: each rank would be alone in a world of its own."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Raise if MPI itself is imported; otherwise leave the search to Python."""
        if name == "mpi4py.MPI":
            message = "this rank runs without MPI, and would be alone in a world of its own"
            raise NoMpiError(message, name=name)


def _begin() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [part for part in sys.path if part != folder]
    package = os.path.dirname(os.path.dirname(folder))
    warm = os.environ.get("TTLAUNCH_WARM")
    if warm:
        _fork_ranks(warm, package)
    path, records = os.environ.pop("TTLAUNCH_PYTHONPATH", None), os.environ.pop("TTLAUNCH_EXCEPTIONS", None)
    if path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = path
    if os.environ.pop("TTLAUNCH_NO_MPI", None):
        sys.meta_path.insert(0, _WithoutMpi())
    if sys.version_info >= (3, 9) and records:
        sys.path.insert(0, package)
        try:
            from ttlaunch.rank_exceptions.watch import ExceptionWatch
            from ttlaunch.torch_hooks.at_import import install
        finally:
            sys.path.remove(package)
        watch = ExceptionWatch(records, folder=os.getcwd())
        watch.take_hooks()
        watch.start()
        install(os.environ)
        _write_stacks_on_order(records)


def _write_stacks_on_order(records: str) -> None:
    """Have a signal write what all threads are doing to the rank's file of stacks, also while the main thread waits in C."""
    import faulthandler  # both are part of the interpreter's own file, or nearly so
    import fcntl

    folder, name = os.path.split(records)
    path = os.path.join(os.path.dirname(folder), "stacks", name.partition(".")[0] + ".txt")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        # A script that closes all descriptors up to some number, and opens files of its own then, must not find stacks in them.
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    finally:
        os.close(descriptor)
    faulthandler.register(_STACKS_SIGNAL, file=high, all_threads=True)


def _fork_ranks(order: str, package: str) -> None:
    """Become the process that forks the ranks; returns in them."""
    try:
        sys.path.insert(0, package)
        try:
            from ttlaunch.agent.forked_rank import become_warm
        finally:
            sys.path.remove(package)
    except BaseException as error:  # noqa: BLE001 - the program must not run in this process
        sys.stderr.write(f"start_ranks: {error!r}\n")
        os._exit(70)
    become_warm(order)


def _import_the_next() -> None:
    """Import the `sitecustomize` that Python would have found without this one; do nothing if there is none."""
    own = sys.modules.pop(__name__)
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401
    except ImportError as error:
        if getattr(error, "name", None) != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own)  # Python's import needs one


try:  # noqa: SIM105 - Python has not loaded contextlib yet
    _begin()
except Exception:  # noqa: BLE001, S110 - the rank's work is worth more than what is known about its exceptions
    pass
_import_the_next()
