"""Put a comparison into the page that helps to choose: `ttlaunch compare -o DIR`, then `python docs/choosing.py DIR`."""

import json
import re
import shutil
import sys
from pathlib import Path

from ttlaunch.cli.compare_picture import draw_comparison
from ttlaunch.diagnostics.count import counted

PAGE = Path(__file__).parent / "explanation" / "choosing.md"
_PLACE = re.compile(r"(<!-- measured -->\n).*?(<!-- /measured -->)", re.DOTALL)


def main() -> int:
    """Take table, JSON and picture over; status 2 without a folder to take them from."""
    if len(sys.argv) != 2:  # noqa: PLR2004 - the program and the folder
        sys.stderr.write(f"{__doc__}\n")
        return 2
    folder = Path(sys.argv[1])
    lines = (folder / "comparison.md").read_text(encoding="utf-8").splitlines()
    content = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    at = [number for number, line in enumerate(lines) if line.startswith("| ")]
    table, legend = lines[at[0] : at[-1] + 1], [line for line in lines[at[-1] + 1 :] if line]
    workload = content["workload"]
    heading = f"{content['machine']}; {workload['steps']} steps, {counted(workload['repeats'], 'run')} of each, one after the other."
    measured = "\n".join([heading, "", *table, "", *legend, ""])
    page = _PLACE.sub(lambda found: found[1] + measured + found[2], PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    shutil.copyfile(folder / "comparison.json", PAGE.with_name("comparison.json"))
    PAGE.with_name("comparison.svg").write_text(draw_comparison(content), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
