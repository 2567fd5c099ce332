"""FP8GroupedLinear of transformers, and the grouped linears of DeepSeek-V4 that load_checkpoint fills."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Embedding, FP8GroupedLinear
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

import fp8graph
from fp8_checkpoints import BF16
from fp8graph import Policy, Rule
from fp8graph.libraries.stored_linear import StoredGroupedLinear
from fp8graph.numerics import sqnr_db
from helpers import first_fast, same_bits
from parallelism import compiled_block, sharded_block
from ranks import run_ranks

GROUPS, N, K = 4, 128, 256


def layer(**settings: Any) -> Any:
    random = torch.Generator().manual_seed(0)
    settings = {"block_size": (128, 128), **settings}
    made: Any = FP8GroupedLinear(K, GROUPS * N, GROUPS, **settings)
    with torch.no_grad():
        made.weight.copy_((torch.randn(GROUPS * N, K, generator=random) * 100).clamp(-448, 448))
        made.weight_scale_inv.copy_(torch.rand(made.weight_scale_inv.shape, generator=random) / 1000 + 0.001)
        if made.activation_scale is not None:
            made.activation_scale.fill_(0.02)
        if made.bias is not None:
            made.bias.normal_(generator=random)
    return made


def in_double(module: Any, x: Tensor) -> Tensor:
    """By the bf16 layer of DeepSeek-V4, with the decoded numbers."""
    scale = module.weight_scale_inv.detach().double()
    scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if scale.ndim else scale
    exact: Any = DeepseekV4GroupedLinear(K, GROUPS * N, GROUPS).double()
    exact.weight.data = module.weight.detach().double() * scale
    y = exact(x)
    return y if module.bias is None else y + module.bias.detach().double().view(GROUPS, -1)


@first_fast(
    ("settings", "recipe"),
    [
        ({}, "blockwise"),
        ({"has_bias": True, "scale_fmt": "ue8m0"}, "blockwise"),
        ({"block_size": None}, "rowwise"),
        ({"block_size": None, "activation_scheme": "static"}, "tensorwise"),
    ],
)
def test_each_group_is_multiplied_as_it_is_stored(settings: dict[str, Any], recipe: str) -> None:
    module = layer(**settings)
    x = torch.randn(2, 16, GROUPS, K, dtype=BF16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    exact = x.detach().double().requires_grad_()
    expected = in_double(module, exact)
    fp8graph.compile(module, compiler="eager", fullgraph=True)
    y = module(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    assert sqnr_db(expected.detach(), y.detach()) > 27
    assert exact.grad is not None
    assert x.grad is not None
    assert sqnr_db(exact.grad, x.grad) > 25
    report = fp8graph.backend_of(module).report
    assert [(gemm.gemm, gemm.recipe) for gemm in report.gemms] == [("fprop", recipe), ("dgrad", recipe)] * GROUPS
    assert "quantize_weight" not in report.graphs[0].after


@pytest.mark.slow
def test_hopper_multiplies_each_natively() -> None:
    x = torch.randn(64, GROUPS, K, dtype=BF16, requires_grad=True)
    report = fp8graph.explain(fp8graph.adopt(layer()), x, target="sm_90")
    assert [gemm.execution for gemm in report.gemms] == ["native"] * 2 * GROUPS


class Net(nn.Module):
    """A table and a grouped linear in FP8, and a linear between them, which is trained."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear, self.o_a = FP8Embedding(64, K), nn.Linear(K, GROUPS * K), layer()
        self.table.weight.data.copy_(torch.randn(64, K).mul(100).clamp(-448, 448))
        self.table.weight_scale.data.fill_(0.01)
        self.o_a.requires_grad_(False)
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        return checkpoint(self.whole, ids, use_reentrant=False) if self.checkpointed else self.whole(ids)

    def whole(self, ids: Tensor) -> Tensor:
        return self.o_a(self.linear(self.table(ids)).unflatten(-1, (GROUPS, K)))


def ids_of(row: int) -> Tensor:
    return torch.arange(32).reshape(2, 16) + 16 * row


def kernel(
    x: Tensor, weight: Tensor, scale_inv: Tensor, offsets: Tensor, tokens_per_expert: Tensor, block: Any
) -> Tensor:
    """The numbers of transformers' Triton kernel for groups of rows, in float64."""
    tiles = x.float().unflatten(-1, (-1, 128))
    scale = tiles.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    rounded = ((tiles / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale).flatten(-2)
    exact = weight.double() * scale_inv.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    parts = rounded.tensor_split(offsets[:-1].tolist())
    return torch.cat([part @ one.t() for part, one in zip(parts, exact, strict=True)]).to(x.dtype)


def gradients(model: Net) -> list[Tensor]:
    y = model(ids_of(0))
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    return [y.detach(), *(x.grad for x in model.linear.parameters() if x.grad is not None)]


@pytest.mark.parametrize(
    ("checkpointed", "compiler"),
    [(False, "eager"), (True, "eager"), pytest.param(True, "inductor", marks=pytest.mark.slow)],
)
def test_gradients_through_table_and_groups_are_those_of_transformers(
    checkpointed: bool, compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own modules and backward, which is in high precision; its kernel does not run on a CPU."""
    with monkeypatch.context() as patched:
        patched.setattr(finegrained_fp8, "fp8_grouped_matmul", kernel)
        expected = gradients(Net())
    model = Net(checkpointed)
    recipe = fp8graph.Float8BlockScaling(backward_override="dequantized")
    fp8graph.compile(model, policy=Policy([Rule("linear", None)], default=recipe), compiler=compiler, fullgraph=True)
    found = gradients(model)
    assert len(found) == len(expected) == 3
    assert min(sqnr_db(theirs.double(), ours) for theirs, ours in zip(expected, found, strict=True)) > 100


RANKS = 2


def trained(model: nn.Module, parts: Sequence[int]) -> tuple[list[float], list[Tensor]]:
    """The losses of two steps on the rows ``parts``, and the trained linear after these."""
    learned: list[Any] = [x for name, x in model.named_parameters() if "linear" in name]
    optimizer, losses = torch.optim.AdamW(learned, lr=1e-3), list[float]()
    for _ in range(2):
        for row in parts:
            loss = (model(ids_of(row)) - 10 * row).square().mean()
            (loss / len(parts)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [(x.full_tensor() if hasattr(x, "full_tensor") else x).detach() for x in learned]


def on_ranks(rank: int) -> Any:
    losses, whole = trained(compiled_block(nn.Sequential(Net())), range(RANKS))
    found = {"alone": (losses[rank::RANKS], whole)}
    found["ddp"] = trained(DistributedDataParallel(compiled_block(nn.Sequential(Net())), init_sync=False), [rank])
    found["fsdp"] = trained(compiled_block(sharded_block(Net())), [rank])
    return found


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_table_and_groups_on_two_ranks_are_trained_through_as_on_one(tmp_path: Path) -> None:
    for found in run_ranks(on_ranks, RANKS, tmp_path):
        for how in ("ddp", "fsdp"):
            assert found[how][0] == found["alone"][0]
            assert same_bits(found[how][1], found["alone"][1])


def loaded(folder: Path, tile: int) -> tuple[nn.Module, dict[str, Tensor]]:
    scale = torch.rand(-(-GROUPS * N // tile), K // tile, generator=torch.Generator().manual_seed(2)) / 1000 + 0.001
    numbers = torch.randn(GROUPS * N, K, generator=torch.Generator().manual_seed(3)).mul(100)
    data = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)  # torch 2.11 casts larger ones to NaN
    tensors = {"o_a.weight": data, "o_a.weight_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [tile, tile]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    model = nn.Sequential(OrderedDict(o_a=DeepseekV4GroupedLinear(K, GROUPS * N, GROUPS)))
    return fp8graph.load_checkpoint(model, folder), tensors


@pytest.mark.parametrize("tile", [128, 256])  # tiles of 256 rows belong to two groups: they are decoded
def test_load_checkpoint_keeps_the_groups(tile: int, tmp_path: Path) -> None:
    model, tensors = loaded(tmp_path, tile)
    stored: Any = model.get_submodule("o_a")
    assert isinstance(stored, StoredGroupedLinear)
    scale = tensors["o_a.weight_scale_inv"].double().repeat_interleave(tile, 0).repeat_interleave(tile, 1)
    exact: Any = DeepseekV4GroupedLinear(K, GROUPS * N, GROUPS).double()
    exact.weight.data = tensors["o_a.weight"].double() * scale
    x = torch.randn(3, 5, GROUPS, K, generator=torch.Generator().manual_seed(1))
    assert sqnr_db(exact(x.double()).detach(), stored(x)) > 100


def test_exported_again_the_bytes_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    model, tensors = loaded(tmp_path / "in", 128)
    fp8graph.compile(model, compiler="eager")
    with torch.no_grad():
        model(torch.randn(16, GROUPS, K))
    again = load_file(fp8graph.export(model, tmp_path / "out") / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert same_bits([again[name] for name in tensors], list(tensors.values()))
