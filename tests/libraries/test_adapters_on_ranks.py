"""Adapters of PEFT on a base in FP8, trained on two ranks; merged on one, into the bytes that one rank makes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph.libraries.stored_linear import StoredLinear, StoredWeight
from helpers import bits, same_bits
from ranks import run_each, run_ranks

FP8Linear: Any = pytest.importorskip("transformers.integrations.finegrained_fp8").FP8Linear
peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
]

RANKS, STEPS = 2, 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SIZES = {"up": (320, 256), "down": (256, 320)}  # 320 rows are not whole tiles for each rank


class Block(nn.Module):
    """Two linears in FP8 with tiles of 128x128: one of transformers, one of ours."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        made: dict[str, StoredWeight] = {}
        for name, (n, k) in SIZES.items():
            data = (torch.randn(n, k, generator=random) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
            scale = torch.rand(-(-n // 128), -(-k // 128), generator=random) / 1000 + 0.0005
            made[name] = StoredWeight(data=data, scale_inv=scale, scaling="block", block=[128, 128])
        self.norm = nn.LayerNorm(256, dtype=torch.bfloat16)
        self.up, self.down = FP8Linear(256, 320, block_size=(128, 128)), StoredLinear(made["down"])
        self.up.weight = nn.Parameter(made["up"].data, requires_grad=False)
        self.up.weight_scale_inv = nn.Parameter(made["up"].scale_inv, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.blocks[0], x, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return self.blocks[0](x)


def adapted(checkpointed: bool = False) -> Any:
    torch.manual_seed(0)
    model: Any = Model(checkpointed)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False))


def inputs(row: int) -> Tensor:
    return torch.randn(16, 256, generator=torch.Generator().manual_seed(row)).bfloat16()


def shard(model: Any, alone: bool = False, **settings: Any) -> Any:
    """``alone``: the linears in FP8 are gathered by themselves."""
    for block in model.base_model.model.blocks:
        for layer in (block.up.base_layer, block.down.base_layer) if alone else ():
            fully_shard(layer, **settings)
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def compiled(model: Any) -> Any:
    torch._dynamo.reset()  # the limit of recompilations counts those of every model
    kind = type(model.base_model.model.blocks[0]).__name__  # fully_shard makes a subclass
    return fp8graph.compile(model, compiler="eager", regions=[kind])


def train(model: Any, parts: Sequence[int]) -> list[float]:
    """The losses of the rows ``parts`` of the batch, step by step; gradients are their mean."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses: list[float] = []
    for _ in range(STEPS):
        for row in parts:
            loss = (model(inputs(row)).float() - inputs(row + 1).float()).square().mean()
            loss.backward()
            losses.append(loss.item())
        for parameter in trained:
            if len(parts) > 1 and parameter.grad is not None:
                parameter.grad /= len(parts)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adapters(model: Any) -> dict[str, Tensor]:
    """Whole, with the names of PEFT's files: all ranks call it."""
    found = peft.get_peft_model_state_dict(model)
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach() for name, x in found.items()}


def merged(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of the base, the adapters merged, in one process."""
    model = adapted()
    peft.set_peft_model_state_dict(model, trained)
    state = fp8graph.adopt(model).merge_and_unload().state_dict()
    return {name: bits(x) for name, x in state.items()}


def on_one_rank(rank: int) -> Any:
    model = compiled(adapted())
    losses = train(model, range(RANKS))
    return losses[rank::RANKS], merged(adapters(model))


def under_ddp(rank: int) -> Any:
    model = compiled(adapted())
    # torch's broadcast of the parameters at its construction: gloo has no FP8
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        DistributedDataParallel(model)
    wrapped = DistributedDataParallel(model, init_sync=False)
    return train(wrapped, [rank]), merged(adapters(model))


def under_fsdp(rank: int, alone: bool, checkpointed: bool = False) -> Any:
    model = compiled(shard(adapted(checkpointed), alone))
    return train(model, [rank]), merged(adapters(model))


def in_bf16(rank: int) -> Any:
    """FSDP2 casts the adapters for each gather; and the same cast by hand, in one process."""
    model, by_hand = compiled(shard(adapted(), mp_policy=BF16)), adapted()
    for name, parameter in by_hand.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        outputs, expected = model(inputs(rank)), compiled(by_hand)(inputs(rank))
    kinds = {str(x.dtype) for x in model.parameters()}
    return outputs, expected, kinds, train(model, [rank])


def refused(rank: int) -> Any:
    """The errors of set-ups that would compute with codes without scales, or lose the merged numbers."""
    messages: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        with pytest.raises(fp8graph.ConfigError) as error:
            call()
        messages[name] = str(error.value)

    late = shard(compiled(adapted()), mp_policy=BF16)
    note("adopted before", lambda: late(inputs(rank)))
    model = compiled(shard(adapted()))
    before = [bits(x.to_local()).clone() for x in model.parameters()]
    note("sharded", model.merge_adapter)
    model(inputs(rank))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    note("gathered", model.merge_adapter)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert same_bits([bits(x.to_local()) for x in model.parameters()], before)
    return messages


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    calls: dict[str, Any] = {
        "one": (on_one_rank, ()),
        "ddp": (under_ddp, ()),
        "fsdp": (under_fsdp, (False,)),
        "fsdp, each linear": (under_fsdp, (True,)),
        "fsdp, checkpointed": (under_fsdp, (False, True)),
        "bf16": (in_bf16, ()),
        "refused": (refused, ()),
    }
    return run_ranks(run_each, RANKS, tmp_path_factory.mktemp("ranks"), calls, seconds=1500)


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp, each linear", "fsdp, checkpointed"])
def test_losses_and_merged_bytes_are_those_of_one_rank(how: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        (losses, merged_bytes), (expected, expected_bytes) = rank[how], rank["one"]
        assert losses == expected
        assert merged_bytes.keys() == expected_bytes.keys()
        assert all(torch.equal(merged_bytes[name], x) for name, x in expected_bytes.items())
    assert sum(rank["one"][0][-1] for rank in found) < sum(rank["one"][0][0] for rank in found)


def test_codes_are_gathered_as_they_are_whatever_param_dtype_says(found: list[dict[str, Any]]) -> None:
    """FSDP2 would cast them to bf16, without their scales."""
    for rank in found:
        outputs, expected, kinds, losses = rank["bf16"]
        assert torch.equal(outputs, expected)
        assert kinds == {"torch.float8_e4m3fn", "torch.float32", "torch.bfloat16"}
        assert len(losses) == STEPS
    assert sum(rank["bf16"][3][-1] for rank in found) < sum(rank["bf16"][3][0] for rank in found)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("adopted before", "a weight in FP8 arrives in torch.bfloat16: FSDP2 has cast its codes.*after fully_shard"),
        ("sharded", "Linear on FP8Linear: its weight is sharded.*merge them on the checkpoint in one process"),
        ("gathered", "Linear on FP8Linear: its weight is sharded, and what is added to a gathered copy would be lost"),
    ],
)
def test_refused_set_ups_say_what_to_do(case: str, message: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert re.search(message, rank["refused"][case])
