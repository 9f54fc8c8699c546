"""Starting the command line: what a command imports."""

import subprocess
import sys

_LINE = """
import sys
sys.argv[1:] = ["sync", "--on", "nowhere"]
from ttlaunch.cli.main import main
try:
    main()
except SystemExit:
    print(*sys.modules)
"""


def test_a_command_imports_neither_the_other_commands_nor_pydantic(tmp_path):
    answer = subprocess.run([sys.executable, "-c", _LINE], cwd=tmp_path, capture_output=True, text=True, check=True)

    imported = set(answer.stdout.split())
    assert "ttlaunch.cli.sync" in imported
    assert set() == imported & {"ttlaunch.cli.run", "ttlaunch.cli.chaos", "pydantic", "rich"}
