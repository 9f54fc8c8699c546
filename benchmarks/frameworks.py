"""Run the scripts of all frameworks, also large ones, against torchrun; and start two runs at once, many times.

    python benchmarks/frameworks.py [--pairs 50] [--folder .frameworks]

Needs root, since each script also runs over two hosts, which are namespaces with their own sshd. transformers and DeepSpeed are fetched
into the folder, without the packages that they need and that the environment has. A file in the folder keeps what has been done, and the
next call goes on from there. Ends with 1 if a script has other losses than under torchrun, or if two runs at once disturb each other.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PACKAGES = ("transformers", "regex", "deepspeed", "hjson", "msgpack", "ninja", "einops", "py-cpuinfo")
_TEST = "tests/cluster/test_frameworks.py::test_a_script_has_the_losses_of_torchrun_here_and_over_two_hosts"


def main() -> int:
    """Fetch, run and print what was found."""
    sys.path.insert(0, str(ROOT))
    from tests.cluster.test_frameworks import SCRIPTS
    from tests.scripts.launches import start_two_at_once

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=ROOT / ".frameworks")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    results = options.folder / "results.json"
    done = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}

    def keep(name: str, *, is_right: bool) -> None:
        done[name] = is_right
        results.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        print(f"{name:32} {'right' if is_right else 'WRONG'}", flush=True)

    packages = options.folder.resolve() / "packages"
    for name in _PACKAGES:
        if not done.get(f"package {name}"):
            _fetch(name, packages)
            keep(f"package {name}", is_right=True)
    for name in SCRIPTS:
        if not done.get(name):
            keep(name, is_right=_passes(f"{_TEST}[{name}]", packages))
    for number in range(1, options.pairs + 1):
        if not done.get(f"pair {number}"):
            with tempfile.TemporaryDirectory() as folder:
                both = start_two_at_once(Path(folder))
                keep(f"pair {number}", is_right=both[0] == both[1] != None)  # noqa: E711 - the third of a chain
    wrong = [name for name, is_right in done.items() if not is_right]
    print(f"{len(done) - len(wrong)} of {len(done)} right; wrong: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


def _fetch(name: str, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "--upgrade", "--target", str(folder), name], check=True)


def _passes(test: str, packages: Path) -> bool:
    environment = {**os.environ, "PYTHONPATH": str(packages), "ALL_TESTS_MUST_RUN": "1"}
    return not subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short", test], cwd=ROOT, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
