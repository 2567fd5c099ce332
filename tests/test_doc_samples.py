"""Every ``python`` sample of README.md and docs/ runs as it stands, or says why it cannot (tests/support/samples.py).

Samples compile with ``compiler="eager"`` unless they name a compiler: the same graphs, without code generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from fp8graph.ir.settings import Settings
from fp8graph.recipes import registry
from samples import REASON, ROOT, run, samples

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What samples take for granted, by name, and which page takes what. A page that is not listed takes "fp8graph".
NAMES = {
    "fp8graph": "import torch\nimport fp8graph\n",
    "llama": """
from fp8graph.models import FAMILIES
torch.manual_seed(0)
model = FAMILIES["llama"].tiny(2).bfloat16()
config = model.config
ids = input_ids = torch.randint(0, 256, (2, 16))
inputs = {"input_ids": ids, "labels": ids}
batches = [inputs] * 4
""",
    "layer": """
layer, x = torch.nn.Linear(64, 64), torch.randn(16, 64)
""",
    "policy file": """
from pathlib import Path
Path("policy.toml").write_text('extends = "default"')
path = "checkpoint.pt"
""",
    "compiled": """
backend = fp8graph.Backend()
backend.bind(model)
""",
    "report": """
report = fp8graph.explain(model, **inputs)
backend = fp8graph.Backend()
statistics, losses = backend.observe(), {}
""",
    "writers": """
class writer:
    add_scalar = staticmethod(print)
class run:
    log = print
losses = {}
""",
    "FP8 checkpoint": """
import transformers
fp8graph.compile(model, recipe="blockwise")(ids)
fp8graph.export(model, "folder")
""",
    "one rank": """
import os
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model, path = model.model, "checkpoint"
backend = fp8graph.Backend()
""",
}
TAKES = {
    "README.md": "fp8graph, llama, layer, policy file",
    "docs/attention.md": "fp8graph, llama",
    "docs/checkpoints.md": "fp8graph, llama, FP8 checkpoint",
    "docs/distributed.md": "fp8graph, llama, one rank",
    "docs/index.md": "fp8graph, llama",
    "docs/kv_cache.md": "fp8graph, llama",
    "docs/report.md": "fp8graph, llama, report",
    "docs/statistics.md": "fp8graph, llama, writers",
    "docs/tune.md": "fp8graph, llama",
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def preamble(page: Path) -> str:
    return "".join(NAMES[name] for name in TAKES.get(name_of(page), "fp8graph").split(", "))


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Files go to a folder of their own; registered recipes and process groups go with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_NAMES", dict(registry._NAMES))
    monkeypatch.setitem(cast(dict[str, Any], Settings.__init__.__kwdefaults__), "compiler", "eager")
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_samples_run(page: Path) -> None:
    run(page, preamble(page))


SLOW = [page for page in PAGES if any(sample.mark.startswith("slow") for sample in samples(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=name_of)
def test_slow_samples_run(page: Path) -> None:
    run(page, preamble(page), slow=True)


def test_a_sample_that_is_not_run_says_why() -> None:
    marks = {sample.place: sample.mark for page in PAGES for sample in samples(page) if sample.mark}
    assert [place for place, mark in marks.items() if not REASON.fullmatch(mark)] == []


def test_the_table_names_pages_that_exist() -> None:
    assert set(TAKES) <= {name_of(page) for page in PAGES}
