"""package: a model ahead of time in one file, for a process that has torch alone."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import ConfigError, Policy, Rule
from fp8graph.compat import inductor, torch_build
from fp8graph.compat.torch_build import PACKAGES_FP8_ON_CPU
from helpers import MLP, first_slow
from stored_weights import stored
from tiny_models import causal_lm

ON_CPU = pytest.mark.skipif(not PACKAGES_FP8_ON_CPU, reason="this torch's C++ for a CPU does not compile with FP8")
IDS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))

ALONE = """
import sys, torch
model = torch._inductor.aoti_load_package("model.pt2")
with torch.no_grad():
    torch.save(model(*torch.load("args.pt"), **torch.load("kwargs.pt")), "out.pt")
assert not {"fp8graph", "transformers"} & {name.partition(".")[0] for name in sys.modules}
"""


def by_torch_alone(folder: Path, *args: Any, **kwargs: Any) -> Any:
    """The result of the folder's ``model.pt2`` in a process that imports torch and nothing else."""
    torch.save(args, folder / "args.pt")
    torch.save(kwargs, folder / "kwargs.pt")
    subprocess.run([sys.executable, "-I", "-c", ALONE], cwd=folder, check=True, capture_output=True, text=True)
    return torch.load(folder / "out.pt")


@pytest.fixture
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled models multiply as packages do: in FP32, as on a CPU without a bf16 GEMM."""
    monkeypatch.setattr(torch_build, "multiplies_bf16_on_cpu", lambda: False)


def size(path: Path) -> int:
    with zipfile.ZipFile(path) as file:
        return sum(entry.file_size for entry in file.infolist())


@ON_CPU
@pytest.mark.usefixtures("in_fp32")
@first_slow("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_the_same_bits_without_fp8graph(recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MLP(128, 256).bfloat16()
    fp8graph.compile(model, recipe=recipe)
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # delayed scaling has scales now, and quantizes weights anew
    model.eval()
    report = fp8graph.package(model, tmp_path / "model.pt2", x)
    assert [gemm.recipe for gemm in report.gemms if gemm.gemm == "fprop"] == [recipe] * len(report.gemms)
    with torch.no_grad():
        assert torch.equal(by_torch_alone(tmp_path, x), model(x))


@ON_CPU
@pytest.mark.usefixtures("in_fp32")
@pytest.mark.release
def test_a_llama_without_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = causal_lm("Llama")(2).bfloat16().eval()
    fp8graph.package(model, tmp_path / "model.pt2", recipe="rowwise", input_ids=IDS, use_cache=False)
    found = by_torch_alone(tmp_path, input_ids=IDS, use_cache=False)
    fp8graph.compile(model, recipe="rowwise")
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False)
    assert list(found) == ["logits"]
    assert torch.equal(found["logits"], expected.logits)


@ON_CPU
@pytest.mark.slow
def test_weights_are_in_the_file_once_and_in_fp8(tmp_path: Path) -> None:
    sizes = []
    for width in (1024, 2048):
        model = nn.Linear(1024, width, bias=False).bfloat16().eval()
        fp8graph.package(model, tmp_path / "model.pt2", torch.randn(32, 1024, dtype=torch.bfloat16))
        sizes.append(size(tmp_path / "model.pt2"))
    assert sizes[1] - sizes[0] == pytest.approx(1024 * 1024, rel=0.05)  # one byte for each of the added numbers


@ON_CPU
@pytest.mark.usefixtures("in_fp32")
@pytest.mark.release
def test_weights_that_arrived_in_fp8(tmp_path: Path) -> None:
    layer = stored("row", 128, 256).eval()
    x = torch.randn(32, 256, dtype=torch.bfloat16)
    report = fp8graph.package(layer, tmp_path / "model.pt2", x)
    assert [gemm.recipe for gemm in report.gemms] == ["rowwise"]
    with torch.no_grad():
        assert torch.equal(by_torch_alone(tmp_path, x), fp8graph.compile(layer)(x))


@pytest.mark.slow
@ON_CPU
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(32, 64)

    def refused(model: nn.Module, match: str, *args: Any, file: str = "model.pt2", **kwargs: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            fp8graph.package(model, tmp_path / file, *args, **kwargs)
        assert not list(tmp_path.iterdir())

    class Counts(nn.Linear):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__(64, 64)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            self.calls.add_(1)
            return super().forward(x)

    class Constant(nn.Module):
        def forward(self, _x: Tensor) -> int:
            return 3

    class View(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x), x[1:]

    class Experts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            offs, w = torch.tensor([12, 32], dtype=torch.int32), self.weight.view(2, 64, 32)
            if x.dtype == torch.float32:
                return torch.ops.transformers.grouped_mm_fallback(x, w, offs)
            return torch._grouped_mm(x, w, offs=offs)

    importlib.import_module("transformers.integrations.moe")
    experts, left = nn.Sequential(Experts(64, 64)).eval(), Policy([Rule("0", None, op="*")], default="rowwise")
    text = r"^0 computes fp8graph.scaled_grouped_mm, .*bf16 experts .* with Rule\('0', None, op='\*'\).$"
    with torch.no_grad():
        fp8graph.compile(experts, recipe="rowwise")(x)  # Inductor knows the op from now on, as one that it calls
    refused(experts, text, x)
    refused(experts, "^0 computes fp8graph.grouped_mm, .*bf16 experts", x, policy=left)
    experts.bfloat16()
    refused(experts, text, x.bfloat16(), recipe="rowwise")
    monkeypatch.setattr("fp8graph.tools.package.inductor.package", lambda *_: None)
    report = fp8graph.package(experts, tmp_path / "model.pt2", x.bfloat16(), policy=left)
    assert [gemm.recipe for gemm in report.gemms] == [None]
    (tmp_path / "model.pt2").unlink()  # empty, as nothing was compiled into it
    refused(nn.Linear(64, 64).eval(), r"model.zip: the name of a package ends with .pt2", x, file="model.zip")
    refused(nn.Linear(64, 64), r"Linear is in training mode: call model.eval\(\)", x)
    refused(Counts().eval(), "the model writes into its inputs or buffers, and a package keeps no state", x)
    refused(Constant().eval(), "Constant has nothing to compile: it makes no tensor", x)
    model = causal_lm("Llama")(1).eval()
    refused(View(64, 64).eval(), "returns a view of one of its inputs or buffers: return a copy", x)
    refused(model, "a DynamicCache, which no package can hold. A cache is left out with use_cache=False", input_ids=IDS)


@ON_CPU
def test_nothing_in_fp8_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fp8graph.tools.package.inductor.package", lambda *_: None)
    fp8graph.package(nn.ReLU().eval(), tmp_path / "model.pt2", torch.randn(4, 4))
    assert "ReLU was called, and no GEMM of it was compiled" in caplog.text


@ON_CPU
def test_the_policy_of_a_compiled_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fp8graph.tools.package.inductor.package", lambda *_: None)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    policy = Policy([Rule("0", None)], default="rowwise")
    fp8graph.compile(model, policy, compiler="eager")
    x = torch.randn(32, 64)

    def recipes(**arguments: Any) -> list[str | None]:
        return [gemm.recipe for gemm in fp8graph.package(model, tmp_path / "model.pt2", x, **arguments).gemms]

    assert recipes() == [None, "rowwise"]
    assert recipes(recipe="tensorwise") == ["tensorwise", "tensorwise"]


def test_a_torch_that_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fp8graph.tools.package.torch_build.PACKAGES_FP8_ON_CPU", False)
    with pytest.raises(ConfigError, match=r"torch 2.* cannot compile FP8 ahead of time for a CPU: 2.13 and later can"):
        fp8graph.package(nn.Linear(64, 64).eval(), tmp_path / "model.pt2", torch.randn(32, 64))


@ON_CPU
@pytest.mark.parametrize("kind", ["full", "interrupted", "done"])
def test_the_package_before_stays_until_the_end(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = {"full": OSError(28, "No space left on device"), "interrupted": KeyboardInterrupt(), "done": None}[kind]
    path = tmp_path / "model.pt2"
    path.write_text("old")

    def writes(_module: Any, _args: Any, _kwargs: Any, file: Any) -> None:
        file.write(b"new")
        file.error = error
        assert path.read_text() == "old"

    def package() -> None:
        fp8graph.package(MLP().eval(), path, torch.randn(16, 32), recipe="tensorwise")

    monkeypatch.setattr(inductor, "package", writes)
    if error is None:
        package()
    else:
        wanted = (KeyboardInterrupt, ConfigError)[kind == "full"]
        with pytest.raises(wanted, match="model.pt2'.: cannot be written .No space" if kind == "full" else None):
            package()
    assert path.read_text() == ("new" if error is None else "old")
    assert len([*tmp_path.iterdir()]) == 1


@ON_CPU
def test_a_place_without_files_is_refused_before_the_model_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"package\(path='.*model.pt2'\): cannot be written .No such file"):
        fp8graph.package(MLP().eval(), tmp_path / "nosuch" / "model.pt2", "no tensor", recipe="tensorwise")
