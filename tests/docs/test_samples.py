"""Every sample of README.md and docs/, in Python or of the command, runs as it stands and prints what the page shows.

Or the page says why not (tests/support/samples.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import first_fast
from samples import AS_PAGES_SHOW, ROOT, Sample, name_of, run, samples, slow_pages, without_a_reason
from samples import apart as apart  # a fixture

pytestmark = [
    pytest.mark.usefixtures("apart"),
    # transformers, of the names that PEFT still types
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What samples take for granted, by name, and which page takes what. A page that is not listed takes "fp8graph".
NAMES = {
    "fp8graph": "import torch\nimport fp8graph\n",
    "llama": """
from tiny_models import TINY
torch.manual_seed(0)
model = TINY["llama"].build(2).bfloat16()
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
    "config": """
import json
from pathlib import Path
sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 80, "dtype": "bfloat16"}
Path("llama-3-70b.json").write_text(json.dumps(config | sizes | {"vocab_size": 128256}))
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
    "README.md": "fp8graph",
    "docs/checkpoints.md": "fp8graph, llama, FP8 checkpoint",
    "docs/distributed.md": "fp8graph, llama, one rank",
    "docs/fine_tuning.md": "fp8graph, llama, FP8 checkpoint",
    "docs/index.md": "fp8graph, llama",
    "docs/report.md": "fp8graph, llama, report",
    "docs/scale.md": "fp8graph, config",
    "docs/statistics.md": "fp8graph, writers",
}


def preamble(page: Path) -> str:
    return "".join(NAMES[name] for name in TAKES.get(name_of(page), "fp8graph").split(", "))


@first_fast("page", PAGES, ids=name_of)
def test_samples_run(page: Path) -> None:
    run(page, preamble(page))


@pytest.mark.release
@pytest.mark.parametrize("page", slow_pages(PAGES), ids=name_of)
def test_slow_samples_run(page: Path) -> None:
    run(page, preamble(page), slow=True)


def test_a_sample_that_is_not_run_says_why() -> None:
    assert without_a_reason(PAGES) == []


def test_the_table_names_pages_that_exist() -> None:
    assert set(TAKES) <= {name_of(page) for page in PAGES}


def page_of(text: str, folder: Path) -> list[Sample]:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return list(samples(page))


@AS_PAGES_SHOW
def test_a_sample_that_fails_or_prints_something_else_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samples.ROOT", tmp_path)
    wrong, right, quiet = page_of(
        "```python\nprint(1)\n```\n\n```output\n2\n```\n"
        "```python\nprint('a long line')\n```\n```output\na ... line\n```\n"
        "```python\nprint(1 / 0)\n```\n",
        tmp_path,
    )
    with pytest.raises(AssertionError, match=r"page\.md:2 prints\n1\nand the page shows\n2"):
        wrong.run({})
    right.run({})
    with pytest.raises(ZeroDivisionError):
        quiet.run({})


@AS_PAGES_SHOW
def test_a_command_is_run_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samples.ROOT", tmp_path)
    right, wrong = page_of(
        "```console\n$ fp8graph inspect 'no such folder' --json\n```\n"
        "\n```console\n$ fp8graph completion bash\nnothing\n```\n",
        tmp_path,
    )
    right.run({})
    with pytest.raises(AssertionError, match=r"page\.md:6 prints\n(.*\n)+and the page shows\nnothing"):
        wrong.run({})


@AS_PAGES_SHOW
def test_text_after_a_sample_is_compared_unless_the_page_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samples.ROOT", tmp_path)
    trained, stale = page_of(
        "```python\nprint(1)\n```\n\n<!-- not compared: a trained loss -->\n```text\n2\n```\n"
        "```python\nprint(1)\n```\n\n```text\n2\n```\n",
        tmp_path,
    )
    assert (trained.loose, stale.loose) == ("not compared: a trained loss", "")
    trained.run({})
    with pytest.raises(AssertionError, match="prints\n1\nand the page shows\n2"):
        stale.run({})


def test_marks(tmp_path: Path) -> None:
    """A comment before the fence, on a line of its own."""
    found = page_of("<!-- not run: needs a GPU -->\n```python\na\n```\n\n<!-- other -->\n```python\nb\n```\n", tmp_path)
    assert [sample.mark for sample in found] == ["not run: needs a GPU", ""]
    assert [sample.line for sample in found] == [3, 8]
