"""Ask git about a folder of a repository without running a program that the repository names.

The configuration and the attributes of a repository name programs that git runs: fsmonitor, filters, textconv, hooks,
helpers that fetch missing objects. A stranger's archive may contain such a configuration, and no option of git turns all
of them off. Git therefore reads the index and the objects here through a repository folder of our own, which has its
own, empty configuration. Only `git rev-parse` reads the repository's configuration. It runs no program, finds the parts
of the repository, and refuses a repository that belongs to another user.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_TIMEOUT_S = 60.0
_KEPT = ("GIT_CONFIG", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM")
"""Variables of git that are the user's own settings; all others could mean another repository."""

_SAFELY = ("git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "safe.bareRepository=explicit")
_OTHER_HASH = "sha256"


class GitError(Exception):
    """Git cannot answer; the text is its message."""


def top_of_repository(folder: bytes) -> bytes | None:
    """Return the nearest folder with a `.git`: this one or one above it; None if there is none."""
    here = Path(os.fsdecode(folder))
    tops = (above for above in (here, *here.parents) if os.path.lexists(above / ".git"))
    return next((os.fsencode(top) for top in tops), None)


class Repository:
    """A git repository, seen from one of its folders.

    Attributes:
        top: The root of its work tree.
    """

    def __init__(self, folder: bytes, own: bytes, *, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._user = {name: value for name, value in environment.items() if _is_kept(name)} | {"LC_ALL": "C"}
        parts = ("--absolute-git-dir", "--git-common-dir", "--show-toplevel", "--show-object-format")
        lines = _run(folder, "rev-parse", *parts, environment=self._user).split(b"\n")
        if len(lines) != len(parts) + 1:
            raise GitError("the name of a folder of the repository has a line break")
        git, common, self.top = (os.path.join(folder, line) for line in lines[:3])
        if not (folder + b"/").startswith(self.top.rstrip(b"/") + b"/"):
            raise GitError(f"its work tree is {os.fsdecode(self.top)}")
        _make_own_folder(own, git=git, common=common, object_format=os.fsdecode(lines[3]))
        self._own = {"GIT_DIR": os.fsdecode(own), "GIT_WORK_TREE": os.fsdecode(self.top), "GIT_OPTIONAL_LOCKS": "0"}
        # Objects that the repository lacks are not fetched: no protocol is allowed.
        self._own |= {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}
        # Where not even the user's own settings count: filters that they define would run on a stranger's files.
        self._without_user = {"HOME": os.fsdecode(own), "XDG_CONFIG_HOME": os.fsdecode(own), "GIT_CONFIG_NOSYSTEM": "1"}

    def head(self) -> str | None:
        """Return the id of the current commit; None before the first commit."""
        try:
            answer = _run(self._folder, "rev-parse", "--quiet", "--verify", "HEAD", environment=self._user)
        except GitError:
            return None
        return answer.decode("ascii", "replace").strip()

    def ask(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """Return what a git command prints that only reads the index and the names of files.

        The command obeys the user's own settings, such as `core.excludesFile`.

        Raises:
            GitError: If it fails.
        """
        return _run(self._folder, *arguments, environment=self._user | self._own, stdin=stdin)

    def differences(self, commit: str, *arguments: str, without: Sequence[bytes] = (), timeout_s: float) -> bytes:
        """Return what `git diff-index` prints about the files of the work tree that differ from a commit.

        Args:
            commit: Its id.
            arguments: The form of the output, such as `--patch`.
            without: Paths to leave out, relative to `top`.
            timeout_s: How long git may take.

        Raises:
            GitError: If it fails.
        """
        user = {name: value for name, value in self._user.items() if not name.startswith("GIT_")}
        # `dirty`: to look for changes in a submodule, git would run `git status` there, with the submodule's configuration.
        safely = ("--no-renames", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
        paths: Sequence[str | bytes] = ("--", ".", *(b":(exclude,literal)" + path for path in without))
        environment = user | self._own | self._without_user
        return _run(
            self.top, "diff-index", *arguments, *safely, commit, *paths, environment=environment, timeout_s=timeout_s
        )


@contextmanager
def open_repository(folder: bytes, *, environment: Mapping[str, str]) -> Iterator[Repository]:
    """Yield the repository that a folder belongs to.

    Raises:
        GitError: If there is none, if git does not trust it, or if there is no git.
    """
    with tempfile.TemporaryDirectory(prefix="ttlaunch-git-") as own:
        yield Repository(os.path.realpath(folder), os.fsencode(own), environment=environment)


def _is_kept(name: str) -> bool:
    return not name.startswith("GIT_") or name.startswith(_KEPT)


def _make_own_folder(own: bytes, *, git: bytes, common: bytes, object_format: str) -> None:
    """Make a repository folder with the index and objects of another one, and without its configuration and hooks."""
    os.mkdir(os.path.join(own, b"refs"))
    config = "[core]\n\trepositoryFormatVersion = 1\n\tbare = false\n"
    if object_format == _OTHER_HASH:
        config += f"[extensions]\n\tobjectFormat = {_OTHER_HASH}\n"
    Path(os.fsdecode(own), "config").write_text(config, encoding="ascii")
    Path(os.fsdecode(own), "HEAD").write_text("ref: refs/heads/none\n", encoding="ascii")
    for part, folder in ((b"index", git), (b"objects", common), (b"info", common)):
        os.symlink(os.path.join(folder, part), os.path.join(own, part))
    shared = [name for name in os.listdir(git) if name.startswith(b"sharedindex.")]  # the rest of a split index
    for name in shared:
        os.symlink(os.path.join(git, name), os.path.join(own, name))


def _run(
    folder: bytes,
    *arguments: str | bytes,
    environment: Mapping[str, str],
    stdin: bytes = b"",
    timeout_s: float = _TIMEOUT_S,
) -> bytes:
    try:
        answer = subprocess.run(
            [*_SAFELY, *arguments],
            cwd=folder,
            env=environment,
            input=stdin,
            capture_output=True,
            check=False,
            timeout=timeout_s,
        )
    except FileNotFoundError as error:
        raise GitError("there is no git") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise GitError(str(error)) from error
    if answer.returncode:
        lines = answer.stderr.decode("utf-8", "replace").strip().splitlines() or [f"status {answer.returncode}"]
        raise GitError(lines[0].removeprefix("fatal: "))
    return answer.stdout
