"""export: the same bytes from every way to compile a model, and words where there is nothing to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Backend, Policy
from fp8graph.backend.multiplied import multiplied_by
from fp8graph.checkpoints import Checkpoint
from helpers import MLP, first_fast, same_bits
from tiny_models import causal_lm

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
Way = Callable[[Any, str], Any]  # compiles a model with a recipe, calls it, and returns what is exported


class Blocks(nn.Module):
    """Two blocks: torch.compile makes one graph of the model, Module.compile of each block one graph for both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def options(recipe: str) -> dict[str, Any]:
    return {"recipe": recipe, "compiler": "eager", "fuse_linears": False}


def loss_of(model: Any) -> Tensor:
    return model(X).square().mean()


def called(model: Any) -> Any:
    for _ in range(2):  # delayed scaling: the first step records what the second takes
        loss_of(model).backward()
    return model


def in_place(model: Any, backend: Any, **options: Any) -> Any:
    model.compile(backend=backend, **options)
    return called(model)


def in_blocks(model: Any, recipe: str) -> Any:
    backend = Backend(**options(recipe))
    for block in model.blocks:
        block.compile(backend=backend)
    return called(model)


def in_wrapped_blocks(model: Any, recipe: str) -> Any:
    backend = Backend(**options(recipe))
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)
    return called(model)


def in_a_function(model: Any, **how: Any) -> Any:
    step = torch.compile(loss_of, **how)
    for _ in range(2):
        step(model).backward()
    return model


WAYS: dict[str, Way] = {
    "torch.compile by name": lambda m, r: called(torch.compile(m, backend="fp8graph", options=options(r))),
    "torch.compile": lambda m, r: called(torch.compile(m, backend=Backend(**options(r)))),
    "Module.compile by name": lambda m, r: in_place(m, "fp8graph", options=options(r)),
    "Module.compile": lambda m, r: in_place(m, Backend(**options(r))),
    "fp8graph.compile with a Backend": lambda m, r: called(fp8graph.compile(m, backend=Backend(**options(r)))),
    "the original of torch.compile": lambda m, r: called(torch.compile(m, backend=Backend(**options(r))))._orig_mod,
    "blocks": in_blocks,
    "wrapped blocks": in_wrapped_blocks,
    "a function": lambda m, r: in_a_function(m, backend=Backend(**options(r))),
    "a function by name": lambda m, r: in_a_function(m, backend="fp8graph", options=options(r)),
}


@pytest.fixture(scope="module", params=["blockwise", "delayed"])
def expected(request: pytest.FixtureRequest) -> tuple[str, dict[str, Tensor]]:
    model = called(fp8graph.compile(Blocks(), **options(request.param)))
    return request.param, dict(fp8graph.quantized_state(model))


@first_fast("way", WAYS)
def test_a_state_and_a_folder_have_the_same_bytes(
    way: str, expected: tuple[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    recipe, state = expected
    model = WAYS[way](Blocks(), recipe)
    found = dict(fp8graph.quantized_state(model))
    assert found.keys() == state.keys()
    assert same_bits([found[name] for name in state], state.values())
    checkpoint = Checkpoint(fp8graph.export(model, tmp_path / "out"))
    assert set(checkpoint.layers) == {f"blocks.{i}.{name}" for i in range(2) for name in ("gate", "up", "down")}
    assert set(checkpoint.shards) == state.keys()
    assert same_bits([checkpoint.shards.tensor(name) for name in state], state.values())


@first_fast("recipe", ["tensorwise", "delayed", "mxfp8"], others=pytest.mark.release)
def test_weights_that_the_graph_itself_quantizes(recipe: str) -> None:
    """Joined linears too: gate and up share their scale."""
    models = [fp8graph.compile(Blocks(), recipe=recipe, compiler="eager", cache_weights=keep) for keep in (True, False)]
    kept, quantized = ({w.parameter: w for w in multiplied_by(fp8graph.backend_of(called(m)), m)} for m in models)
    assert kept.keys() == quantized.keys()
    for name, one in kept.items():
        other = quantized[name]
        assert same_bits([one.data, one.scale_inv], [other.data, other.scale_inv])
        assert [x.input_scale_inv is not None for x in (one, other)] == 2 * [recipe == "delayed"]


def test_blocks_that_are_wrapped_are_written_under_the_models_names(tmp_path: Path) -> None:
    """Those of transformers: it reads the folder. A head that nothing has compiled is on the list of the others."""
    model: Any = causal_lm("Llama")(1).bfloat16()
    names = set(model.state_dict())
    model.model.layers[0] = torch.compile(model.model.layers[0], backend=Backend(**options("blockwise")))
    model(input_ids=torch.zeros(1, 16, dtype=torch.long), use_cache=False)
    checkpoint = Checkpoint(fp8graph.export(model, tmp_path / "out"))
    assert {name for name in checkpoint.shards if not name.endswith("_scale_inv")} == names
    assert checkpoint.quantization.ignore == ("lm_head",)


def test_two_backends_that_call_one_model() -> None:
    model = Blocks()
    first, second = (called(torch.compile(model, backend=Backend(**options(r)))) for r in ("rowwise", "mxfp8"))
    with pytest.raises(fp8graph.ConfigError, match="Blocks is called by code of 2 fp8graph backends: pass the module"):
        next(fp8graph.quantized_state(model))
    dtypes = [dict(fp8graph.quantized_state(x))["blocks.0.up.weight_scale"].dtype for x in (first, second)]
    assert dtypes == [torch.float32, torch.uint8]


def test_nothing_to_write_says_which() -> None:
    model: Any = torch.compile(Blocks(), backend=Backend(**options("rowwise")))
    with pytest.raises(
        fp8graph.ConfigError, match=r"no weight of Blocks .* has not run under the current policy: call"
    ):
        next(fp8graph.quantized_state(model))
    called(model)
    fp8graph.backend_of(model).set_policy(Policy(default=None))
    with pytest.raises(fp8graph.ConfigError, match="has not run under the current policy: call it once"):
        next(fp8graph.quantized_state(model))
    called(model)
    with pytest.raises(fp8graph.ConfigError, match=r"no weight of Blocks .*\.report\) says why"):
        next(fp8graph.quantized_state(model))
    with pytest.raises(TypeError, match="export takes the model, an nn.Module, not <function loss_of"):
        next(fp8graph.quantized_state(loss_of))  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_adapters_of_peft_are_merged_first(merged: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    model = peft.get_peft_model(Blocks(), peft.LoraConfig(r=8, target_modules=["up"], init_lora_weights=False))
    fp8graph.compile(model, **options("rowwise"))
    called(model)
    if merged:
        model.merge_adapter()
    for given in (model, model.base_model.model):
        with pytest.raises(fp8graph.ConfigError, match=r"has modules of PEFT .*model.merge_and_unload\(\) first"):
            fp8graph.export(given, tmp_path / "out")
    if merged:
        model.unmerge_adapter()
    whole = called(fp8graph.compile(model.merge_and_unload().requires_grad_(), **options("rowwise")))
    assert len(Checkpoint(fp8graph.export(whole, tmp_path / "out")).layers) == 6
