"""devices: a device by its name, or by what torch calls it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

import test_layers
from fp8graph import hardware
from fp8graph.errors import ConfigError
from fp8graph.hardware import VENDORS, vendor_of
from fp8graph.hardware.amd import AMD
from fp8graph.hardware.device import CPU
from fp8graph.hardware.nvidia import NVIDIA
from fp8graph.tools import bench, doctor
from helpers import in_one_test


@pytest.mark.parametrize(("target", "vendor"), [("cpu", CPU), ("sm_90", NVIDIA), ("gfx942", AMD)])
def test_each_vendor_knows_its_own_names(target: str, vendor: type[hardware.Hardware]) -> None:
    found = hardware.from_target(target)
    assert type(found) is vendor
    assert found.name == target
    assert [v for v in VENDORS if v.from_target(target, "") is not None] == [vendor]


@in_one_test("name", hardware.EXAMPLES)
def test_examples_are_targets(name: str) -> None:
    assert hardware.from_target(name).name == name


@in_one_test("target", ["", "gpu", "sm_9", "sm90", "gfx", "GFX942", "cuda", 90])
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
    assert vendor_of(xpu) is hardware.Hardware
    assert hardware.of_device(xpu).name == "device 'xpu'"
    assert not vendor_of(xpu).multiplies_groups


def test_the_machine_is_its_gpu_or_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.of_machine() == hardware.from_target("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    assert hardware.of_machine() == hardware.from_target("cpu")  # nobody's GPU


@in_one_test("target", ["sm_999", "sm_1000", "sm_91", "gfx943", "gfx9999"])
def test_architectures_that_do_not_exist(target: str) -> None:
    with pytest.raises(ConfigError, match=f"target: there is no '{target}'. Known: (sm_70|gfx900), "):
        hardware.from_target(target)


@in_one_test("target", ["sm_90a", "sm_100a", "sm_121", "gfx90a", "gfx1100"])
def test_architectures_that_exist(target: str) -> None:
    assert hardware.from_target(target).name == target


class XPU(hardware.Hardware):
    """A vendor as a file of its own would describe it."""

    is_gpu = True

    @classmethod
    def from_target(cls, target: str, device_name: str = "") -> Self | None:
        return cls(name="xe3", scalings=frozenset({"tensor"})) if target == "xe3" else None

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        return cls(name="xe3", scalings=frozenset({"tensor"}))

    @classmethod
    def runs(cls, device: torch.device) -> bool:
        return device.type == "xpu"


def test_another_vendor_is_one_class_and_its_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu = torch.device("xpu")
    monkeypatch.setattr(hardware, "VENDORS", (*VENDORS, XPU))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: xpu)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    module = SimpleNamespace(get_device_name=lambda device: f"an XPU, {device}")
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert hardware.current_device() == bench.fp8_gpu() == xpu
    assert hardware.of_machine().name == "xe3"
    assert dict(doctor.machine())["xpu:0"] == "an XPU, xpu:0, xe3"
    assert hardware.supports("tensorwise")
    assert not hardware.supports("rowwise")


# Modules that name a vendor's devices, outside of the vendor's own file, and the reason.
MAY_NAME_A_VENDOR = {
    "hardware.amd": "AMD's file",
    "hardware.nvidia": "NVIDIA's file",
    "compat.torch_build": "the toolkits that torch was built with",
    "compat.dynamo": "the interface that an absent GPU takes over, for offline",
    "offline.generate": "Inductor's code for NVIDIA's GPUs, which need not be present",
    "offline.fake_gpu": "the same",
    "extras.gradients": "DDP's hook runs on a stream of CUDA's, with a future of it; on no other GPU yet",
    "integrations.verl": "verl registers an engine for each device, by its name",
    "runtime.contents": "a CUDA graph is being captured",
    "tools.record.machine": "the toolkit's version beside a measurement",
}
VENDORS_NAMES = ("cuda", "hip", "xpu", "mps", "is_cuda")


def vendors_named(tree: ast.AST) -> Iterator[str]:
    """Devices of one vendor that a file names: torch.cuda, torch.version.hip, "cuda", "cuda:0", x.is_cuda."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in VENDORS_NAMES:
            yield node.attr
        elif isinstance(node, ast.Constant) and str(node.value).partition(":")[0] in VENDORS_NAMES:
            yield str(node.value)
        elif isinstance(node, ast.Import) and any(set(n.name.split(".")) & {*VENDORS_NAMES} for n in node.names):
            yield ast.unparse(node)


def test_few_files_name_a_vendor() -> None:
    texts = {name: file.read_text(encoding="utf-8") for name, file in test_layers.MODULES.items()}
    trees = {name: ast.parse(text) for name, text in texts.items() if any(vendor in text for vendor in VENDORS_NAMES)}
    assert {name for name, tree in trees.items() if any(vendors_named(tree))} == {*MAY_NAME_A_VENDOR}


def test_a_vendors_name_is_recognised() -> None:
    text = 'import torch.cuda; torch.version.hip; x.device.type == "cuda"; f("xpu:1"); x.is_cuda; y = "triton.cuda"'
    assert {*vendors_named(ast.parse(text))} == {"import torch.cuda", "hip", "cuda", "xpu:1", "is_cuda"}
