"""docs/figures/make.py: it runs, and what it draws is what fp8graph computes, and torch's types hold."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from helpers import in_one_test

FOLDER = Path(__file__).parents[2] / "docs" / "figures"


@pytest.fixture(scope="module")
def make() -> Any:
    spec = importlib.util.spec_from_file_location("make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_figure_is_made_and_committed(make: Any, tmp_path: Path) -> None:
    make.main(tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(f"{name}.svg" for name in make.FIGURES) == sorted(p.name for p in FOLDER.glob("*.svg"))
    page = (FOLDER.parent / "how_fp8_works.md").read_text(encoding="utf-8")
    assert [name for name in made if f"(figures/{name})" not in page] == []


def floats(exponents: int, mantissas: int, largest: float) -> list[float]:
    """The positive numbers of a type, from its definition: subnormals share the exponent of the first normals."""
    bias, steps = 2 ** (exponents - 1) - 1, 2**mantissas
    found = [
        (m / steps if e == 0 else 1 + m / steps) * 2.0 ** (max(e, 1) - bias)
        for e in range(2**exponents)
        for m in range(steps)
    ]
    return sorted(number for number in found if 0 < number <= largest)


def test_a_tick_for_each_number(make: Any) -> None:
    wanted = {"E4M3": floats(4, 3, 448), "E5M2": floats(5, 2, 57344), "E2M1": [0.5, 1, 1.5, 2, 3, 4, 6]}
    axes = make.formats().axes[0]
    drawn = {lines.get_label(): [segment[0][0] for segment in lines.get_segments()] for lines in axes.collections}
    assert drawn == wanted
    assert make.positive_numbers("E8M0") == [2.0**power for power in range(-127, 128)]


@pytest.mark.parametrize(("name", "bits"), [("E4M3", 3), ("E5M2", 2)])
def test_errors_are_those_of_half_a_step(make: Any, name: str, bits: int) -> None:
    numbers = make.positive_numbers(name)
    starts, error = make.largest_errors(name)
    normal = (starts >= numbers[2 ** (bits + 1)]) & (starts * 2**0.25 < numbers[-1])
    assert error[normal].max().item() == pytest.approx(1 / (2 ** (bits + 1) + 1), rel=0.02)
    assert (error[starts * 2**0.25 < numbers[0] / 2] == 1).all()  # it became zero
    line = next(line for line in make.errors().axes[0].lines if line.get_label() == name)
    assert list(line.get_ydata()) == (100 * error).tolist()


@in_one_test("layout", ["rowwise", "columnwise"])
@in_one_test("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_each_element_is_its_code_times_its_scale(make: Any, recipe: str, layout: Any) -> None:
    x = make.example()
    q = fp8graph.numerics.quantize(x, make.RECIPES[recipe], "input", layout)
    codes = q.data.float() if layout == "rowwise" else q.data.float().t()
    decoded = codes * make.scale_map(x, make.RECIPES[recipe], layout).exp2()
    torch.testing.assert_close(decoded, fp8graph.numerics.dequantize(q).float(), rtol=0.005, atol=0)


def test_the_shares_that_become_zero_are_in_the_titles(make: Any) -> None:
    x = make.example().float()
    scaled = x * (448 / x.abs().max())
    share = 100 * (scaled.abs() <= 2.0**-10).float().mean()  # half of the smallest number
    titles = [axes.get_title() for axes in make.scales().axes]
    assert titles[0] == titles[4].replace("columnwise", "rowwise") == f"tensorwise, rowwise\n{share:.1f} % become 0"


def test_the_room_is_the_largest_of_the_last_amaxes(make: Any) -> None:
    amaxes, room = make.delayed()
    wanted = [448.0, *(max(amaxes[max(0, step - make.LENGTH) : step]) for step in range(1, 40))]
    assert room == pytest.approx(wanted)
    drawn = {line.get_label(): line.get_ydata() for line in make.history().axes[0].lines}
    clipped = [amax for amax, most in zip(amaxes, wanted, strict=True) if amax > most * (1 + 1e-6)]
    assert list(drawn["clipped: more than the room"]) == clipped
    assert amaxes[20] in clipped


def test_figure_shows_the_layouts_that_each_gemm_reads(make: Any) -> None:
    read = [[text.get_text() for text in axes.texts if "wise" in text.get_text()] for axes in make.gemms().axes]
    assert read == [
        ["x, rowwise", "w, rowwise"],
        ["dy, rowwise", "w, columnwise"],
        ["dy, columnwise", "x, columnwise"],
    ]
