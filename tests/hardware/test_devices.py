"""devices: a device by its name, or by what torch calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8graph import hardware
from fp8graph.errors import ConfigError
from fp8graph.hardware import VENDORS, vendor_of
from fp8graph.hardware.amd import AMD
from fp8graph.hardware.cpu import CPU
from fp8graph.hardware.nvidia import NVIDIA


@pytest.mark.parametrize(("target", "vendor"), [("cpu", CPU), ("sm_90", NVIDIA), ("gfx942", AMD)])
def test_each_vendor_knows_its_own_names(target: str, vendor: type[hardware.Hardware]) -> None:
    found = hardware.from_target(target)
    assert type(found) is vendor
    assert found.name == target
    assert [v for v in VENDORS if v.from_target(target, "") is not None] == [vendor]


@pytest.mark.parametrize("name", hardware.EXAMPLES)
def test_examples_are_targets(name: str) -> None:
    assert hardware.from_target(name).name == name


@pytest.mark.parametrize("target", ["", "gpu", "sm_9", "sm90", "gfx", "GFX942", "cuda", 90])
def test_unknown_targets_are_refused(target: Any) -> None:
    with pytest.raises(ConfigError, match="like 'sm_90' or 'gfx942'"):
        hardware.from_target(target)


def test_a_calibration_is_a_target_with_another_speed(tmp_path: Path) -> None:
    file = tmp_path / "fast.json"
    speed = dict.fromkeys(("bf16_flops", "fp32_flops", "fp8_flops", "fp4_flops", "bandwidth", "launch"), 1.5)
    file.write_text(json.dumps({"target": "sm_90", "speed": {"name": "fast", **speed}}))
    found = hardware.from_target(str(file))
    assert (found.name, found.scalings) == ("sm_90", hardware.from_target("sm_90").scalings)
    assert found.speed is not None
    assert found.speed.bandwidth == 1.5


def test_a_calibration_of_no_target(tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    speed = dict.fromkeys(("bf16_flops", "fp32_flops", "fp8_flops", "fp4_flops", "bandwidth", "launch"), 1.5)
    file.write_text(json.dumps({"target": "h100", "speed": {"name": "fast", **speed}}))
    with pytest.raises(ConfigError, match="not 'h100'"):
        hardware.from_target(str(file))


def test_meta_tensors_stand_for_a_gpus_and_are_decided_for_nothing() -> None:
    meta = torch.device("meta")
    assert vendor_of(meta) in (NVIDIA, AMD)
    assert type(hardware.of_device(meta)) is hardware.Hardware
    assert hardware.of_device(meta).name == "device 'meta'"


def test_a_device_that_nobody_has_a_file_for() -> None:
    xpu = torch.device("xpu")
    assert vendor_of(xpu) is None
    assert hardware.of_device(xpu).name == "device 'xpu'"
    assert not hardware.multiplies_groups(xpu)


def test_the_machine_is_its_gpu_or_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.of_machine() == hardware.from_target("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    assert hardware.of_machine() == hardware.from_target("cpu")  # nobody's GPU


@pytest.mark.parametrize("target", ["sm_999", "sm_1000", "sm_91", "gfx943", "gfx9999"])
def test_architectures_that_do_not_exist(target: str) -> None:
    with pytest.raises(ConfigError, match=f"target: there is no '{target}'. Known: (sm_70|gfx900), "):
        hardware.from_target(target)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_121", "gfx90a", "gfx1100"])
def test_architectures_that_exist(target: str) -> None:
    assert hardware.from_target(target).name == target
