"""Files to copy, and what became of them."""

import os
import stat
import subprocess


def git(folder, *words):
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def tree(folder):
    """All that is in a folder: for each path its rights and content, its target, or nothing for a folder."""
    found = {}
    root = os.fsencode(folder)
    for where, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(where, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                value = os.readlink(path)
            elif stat.S_ISDIR(mode):
                value = None
            else:
                with open(path, "rb") as file:
                    value = oct(mode & 0o777), file.read()
            found[os.path.relpath(path, root)] = value
    return found
