"""The page on where recipes stop scaling says what its measured numbers say."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/explanation"


def test_page_and_picture_follow_from_the_numbers(tmp_path):
    spec = importlib.util.spec_from_file_location("virtual_scale", ROOT / "benchmarks/virtual_scale.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    (tmp_path / "scaling.json").write_text((FOLDER / "scaling.json").read_text())
    benchmark._write({}, tmp_path)
    for name in ("scaling.json", "scaling.svg", "where-recipes-stop-scaling.md"):
        assert (FOLDER / name).read_text() == (tmp_path / name).read_text(), name


def test_shares_add_up_and_the_bottleneck_of_a_server_is_seen():
    curves = json.loads((FOLDER / "scaling.json").read_text())
    for one in (point for points in curves.values() for point in points):
        assert abs(one["computing"] + one["exposed"] + one["waiting"] - 1) < 1e-9
    ends = {name: points[-1] for name, points in curves.items()}
    assert 10_000 == ends["data_parallel"]["workers"]
    assert ends["data_parallel"]["computing"] > 0.9
    assert ends["sync_ps"]["computing"] < 0.2
