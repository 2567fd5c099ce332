"""The report's page: one file without network, readable data, and what a real browser makes of it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from browser import Page, opened
from fp8graph import offline
from fp8graph.records import StatisticRecord
from fp8graph.report import Report
from fp8graph.report.page import in_script, page, page_data
from generated import OF_ONE_INDUCTOR, report_of_mlp
from helpers import ALL, MLP, eager_backend
from tiny_models import llama_config

STRANGE = "</script><b>\"&amp;'\u2028é日本.0"


def report_of(model: nn.Module | None = None) -> Report:
    x = torch.randn(16, 32, requires_grad=True)
    return fp8graph.explain(MLP() if model is None else model, x, policy=ALL)


def statistics(sites: list[str], steps: range = range(3)) -> list[StatisticRecord]:
    copies = [("", "", "std"), ("rowwise", "tensorwise", "underflows%"), ("rowwise", "tensorwise", "scale_inv_min")]
    return [
        StatisticRecord(
            step=step, site=site, operand=operand, layout=layout, recipe=recipe, what_if=False, stat=stat,
            value=0.25 * step + row,
        )
        for step in steps
        for row, site in enumerate(sites)
        for operand in ("input", "grad_output")
        for layout, recipe, stat in copies
    ]  # fmt: skip


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def strange(report: Report) -> Report:
    """The same report of a model whose names are markup."""
    (view,) = report.graphs
    gemms = tuple(dataclasses.replace(g, fqn=STRANGE, reason=STRANGE, m="s0", n="<i>") for g in view.gemms)
    views = [dataclasses.replace(view, name=STRANGE, gemms=gemms, load_module=None), view]
    return dataclasses.replace(report, graphs=views, eager_frames=[STRANGE])


def test_the_file_needs_no_network() -> None:
    text = page(page_data(report_of(), statistics(["gate"]), [1.0]))
    assert not re.search(
        r"<(?:link|img|iframe|object|embed)\b|<script[^>]*\bsrc=|@import|url\(", text.split("<script", 1)[0]
    )
    assert not re.search(r"<script[^>]*\bsrc=", text)
    addresses = set(re.findall(r"https?://[\w.-]+", text))
    # licences and names of XML, which nothing loads
    assert addresses <= {"http://www.w3.org", "http://www.apache.org", "https://www.apache.org", "https://github.com"}
    assert "sourceMappingURL" not in text


def test_charts_come_with_statistics_only() -> None:
    small, large = page(page_data(report_of())), page(page_data(report_of(), statistics(["gate"])))
    assert "dagre" in small
    assert "echarts.init" not in small.partition("</style>")[2].partition("application/json")[0]
    assert len(small) < 250_000 < 1_100_000 < len(large)


def test_names_are_data_and_never_markup() -> None:
    report = strange(report_of())
    text = page(page_data(report))
    assert "<b>" not in text
    data = data_of(text)
    assert {STRANGE} == {row["site"] for row in data["gemms"] if row["graph"] == 0 and row["size"].startswith("s0")}
    assert f"not compiled: {STRANGE}" in data["notes"]
    assert json.loads(in_script(json.dumps(STRANGE))) == STRANGE


def test_numbers_that_json_does_not_have() -> None:
    data = page_data(report_of())
    data["shares"][0]["parts"]["native"] = float("nan")
    assert data_of(page(data))["shares"][0]["parts"]["native"] is None


def rows(found: Page) -> list[str]:
    return [text for name in ("native", "emulated", "high-precision") for text in found.texts("tr", f"is-{name}")]


@pytest.mark.slow
def test_a_report_in_a_real_browser(tmp_path: Path) -> None:
    report, path = report_of(), tmp_path / "report.html"
    report.to_html(path)
    found = opened(path)
    assert len(rows(found)) == 9
    assert report.summary() in "".join(found.texts("section"))
    units = found.texts("g", "node")
    assert sum(text.startswith("fprop") for text in units) == 2  # gate and up are one GEMM
    assert sum(text.startswith("quantize input") for text in units) == 2
    assert found.texts("path", "saved")
    assert f"after {[*report.graphs[0].stages][-1]}" in "".join(found.texts("strong"))
    details = "".join(text for _, own, texts in found.elements if own.get("id") == "details" for text in texts)
    assert "input_columnwise" in details


@pytest.mark.slow
def test_links_into_the_page(tmp_path: Path) -> None:
    report, path = report_of(), tmp_path / "report.html"
    report.to_html(path)
    found = opened(path, "#stage=quantize&gemm=wgrad&name=up&layer=down&op=mm_2")
    assert len(rows(found)) == 1
    assert any("fp8graph.quantize(" in line for line in found.texts("span", "added"))
    assert any("aten.mm(" in line for line in found.texts("span", "removed"))
    assert any(
        "e4m3, rowwise" in text and "columnwise" not in text.partition("e4m3, ")[2][:20]
        for text in found.texts("g", "quantize")
    )
    assert not found.texts("path", "saved")  # known of the last stage only
    assert "after quantize" in "".join(found.texts("strong"))
    assert found.texts("g", "node")


@pytest.mark.slow
def test_strange_names_in_a_real_browser(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    strange(report_of()).to_html(path)
    found = opened(path)
    assert any(STRANGE in text for text in rows(found))
    assert not found.texts("b")
    empty = tmp_path / "empty.html"
    eager_backend().report.to_html(empty)
    assert "No graph was compiled." in "".join(opened(empty).texts("p"))


@pytest.mark.slow
def test_statistics_in_a_real_browser(tmp_path: Path) -> None:
    path = tmp_path / "statistics.html"
    report_of().to_html(path, statistics=statistics(["gate", "up", "down"]), losses={0: 2.0, 2: 1.0})
    found = opened(path, "#site=gate&stat=std")
    charts, one = (len([1 for text in page.elements if text[0] == "canvas"]) for page in (found, opened(path)))
    assert charts > one > 0  # the heat map, and the curves of a layer
    assert any("scale_inv 0.5" in text for text in found.texts("g", "quantize"))
    assert opened(path, "#columns=tensors&step=1").texts("canvas")


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_identical_layers_take_no_room() -> None:
    sizes = [len(page(page_data(report_of(Deep(layers))))) for layers in (6, 24)]
    assert sizes[1] < 1.15 * sizes[0]


def details_of(found: Page) -> str:
    return "".join(text for _, own, texts in found.elements if own.get("id") == "details" for text in texts)


def computed(found: Page) -> list[tuple[str, bool]]:
    """The names of the first nodes of outlined boxes, and whether the kernel computes them in part."""
    classes = [(own, own.get("class", "").split()) for tag, own, _ in found.elements if tag == "g"]
    return [(own["data-unit"], "partly" in names) for own, names in classes if "computed" in names]


@pytest.mark.slow
@OF_ONE_INDUCTOR
@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_kernels_in_a_real_browser(tmp_path: Path) -> None:
    """The boxes of a chosen kernel, the kernels of a chosen box; and a kernel of the table that is clicked."""
    report, path = report_of_mlp(), tmp_path / "report.html"
    kernels = report.kernels
    report.to_html(path)
    (cast,) = [place for place, kernel in enumerate(kernels[:4]) if "neg" in kernel.nodes and len(kernel.writes) == 3]
    (quantize,) = [name for name in kernels[cast].writes if name.startswith("quantize_input")]
    (saved,) = [name for name in kernels[cast].writes if name in report.graphs[0].saved]
    found = opened(path, f"#layer=*&op={quantize}&kernel={cast}")
    (silu, _), *others = computed(found)
    assert silu in kernels[cast].nodes
    assert others == [(quantize, False)]
    assert len(found.texts("path", "moved")) == 1
    assert f"writes what is saved: {saved}" in details_of(found)
    assert [kernel.name in details_of(found) for kernel in kernels[:4]] == [False, False, True, True]
    drawn = [kernel.name for kernel in kernels if kernel.graph != "weights"]
    assert [text for text in found.texts("button", "link") if text.startswith(("triton", "extern"))][2:] == drawn
    # backward computes silu again, from what forward saved
    again = next(place for place, kernel in enumerate(kernels) if {"sigmoid", "neg"} <= set(kernel.nodes))
    click = """
      const wait = setInterval(() => {
        if (!document.body.dataset.ready) return;
        clearInterval(wait);
        document.querySelectorAll("#kernels tbody tr")[PLACE].querySelector("button").click();
      }, 20);
    """.replace("PLACE", str(again))
    path.write_text(path.read_text().replace("</body>", f"<script>{click}</script></body>"))
    found = opened(path, "#stage=match")
    assert f"after {[*report.graphs[0].stages][-1]}" in "".join(found.texts("strong"))
    assert silu in [name for name, _ in computed(found)]
    assert "1 again, for backward" in details_of(found)
    assert [text.partition(":")[0] for text in found.texts("dd", "moved")]
    assert "reads what was saved: " in details_of(found)


@pytest.mark.release
def test_a_llama_of_many_layers(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    config, path = llama_config(), tmp_path / "report.html"
    config.num_hidden_layers = 24
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    tokens = torch.zeros(2, 16, dtype=torch.long)
    policy = fp8graph.Policy([fp8graph.Rule("lm_head", None)], min_speedup=0)
    report = fp8graph.explain(model, input_ids=tokens, labels=tokens, target="sm_90", policy=policy, use_cache=False)
    report.to_html(path)
    assert path.stat().st_size < 400_000
    found = opened(path)
    assert len(rows(found)) == 24
    assert len(found.elements) < 6_000
    assert found.ready() > 0
    assert "layers read as model.layers" in "".join(found.texts("p"))
