"""torchtitan's override: names, policies by layer number, scaling state in checkpoints, wrong set-ups.

The slow tests run torchtitan 0.3.0's own code (``tests/support/torchtitan_on_ranks.py``), and need it. The others show
what the override does to a model that was compiled block by block.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp8graph
from fp8graph.integrations import torchtitan
from helpers import MLP, first_fast, in_one_test, same_bits
from ranks import run_each, run_ranks
from torchtitan_on_ranks import Run, graph_trained, refused, titan, trained

PATCH = Path(__file__).parents[2] / "docs" / "patches" / "torchtitan-0.3.0.patch"
PAGE = PATCH.parents[1] / "trainers.md"
NAME = "fp8graph.integrations.torchtitan.fp8"
ARGUMENTS: dict[str, Any] = {"compiler": "eager", "cache_weights": False}
PARTS = ("attention.qkv_linear.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
BY_LAYER = {"rules": [{"pattern": "layers.1.*", "recipe": "high_precision"}], "default": "delayed"}


class Blocks(nn.Module):
    """Two blocks, as torchtitan names them; one in the wrapper of activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": checkpoint_wrapper(MLP(32, 64)), "1": MLP(32, 64)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class ManagerConfig:
    """A stand-in for the config of a checkpoint manager: ``build`` returns what it was given."""

    create_seed_checkpoint = False

    def build(self, **given: Any) -> dict[str, Any]:
        return given


def overridden(**arguments: Any) -> Any:
    """The stand-in's config after the override, with a stand-in for torchtitan's function that derives configs."""
    stand_in: Any = SimpleNamespace(derive=lambda _, kind: kind())  # pyright: ignore
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchtitan.config.override", stand_in)
        return torchtitan.fp8(ManagerConfig(), **arguments)


def managed(backend: str | None, **arguments: Any) -> tuple[nn.Module, Any]:
    """A model as the override leaves it, and the state that goes into checkpoints."""
    model = Blocks()
    if backend is not None:
        for block in model.layers.values():
            block.compile(backend=backend, fullgraph=True)
    states: dict[str, Any] = {}
    overridden(**ARGUMENTS, **arguments).build(model_parts=[model], states=states)
    return model, states["fp8graph"]


@first_fast("name", ["inductor", "fp8graph:rowwise"])
def test_blocks_have_full_names_and_policies_tell_them_apart(name: str) -> None:
    recipe = "delayed" if name == "inductor" else "rowwise"
    policy = {**BY_LAYER, "default": recipe}
    model, _ = managed(name, policy=policy)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    backend = fp8graph.backend_of(model)
    found = {(gemm.fqn, gemm.recipe) for gemm in backend.report.gemms}
    wanted = {(f"layers.{i}.{part}", None if i else recipe) for i in (0, 1) for part in ("gate", "up", "down")}
    assert found == wanted
    layers = {key.split("|")[0].rpartition(".")[0] for key in backend.state_dict() if "|" in key}
    assert layers == ({f"layers.0.{part}" for part in ("gate", "up", "down")} if recipe == "delayed" else set())


def test_a_checkpoint_has_a_value_per_block_from_which_a_rank_with_other_blocks_takes_its_own() -> None:
    model, saved = managed("inductor", recipe="delayed")
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    whole = dict(fp8graph.backend_of(model).state_dict())
    values: dict[str, Any] = saved.state_dict()
    assert [*values] == ["layers.0", "layers.1", "backend"]
    assert [*values["backend"]] == ["fp8graph.state_version"]
    for layer in ("layers.0", "layers.1"):
        assert {*values[layer]} == {name for name in whole if name.startswith(f"{layer}.")}
    model, fresh = managed("inductor", recipe="delayed")
    model.layers = nn.ModuleDict({"1": cast(Blocks, model).layers["1"]})
    fresh.load_state_dict({name: dict(values[name]) for name in ("layers.1", "backend")})
    found = fp8graph.backend_of(model).state_dict()
    assert {*found} == {*values["layers.1"], *values["backend"]}
    assert same_bits(found.values(), [whole[name] for name in found])


def test_layers_whose_forward_is_replaced_keep_their_names() -> None:
    """As torchtitan's tensor parallelism does it: a closure calls the method that it took the place of."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feed_forward = MLP()
            forward = self.feed_forward.forward
            self.feed_forward.forward = lambda x: forward(x)  # noqa: PLW0108

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.feed_forward(x)

    layers = nn.ModuleList([Layer(), Layer()])
    backend = fp8graph.Backend(
        {"rules": [{"pattern": "layers.1.*", "recipe": "rowwise"}], "default": "tensorwise"}, compiler="eager"
    )
    backend.bind(nn.ModuleDict({"layers": layers}))
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)
        layer(torch.randn(16, 32))
    found = {(gemm.fqn, gemm.recipe) for gemm in backend.report.gemms}
    parts = ("gate", "up", "down")
    names = {(f"layers.{i}.feed_forward.{part}", ("tensorwise", "rowwise")[i]) for i in (0, 1) for part in parts}
    assert found == names


@in_one_test(
    ("backend", "arguments", "message"),
    [
        (
            None,
            {},
            "torchtitan compiled no block of Blocks, which would train in high precision. Pass --compile.enable",
        ),
        (
            "aot_eager",
            {},
            '--compile.backend is aot_eager, in whose place fp8graph does not compile. Leave it at "induc',
        ),
        (
            "fp8graph:blockwise",
            {"recipe": "rowwise"},
            "backend 'fp8graph:blockwise' already sets recipe: leave out",
        ),
        ("inductor", {"recipe": "rowise"}, "unknown recipe 'rowise'. Did you mean 'rowwise'?"),
    ],
)
def test_wrong_set_ups_are_refused(backend: str | None, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fp8graph.ConfigError, match=re.escape(message)):
        managed(backend, **arguments)


def test_a_seed_checkpoint_needs_no_compiled_block() -> None:
    config = overridden()
    config.create_seed_checkpoint = True
    assert config.build(model_parts=[Blocks()], states={})["states"] == {}


needs_torchtitan = pytest.mark.skipif(
    find_spec("torchtitan") is None,
    reason="torchtitan 0.3.0 is not installed: it brings many packages, and the other tests need none of them",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The findings of rank 0, by name; each in a folder of its own, but two continue another's run."""
    folder = tmp_path_factory.mktemp("ranks")
    unsaved: dict[str, Any] = {"saved": False, "checkpointed": False}
    delayed = Run(fp8={"policy": BY_LAYER, **ARGUMENTS})
    staged = replace(delayed, layers=4, pipeline=2, checkpointed=False)
    interleaved = replace(staged, schedule="Interleaved1F1B")
    high: dict[str, Any] = {"fp8": None, "backend": "aot_eager", "saved": False}
    asked = {
        "bf16": (Run(backend="aot_eager"), "bf16"),
        "whole": (delayed, "whole"),
        "resumed": (delayed, "whole"),
        "from bf16": (Run(fp8={"recipe": "delayed", **ARGUMENTS}, exclude=["fp8graph"]), "bf16"),
        "by name": (Run(backend="fp8graph:rowwise", fp8=ARGUMENTS), "by name"),
        "qwen3": (Run(model="qwen3", fp8=ARGUMENTS, layers=1, steps=1, checkpointed=False), "qwen3"),
        "deepseek bf16": (Run(model="deepseek_v3", backend="aot_eager", **unsaved), "deepseek bf16"),
        "deepseek": (Run(model="deepseek_v3", fp8=ARGUMENTS, **unsaved), "deepseek"),
        "parallel bf16": (Run(backend="aot_eager", tensor_parallel=2, **unsaved), "parallel bf16"),
        "parallel": (Run(fp8={"policy": BY_LAYER, **ARGUMENTS}, tensor_parallel=2, **unsaved), "parallel"),
        "stages bf16": (replace(staged, **high), "stages bf16"),
        "interleaved bf16": (replace(interleaved, **high), "interleaved bf16"),
        "stages": (staged, "stages"),
        "stages, resumed": (staged, "stages"),
        "interleaved": (interleaved, "interleaved"),
        "interleaved, resumed": (interleaved, "interleaved"),
        "interleaved, cut anew": (staged, "interleaved"),
        "inductor": (Run(layers=1, **unsaved), "inductor"),
        "inductor fp8": (Run(layers=1, fp8={}, **unsaved), "inductor fp8"),
    }
    calls: dict[str, Any] = {name: (trained, (run, str(folder / where))) for name, (run, where) in asked.items()}
    wrong = {"not compiled": Run(fp8={}, compiled=False), "other backend": Run(fp8={}, backend="aot_eager")}
    calls |= {name: (refused, (run, str(folder / name))) for name, run in wrong.items()}
    first, second = run_ranks(run_each, 2, folder, calls, seconds=1500, collective_seconds=300)
    return first | {"other rank": second}


@needs_torchtitan
@pytest.mark.slow
def test_torchtitans_llama_3_trains_with_full_names_and_a_policy_by_layer(runs: dict[str, Any]) -> None:
    for name, recipes in (("whole", ("delayed", None)), ("by name", ("rowwise", "rowwise"))):
        assert {*runs[name]["gemms"]} == {(f"layers.{i}.{part}", recipes[i]) for i in (0, 1) for part in PARTS}
        for found, expected in zip(runs[name]["losses"], runs["bf16"]["losses"], strict=True):
            assert abs(found - expected) < 0.02 * expected


@needs_torchtitan
@pytest.mark.slow
def test_torchtitans_checkpoint_resumes_bit_identically(runs: dict[str, Any]) -> None:
    whole, resumed = runs["whole"], runs["resumed"]
    assert resumed["losses"] == whole["losses"][2:]
    assert whole["state"].keys() == resumed["state"].keys()
    assert same_bits(whole["state"].values(), resumed["state"].values())


@needs_torchtitan
@pytest.mark.slow
def test_a_checkpoint_of_torchtitan_without_scaling_state_can_be_loaded(runs: dict[str, Any]) -> None:
    assert len(runs["from bf16"]["losses"]) == 1  # after step 2
    assert any(key.startswith("layers.0.") for key in runs["from bf16"]["state"])


@needs_torchtitan
@pytest.mark.slow
def test_torchtitans_qwen_3_runs_in_fp8(runs: dict[str, Any]) -> None:
    assert {recipe for _, recipe in runs["qwen3"]["gemms"]} == {"tensorwise"}


@needs_torchtitan
@pytest.mark.slow
def test_torchtitans_losses_with_generated_code_are_those_of_its_own_inductor(runs: dict[str, Any]) -> None:
    for found, expected in zip(runs["inductor fp8"]["losses"], runs["inductor"]["losses"], strict=True):
        assert abs(found - expected) < 0.001 * expected
    assert {recipe for _, recipe in runs["inductor fp8"]["gemms"]} == {"tensorwise"}


@needs_torchtitan
@pytest.mark.slow
def test_torchtitans_fsdp_gathers_weights_in_fp8_under_tensorwise(runs: dict[str, Any]) -> None:
    """Its own converter has neither (docs/trainers.md)."""
    layers = {f"{layer}.weight" for layer, _ in runs["inductor fp8"]["gemms"]}
    assert {*runs["inductor fp8"]["gathered_in_fp8"]} == layers


@needs_torchtitan
@pytest.mark.slow
def test_torchtitans_tensor_parallelism_gathers_fp8_under_full_names(runs: dict[str, Any]) -> None:
    for found, expected in zip(runs["parallel"]["losses"], runs["parallel bf16"]["losses"], strict=True):
        assert abs(found - expected) < 0.002 * expected
    assert {*runs["parallel"]["gemms"]} == {*runs["whole"]["gemms"]}
    sent = r"all_gather +\d+ +forward +layers\.\*\.attention\.qkv_linear\.wqkv input +uint8"
    assert re.search(sent, runs["parallel"]["report"])


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.parametrize("name", ["stages", "interleaved"])
def test_torchtitans_pipelines_run_in_fp8_and_resume_bit_identically(runs: dict[str, Any], name: str) -> None:
    for found, expected in zip(runs[name]["losses"], runs[f"{name} bf16"]["losses"], strict=True):
        assert abs(found - expected) < 0.002 * expected
    layers = {"stages": ("01", "23"), "interleaved": ("02", "13")}[name]
    for of_rank, own in zip((runs, runs["other rank"]), layers, strict=True):
        whole, resumed = of_rank[name], of_rank[f"{name}, resumed"]
        assert {fqn.split(".")[1] for fqn, _ in whole["gemms"]} == {*own}
        assert {fqn.split(".")[1] for fqn, recipe in whole["gemms"] if recipe == "delayed"} == {*own} - {"1"}
        assert resumed["losses"] == whole["losses"][2:]
        assert whole["state"].keys() == resumed["state"].keys()
        assert same_bits(whole["state"].values(), resumed["state"].values())


@needs_torchtitan
@pytest.mark.slow
def test_a_checkpoint_of_torchtitans_pipeline_goes_on_under_another_cut(runs: dict[str, Any]) -> None:
    """Layers 0 and 2, 1 and 3 become 0 and 1, 2 and 3: the third step is the same, bit for bit."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name in ("interleaved", "interleaved, cut anew"):
        states[name] = {**runs[name]["state"], **runs["other rank"][name]["state"]}
        assert runs[name]["losses"][-1] == runs["interleaved"]["losses"][2]
    whole, anew = states.values()
    assert whole.keys() == anew.keys()
    assert same_bits(whole.values(), [anew[key] for key in whole])


@needs_torchtitan
@pytest.mark.slow
def test_torchtitans_deepseek_v3_keeps_its_router_and_attention_in_high_precision(runs: dict[str, Any]) -> None:
    for found, expected in zip(runs["deepseek"]["losses"], runs["deepseek bf16"]["losses"], strict=True):
        assert abs(found - expected) < 0.002 * expected
    left = {fqn for fqn, recipe in runs["deepseek"]["gemms"] if recipe is None}
    assert left == {"layers.1.moe.router.gate", *(f"layers.{i}.attention.inner_attention" for i in (0, 1))}
    assert ("layers.1.moe.routed_experts.inner_experts", "tensorwise") in runs["deepseek"]["gemms"]
    assert runs["deepseek"]["report"].startswith("51 of 66 GEMMs in FP8, 93 % of the FLOPs of all products")


@needs_torchtitan
@pytest.mark.slow
def test_torchtitan_refuses_names_where_it_has_flex_attention_until_it_is_patched(tmp_path: Path) -> None:
    compiling = titan("distributed.compile")
    attention = titan("models.common.attention").FlexAttention
    with torch.device("meta"):
        model = nn.Sequential(attention(attention.Config()))
    with pytest.raises(
        ValueError, match="Model uses FlexAttention but compile backend 'fp8graph:blockwise' is neither"
    ):
        compiling._maybe_regional_inductor_backend(model, "fp8graph:blockwise")
    file = tmp_path / "torchtitan" / "distributed" / "compile.py"
    file.parent.mkdir(parents=True)
    file.write_text(Path(compiling.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    patched: dict[str, Any] = {"__name__": "patched"}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), patched)
    for name in ("inductor", "fp8graph", "fp8graph:blockwise"):
        assert patched["_maybe_regional_inductor_backend"](model, name) == name
    with pytest.raises(ValueError, match="compile backend 'eager' is neither"):
        patched["_maybe_regional_inductor_backend"](model, "eager")


@needs_torchtitan
@pytest.mark.slow
def test_torchtitan_and_the_page_show_the_same_output_and_messages(runs: dict[str, Any]) -> None:
    """The losses of the page within 0.1 %, as another CPU rounds otherwise."""
    page = PAGE.read_text(encoding="utf-8")
    for name in ("not compiled", "other backend"):
        assert runs[name].partition(f"{NAME}: ")[2].partition(", or name one of")[0] in page
    shown = re.findall(r"^step (\d)  loss ([\d.]+)$", page, re.MULTILINE)
    for (step, loss), found in zip(shown, runs["whole"]["losses"], strict=True):
        assert abs(float(loss) - found) < 0.001 * found, (step, found)
    assert runs["whole"]["report"].splitlines()[0] in page.splitlines()


@needs_torchtitan
@pytest.mark.slow
def test_torchtitan_takes_the_command_of_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    command = shlex.split(re.findall(r"^torchrun [^`]*", page.replace("\\\n", ""), re.MULTILINE)[0])
    config = titan("config").ConfigManager().parse_args(command[command.index("--module") :])
    assert config.compile.enable
    assert config.override.imports == [("fp8graph.integrations.torchtitan.fp8", {"policy": "policy.toml"})]
    lines = titan("config.override").apply_overrides(titan("config.override").OverrideConfig(imports=[NAME]), config)
    assert lines == [
        f"[Override] {NAME}: checkpoint CheckpointManager.Config -> CheckpointManager.Config with fp8graph"
    ]
    assert lines[0] in page.splitlines()


def pipeline_of_the_page() -> str:
    """The code on the page that registers passes for the graph trainer."""
    page = PAGE.read_text(encoding="utf-8")
    return page.split("### Its graph trainer")[1].split("```python\n")[1].split("```")[0]


@needs_torchtitan
@pytest.mark.slow
def test_torchtitans_graph_trainer_runs_the_pipeline_of_the_page(tmp_path: Path) -> None:
    """Its tracer and passes, on one process: losses, and gradients, beside those of the graph in high precision."""
    policy = {"extends": "default", **BY_LAYER, "default": "tensorwise"}
    found = graph_trained(0, pipeline_of_the_page(), policy, str(tmp_path), generated=True)
    layers = {(f"layers.{i}.{part}", None if i else "tensorwise") for i in (0, 1) for part in PARTS}
    assert found["gemms"] == {*layers, ("lm_head", None)}  # the loss reads the head's output
    assert all(abs(loss - found["wanted"]) < 0.002 * found["wanted"] for loss in found["losses"])
    assert found["decibels"] > 15


@needs_torchtitan
@pytest.mark.slow
def test_torchtitans_graph_trainer_gathers_fp8_and_shares_delayed_scales_on_ranks(tmp_path: Path) -> None:
    policy = {"extends": "default", **BY_LAYER}
    arguments = (pipeline_of_the_page(), policy, str(tmp_path))
    found = run_ranks(graph_trained, 2, tmp_path, *arguments, seconds=900, collective_seconds=300)
    for of_rank in found:
        layers = {(f"layers.{i}.{part}", None if i else "delayed") for i in (0, 1) for part in PARTS}
        assert of_rank["gemms"] == {*layers, ("lm_head", None)}
        assert all(abs(loss - of_rank["wanted"]) < 0.002 * of_rank["wanted"] for loss in of_rank["losses"])
        assert of_rank["decibels"] > 15
        assert of_rank["sent"] == {(f"layers.0.{part} weight", "uint8") for part in PARTS}
    assert same_bits(found[0]["state"], found[1]["state"])
    assert len({*found[0]["losses"]}) == 3  # each step has the scales of those before it
