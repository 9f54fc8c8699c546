"""The kind of a host: the properties that decide which wheels run on it, and pip's names for these."""

from dataclasses import dataclass

from ttlaunch.records.host_scripts import FoundPython

_OLDEST_GLIBC = {"x86_64": 5, "i686": 5}  # minor version: there are wheels for glibc 2.5 and newer
_OLDEST_GLIBC_ELSEWHERE = 17
_MOST_DIGITS = 3  # a longer number in the host's answer is not part of a version of libc
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


@dataclass(frozen=True)
class Kind:
    """Hosts of one kind get the same wheels.

    Attributes:
        python: The full version of the base Python, such as `3.11.2`.
        machine: The processor's architecture, as `uname -m` prints it.
        libc: `glibc` or, if the host has none, `musl`.
        libc_version: The major and minor version of libc; (1, 2) for musl.
    """

    python: str
    machine: str
    libc: str = "glibc"
    libc_version: tuple[int, int] = (2, 17)

    @property
    def minor(self) -> str:
        """The Python without its patch level: `3.11`."""
        return ".".join(self.python.split(".")[:2])

    def __str__(self) -> str:
        libc = f"{self.libc} {self.libc_version[0]}.{self.libc_version[1]}"
        return f"Python {self.minor} on {self.machine} with {libc}"

    def platforms(self) -> list[str]:
        """The platform tags of wheels that run there, best first."""
        if self.libc == "musl":
            tags = [f"musllinux_1_{minor}" for minor in range(self.libc_version[1], -1, -1)]
        else:
            oldest = _OLDEST_GLIBC.get(self.machine, _OLDEST_GLIBC_ELSEWHERE)
            tags = []
            for minor in range(self.libc_version[1], oldest - 1, -1):
                tags += [f"manylinux_2_{minor}", *([_LEGACY[minor]] if minor in _LEGACY else [])]
        return [f"{tag}_{self.machine}" for tag in [*tags, "linux"]]

    def markers(self) -> dict[str, str]:
        """The values that conditions in requirements, such as `platform_machine == "aarch64"`, are compared with."""
        return {
            "implementation_name": "cpython",
            "implementation_version": self.python,
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": self.python,
            "python_version": self.minor,
            "sys_platform": "linux",
        }


def parse_kind(base: FoundPython) -> Kind:
    """The kind of a host, from the facts about its base Python."""
    name, _, version = base.libc.partition(" ")
    parts, python = version.split("."), base.version or ""
    if name == "glibc" and len(parts) > 1 and all(part.isdecimal() and len(part) <= _MOST_DIGITS for part in parts[:2]):
        return Kind(python, base.machine, "glibc", (int(parts[0]), int(parts[1])))
    return Kind(python, base.machine, "musl", (1, 2))
