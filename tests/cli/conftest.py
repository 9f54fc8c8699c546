"""How tests ask for a refusal: the whole transcript is compared, and nothing may have been made."""

import shlex

import pytest


def write_files(folder, files):
    """Write texts or bytes below a folder; None makes no file."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def refused(here, ttlaunch, golden, portable, request):
    """`refused(line, status=…, files=…)`: the command ends with that status and says what the golden file says."""

    def check(line, *, status, files=None, stdin=None, answer=None):
        write_files(here, files or {})
        before = sorted(here.rglob("*"))
        answer = answer or ttlaunch(line, stdin=stdin)
        words = line if isinstance(line, str) else shlex.join(line)
        transcript = f"$ ttlaunch {words}\n{answer.stdout}{answer.stderr}exit status {answer.status}\n"
        name = request.node.name.removeprefix("test_").replace("[", "-").replace("]", "")
        golden(f"refusals/{name}.txt", portable(transcript))
        assert answer.status == status
        assert answer.stdout == ""
        made = [path for path in sorted(here.rglob("*")) if path not in before and "__pycache__" not in path.parts]
        assert made == []

    return check
