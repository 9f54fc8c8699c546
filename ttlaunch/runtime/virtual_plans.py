"""`python -m ttlaunch.runtime.virtual_plans COUNT`: run several plans on virtual clocks, one after the other.

The folder that the environment names has a folder for each plan, 0 to COUNT - 1, with `plan.json` and `virtual-order.json`. Each gets
`virtual.json`, or `virtual-error.txt` with one line that says why there is none. A plan that fails does not keep others from running.
"""

import json
import os
import sys
from collections.abc import Hashable
from pathlib import Path

from ttlaunch import contract
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.virtual import VIRTUAL_ERROR_FILE, VIRTUAL_FILE, VIRTUAL_ORDER_FILE, VirtualOrder
from ttlaunch.runtime.hollow import Found
from ttlaunch.runtime.virtual import run_virtually
from ttlaunch.runtime.virtual_process import prepare_process
from ttlaunch.runtime.world import read_world


def main() -> None:
    """Run the plans in the folder that the environment names."""
    prepare_process()
    known: dict[Hashable, Found] = {}
    for number in range(int(sys.argv[1])):
        folder = Path(os.environ[contract.ENV_RUN_DIR]) / str(number)
        try:
            name, text = VIRTUAL_FILE, json.dumps(_run(folder, known)) + "\n"
        except Exception as error:  # noqa: BLE001  whatever a recipe raises; the launcher shows it
            name, text = VIRTUAL_ERROR_FILE, f"{type(error).__name__}: {error}".splitlines()[0]
        (folder / f"{name}.tmp").write_text(text, encoding="utf-8")
        (folder / f"{name}.tmp").replace(folder / name)


def _run(folder: Path, known: dict[Hashable, Found]) -> dict[str, object]:
    order = read(VirtualOrder, (folder / VIRTUAL_ORDER_FILE).read_bytes())
    if isinstance(order, BadRecord):
        raise ValueError(order.reason)  # noqa: TRY004  it is a text of another process
    return run_virtually(read_world(folder / contract.PLAN_FILE), order, known=known)


if __name__ == "__main__":
    main()
