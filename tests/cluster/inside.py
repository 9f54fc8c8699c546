"""Becomes one machine of a test cluster: takes fresh namespaces, lays out the machine's file system, and stays alive.

Started by `keeper.py` as a program of its own, with one JSON argument that says which kind of machine to be. It answers
`ready PID`, where PID is a process inside the machine's namespaces, and lives until its standard input ends. The owner
holds the other end and never writes, so that a machine cannot outlive the tests, however they end.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_PIDS, NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
READ_ONLY, REMOUNT, BIND, MOVE, RECURSIVE, PRIVATE = 1, 32, 4096, 8192, 16384, 1 << 18
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""

KEPT = ("root", "home", "srv", "opt", "mnt", "var")
"""The folders of a host that lie on its disk and survive a power cut."""

PERSONAL = ("passwd", "group", "shadow", "hosts", "hostname")
"""The files in /etc that every host has for itself."""

libc = ctypes.CDLL(None, use_errno=True)


def checked(result, what):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags):
    checked(libc.unshare(flags), "unshare")


def join_mounts(pid):
    descriptor = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    checked(libc.setns(descriptor, NEW_MOUNTS), f"setns to the mounts of {pid}")
    os.close(descriptor)


def mount(source, target, *, kind=None, flags=0, options=None):
    source, target, kind, options = (
        None if item is None else os.fsencode(item) for item in (source, target, kind, options)
    )
    checked(libc.mount(source, target, kind, ctypes.c_ulong(flags), options), f"mount {source} on {target}")


def mount_tmpfs(target, options):
    Path(target).mkdir(parents=True, exist_ok=True)
    mount("tmpfs", target, kind="tmpfs", options=options)


def bind(source, target, *, read_only=False):
    mount(source, target, flags=BIND | RECURSIVE)
    if read_only:
        mount(None, target, flags=BIND | REMOUNT | READ_ONLY)


def bind_folder(source, target, *, read_only=False):
    Path(target).mkdir(parents=True, exist_ok=True)
    bind(source, target, read_only=read_only)


def say_ready(pid):
    sys.stdout.write(f"ready {pid}\n")
    sys.stdout.flush()


def wait_for_the_end(*others):
    """Return when the owner is gone, or when one of the other descriptors can be read."""
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    for descriptor in others:
        waiting.register(descriptor, select.POLLIN)
    waiting.poll()


def be_the_rack(spec):
    """Hold what hosts are plugged into: the network namespace of the switch, and the mounts that are their disks."""
    unshare(NEW_NET | NEW_MOUNTS)
    mount(None, "/", flags=RECURSIVE | PRIVATE)
    for disk in spec["tmpfs_disks"]:
        mount_tmpfs(disk, f"mode=755,size={spec['size_mb']}m")
    say_ready(os.getpid())
    wait_for_the_end()


def be_the_launcher(spec):
    """Be a machine with the real file system, but its own network, name, and ~/.ssh and ~/.ttlaunch."""
    unshare(NEW_NET | NEW_MOUNTS | NEW_NAMES)
    mount(None, "/", flags=RECURSIVE | PRIVATE)
    socket.sethostname(spec["name"])
    bind(f"{spec['etc']}/hosts", "/etc/hosts")
    replace_home(Path(spec["home"]), view=Path(spec["view"]), ssh=spec["ssh"])
    shared = spec["shared_folder"]
    if shared and (Path(shared).is_dir() or Path(spec["home"]) in Path(shared).parents):
        bind_folder(spec["shared_files"], shared)
    mount("sysfs", "/sys", kind="sysfs")
    say_ready(os.getpid())
    wait_for_the_end()
    own = Path("/proc/self/ns/net").readlink()
    while strangers := [pid for pid in processes_in(own) if pid != os.getpid()]:
        for pid in strangers:
            kill(pid)


def replace_home(home, *, view, ssh):
    """Show the home as it is, except that its .ssh is another and .ttlaunch and all new files are this machine's own."""
    mount_tmpfs(view, "mode=700")
    for entry in os.scandir(home):
        target = view / entry.name
        if entry.name in {".ssh", ".ttlaunch"}:
            continue
        if entry.is_symlink():
            target.symlink_to(Path(entry.path).readlink())
        elif entry.is_dir():
            bind_folder(entry.path, target)
        elif entry.is_file():
            target.touch()
            bind(entry.path, target)
    bind_folder(ssh, view / ".ssh")
    mount(view, home, flags=MOVE)


def processes_in(network):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "ns/net").readlink() == network:
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def be_a_host(spec):
    """Be a machine of which only the programs are shared with the real one. The child is its process 1."""
    join_mounts(spec["rack"])
    unshare(NEW_NET | NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PIDS)
    built, tell_built = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(built)
        checked(libc.prctl(DIE_WITH_PARENT, signal.SIGKILL), "prctl")
        lay_out(spec)
        os.write(tell_built, b"x")
        os.close(tell_built)
        rest_as_init()
    os.close(tell_built)
    if os.read(built, 1) == b"x":
        say_ready(child)
        wait_for_the_end(os.pidfd_open(child))
    kill(child)
    os.waitpid(child, 0)


def rest_as_init():
    """Collect orphans for ever, and hold no file of the owner's."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        signal.sigwait([signal.SIGCHLD])
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue


def lay_out(spec):
    """Build the host's file system under a new root and make that the root of this process and all later ones."""
    mount(None, "/", flags=RECURSIVE | PRIVATE)
    socket.sethostname(spec["name"])
    root = Path(spec["root"])
    mount_tmpfs(root, "mode=755")
    show_the_system(root)
    for name in KEPT:
        bind_folder(f"{spec['disk']}/{name}", root / name)
    for name in PERSONAL:
        if (root / "etc" / name).is_file():
            bind(f"{spec['etc']}/{name}", root / "etc" / name)
    mount_tmpfs(root / "tmp", "mode=1777")
    mount_tmpfs(root / "run", "mode=755")
    (root / "run/sshd").mkdir(mode=0o755)
    bind_folder("/dev", root / "dev")
    mount("tmpfs", root / "dev/shm", kind="tmpfs", options="mode=1777")
    for kind, name in (("proc", "proc"), ("sysfs", "sys")):
        (root / name).mkdir()
        mount(kind, root / name, kind=kind)
    for folder in spec["share"]:
        bind_folder(folder, f"{root}{folder}", read_only=True)
    if spec["shared_folder"]:
        bind_folder(spec["shared_files"], f"{root}{spec['shared_folder']}")
    os.chdir(root)
    mount(".", "/", flags=MOVE)
    os.chroot(".")
    os.chdir("/")


def show_the_system(root):
    """Bind /usr, /etc and what else holds programs and libraries, so that the host can read but not change them."""
    for real in Path("/").iterdir():
        if real.name not in {"usr", "etc", "bin", "sbin"} and not real.name.startswith("lib"):
            continue
        if real.is_symlink():
            (root / real.name).symlink_to(real.readlink())
        else:
            bind_folder(real, root / real.name, read_only=True)


if __name__ == "__main__":
    kinds = {"rack": be_the_rack, "launcher": be_the_launcher, "host": be_a_host}
    specification = json.loads(sys.argv[1])
    kinds[specification["kind"]](specification)
