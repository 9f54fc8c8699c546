"""Changes what a test host sees in its file system: covered files, small disks, folders that cannot be written."""

import shlex
import subprocess
from pathlib import Path

COVERS = "/run/covers"


def cover(keeper, path, *, text, mode):
    """Show a file with this text instead of the one at `path`; for a link, instead of the file that it leads to."""
    folder = Path(f"{keeper.root()}{COVERS}")
    folder.mkdir(exist_ok=True)
    name = path.strip("/").replace("/", "-")
    (folder / name).write_text(text, encoding="utf-8")
    (folder / name).chmod(mode)
    _shell(keeper, "mount --bind {} {}", f"{COVERS}/{name}", path)


def uncover(keeper, path):
    _shell(keeper, "umount {}", path)


def set_read_only(keeper, path, *, read_only):
    """Refuse writes below `path`, or allow them again. A folder that is no mount yet is mounted on itself."""
    option = "ro" if read_only else "rw"
    _shell(keeper, "mountpoint -q {0} || mount --bind {0} {0}; mount -o remount,bind,{1} {0}", path, option)


def put_small_disk(keeper, path, *, size_mb):
    """Mount an empty disk at `path`; an .ssh folder that it would hide is copied, so that logging in still works."""
    script = (
        "set -e; new=$(mktemp -d /run/disk.XXXXXX); mode=$(stat -c %a:%u:%g {0} 2>/dev/null || echo 755:0:0); "
        "mkdir -p {0}; mount -t tmpfs -o size={1}m disk $new; chmod ${{mode%%:*}} $new; chown ${{mode#*:}} $new; "
        "if [ -d {0}/.ssh ]; then cp -a {0}/.ssh $new; fi; mount --move $new {0}; rmdir $new"
    )
    _shell(keeper, script, path, str(size_mb))


def _shell(keeper, script, *words):
    ended = subprocess.run(
        keeper.argv("sh", "-c", script.format(*map(shlex.quote, words))),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"{script.format(*words)}: {ended.stderr.strip()}")
