"""doctor: the recipes that each device multiplies, and the versions on which the tests ran.

That the docs have the same runs: tests/docs/test_support.py.
"""

from __future__ import annotations

import pytest

from fp8graph.cli import main
from fp8graph.tools import doctor
from fp8graph.tools.doctor import HOSTS, RUNS, TriedVersions


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert lines["recipe"].split() == ["recipe", "cpu", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"]
    assert lines["tensorwise"].split()[1:] == ["native"] * 7
    assert lines["rowwise"].split()[1:3] == ["native", "native"]
    assert lines["mxfp8"].split()[1:] == [*["emulated"] * 3, "native", "native", "emulated", "native"]
    assert lines["mxfp8, experts"].split()[2:] == [*["emulated"] * 3, "native", *["emulated"] * 3]
    assert lines["tensorwise, experts"].split()[2:] == ["emulated", "emulated", "fprop", "native", *["emulated"] * 4]
    assert out.splitlines()[-1].split()[2:] == [*["tensorwise"] * 3, "mxfp8", "mxfp8", *["tensorwise"] * 2]


def test_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    """The words of the error that they search for (tests/integrations/test_transformers.py) are in the line."""
    assert main(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Trainer")]
    assert 'torch_compile_backend="fp8graph"' in line
    assert "not a valid DynamoBackend" in line
    assert "fp8graph.compile(model)" in line


def test_installed_hosts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"accelerate": HOSTS["accelerate"], "torchtitan": "9.9.0"}
    monkeypatch.setattr(doctor, "_installed", found.get)
    rows = dict(doctor.machine())
    assert rows["accelerate"] == f"{HOSTS['accelerate']}, which was tried"
    assert rows["torchtitan"] == f"9.9.0, not tried; {HOSTS['torchtitan']} was"
    assert "lightning" not in rows


WHOLE = TriedVersions("2.13.0", "3.11", "5.23.0", all_fast_tests=True)
SAMPLE = TriedVersions("2.12.1", "3.12", "5.24.0", all_fast_tests=False)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (("2.13.0+cpu", "3.11.7", "5.23.0"), "all fast tests ran on them"),
        (("2.13.1", "3.11.0", None), "all fast tests ran on them"),
        (("2.12.0", "3.12.1", None), "a sample of the tests ran on them"),
        (("2.12.0", "3.11.7", "5.23.0"), f"no tests ran on them. A sample ran on {SAMPLE}"),
        (("2.13.0", "3.12.1", "5.23.0"), "all fast tests ran on them, with Python 3.11"),
        (("2.13.0", "3.11.7", "5.24.0"), f"no tests ran on them. All fast ones ran on {WHOLE}"),
        (("2.14.0", "3.11.7", "5.24.0"), f"no tests ran on them. All fast ones ran on {WHOLE}"),
        (
            ("2.16.0a0+git", "3.11.7", None),
            f"no tests ran on them, and only torch 2.11 to 2.15 is allowed. All fast ones ran on {WHOLE}",
        ),
        (
            ("2.9.1", "3.11.7", "5.23.0"),
            f"no tests ran on them, and only torch 2.11 to 2.15 is allowed. All fast ones ran on {WHOLE}",
        ),
    ],
)
def test_versions_count_together(
    versions: tuple[str, str, str | None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "RUNS", (WHOLE, SAMPLE))
    assert doctor.remark(*versions) == expected


def test_the_remark_is_short() -> None:
    for versions in (("2.15.0", "3.11.7", "5.25.0"), ("2.12.0", "3.13.1", "5.24.0"), ("2.16.0", "3.14.0", None)):
        assert len(doctor.remark(*versions)) < 160


def test_doctor_compares_this_machines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for run in RUNS:
        monkeypatch.setattr(doctor, "here", lambda run=run: (run.torch, f"{run.python}.9", run.transformers))
        assert main(["doctor"]) == 0
        assert "these versions" in (out := capsys.readouterr().out)
        assert ("all fast tests ran on them" if run.all_fast_tests else "a sample of the tests ran on them") in out
    monkeypatch.setattr(doctor, "here", lambda: ("2.12.0+cu130", "3.13.1", None))
    assert main(["doctor"]) == 0
    assert (
        f"no tests ran on them. All fast ones ran on {max(RUNS, key=lambda run: run.torch)}" in capsys.readouterr().out
    )


def test_missing_package_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    torch, python, _ = doctor.here()
    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    assert doctor.here() == (torch, python, None)
