"""docs/write_a_feature.md builds a feature from nothing: in a copy of the product, as a reader would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from samples import ROOT, samples

PAGE = ROOT / "docs" / "write_a_feature.md"
DIFF = re.compile(r"^```diff\n(?P<before>(?: .*\n|-.*\n)*)(?P<after>(?:\+.*\n)+)```$", re.MULTILINE)


@pytest.mark.slow
def test_the_page_builds_a_feature(tmp_path: Path) -> None:
    *parts, use = samples(PAGE)
    for folder in ("fp8graph", "passes", "models"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "passes" / "clip_outliers.py").write_text("\n\n".join(part.code for part in parts), encoding="utf-8")
    pipeline, settings = tmp_path / "passes" / "__init__.py", tmp_path / "fp8graph" / "ir" / "settings.py"
    text, changes = PAGE.read_text(encoding="utf-8"), 0
    for file in (pipeline, settings):
        product = file.read_text(encoding="utf-8")
        for change in DIFF.finditer(text):
            before = re.sub("(?m)^.", "", change["before"])
            kept = re.sub("(?m)^.", "", "".join(re.findall(r"(?m)^ .*\n", change["before"])))
            if before in product:
                changes += 1
                product = product.replace(before, kept + re.sub("(?m)^.", "", change["after"]), 1)
        file.write_text(product, encoding="utf-8")
    assert changes == 3
    imports = "from fp8graph.passes.clip_outliers import Counters, clip_outliers, clips\n"
    product = pipeline.read_text(encoding="utf-8")
    pipeline.write_text(
        product.replace("from torch import fx\n", f"from torch import fx\n\n{imports}", 1), encoding="utf-8"
    )

    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = [sys.executable, "-c", use.code]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts, reason = done.stdout.splitlines()
    assert counts == (use.output or "").splitlines()[0]
    assert "its input is clipped at 2.0" in reason


def test_the_page_counts_its_lines() -> None:
    *parts, _ = samples(PAGE)
    lines = sum(len(part.code.splitlines()) for part in parts) + 2 * (len(parts) - 1)
    assert f"in a file of {lines} lines" in " ".join(PAGE.read_text(encoding="utf-8").split())
