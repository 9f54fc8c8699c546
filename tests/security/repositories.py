"""A stranger's git repository in which every setting and attribute that names a program names one that leaves a trace."""

import os
import subprocess

from tests.hosts.sync.files import git

HOOKS = (
    "applypatch-msg",
    "fsmonitor-watchman",
    "post-checkout",
    "post-index-change",
    "pre-auto-gc",
    "pre-commit",
    "reference-transaction",
    "update",
)


def hostile_repository(folder, trace):
    """Make a repository with changed, unchanged, missing and ignored files; every program of it makes the file `trace`."""
    program = folder.parent / "program"
    program.write_text(f"#!/bin/sh\ntouch '{trace}'\ncat\n")
    program.chmod(0o755)
    git(folder, "init", "-q")
    inner = folder / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    for name in ("inner/code.py", "changed.py", "same.py", "gone.py", "staged.py"):
        (folder / name).write_text("x = 1\n" * 30)
    (folder / ".gitignore").write_text("*.log\n")
    (folder / ".gitattributes").write_text("* filter=f diff=d merge=m\n")
    (folder / "inner/.gitattributes").write_text("* filter=f diff=d merge=m\n")
    for place in (inner, folder):
        git(place, "add", "--all")
        git(place, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first")
    (folder / "empty/deep").mkdir(parents=True)
    (folder / "new.py").write_text("new = 1\n")
    (folder / "gone.py").unlink()
    (folder / "staged.py").write_text("x = 3\n")
    git(folder, "add", "staged.py")
    for name in ("changed.py", "inner/code.py"):
        (folder / name).write_text("x = 2\n" * 30)
    os.utime(folder / "same.py", (1, 1))  # git must compare its content, which is when filters run
    for place in (folder, inner):
        _arm(place, program)
    return folder


def _arm(folder, program):
    settings = folder / ".git/config"
    included = folder / ".git/more"
    hooks = folder / ".git/hooks"
    hooks.mkdir(exist_ok=True)
    for name in HOOKS:
        (hooks / name).unlink(missing_ok=True)
        (hooks / name).symlink_to(program)
    included.write_text(f"[core]\n\tfsmonitor = {program}\n")
    settings.write_text(
        f"""[core]
	repositoryFormatVersion = 1
	fsmonitor = {program}
	hooksPath = {hooks}
	sshCommand = {program}
	pager = {program}
	editor = {program}
	askPass = {program}
	gitProxy = {program}
	alternateRefsCommand = {program}
	untrackedCache = true
[extensions]
	partialClone = origin
[remote "origin"]
	url = ext::{program}
	promisor = true
	partialCloneFilter = blob:none
	uploadPack = {program}
[protocol]
	allow = always
[protocol "ext"]
	allow = always
[include]
	path = {included}
[diff]
	external = {program}
[diff "d"]
	command = {program}
	textconv = {program}
[filter "f"]
	clean = {program}
	smudge = {program}
	required = true
[merge "m"]
	driver = {program}
[credential]
	helper = !{program}
[gpg]
	program = {program}
[pager]
	ls-files = {program}
	diff-index = {program}
	rev-parse = {program}
[alias]
	ls-files = !{program}
	diff-index = !{program}
	rev-parse = !{program}
	check-ignore = !{program}
[gc]
	auto = 1
""",
        encoding="utf-8",
    )


def lose_object(folder, name):
    """Remove the object of a committed file, as in a partial clone: git would fetch it through a program."""
    answer = subprocess.run(["git", "-C", folder, "rev-parse", f":{name}"], check=True, capture_output=True, text=True)
    object_id = answer.stdout.strip()
    (folder / ".git/objects" / object_id[:2] / object_id[2:]).unlink()
