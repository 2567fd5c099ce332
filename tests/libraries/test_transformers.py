"""FP8Linear of transformers: multiplied as it is stored, and trained on with LoRA."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as checkpoint_of
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations import fbgemm_fp8, finegrained_fp8, mxfp4
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear
from transformers.utils.quantization_config import FineGrainedFP8Config

import fp8graph
from fp8_checkpoints import BF16, CONFIG, E4M3, E8M0, F32, IDS, any_device
from fp8graph import Policy, Rule
from fp8graph.numerics import sqnr_db
from helpers import bits, first_fast, first_slow, same_bits
from parallelism import compiled_block, sharded_block
from ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
    # PEFT expects experts in every DeepSeek-V3
    pytest.mark.filterwarnings("ignore:target_parameters=:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning"),
]

N, K = 256, 384


def layer(n: int = N, k: int = K, **settings: Any) -> FP8Linear:
    """An FP8Linear with random numbers; its weight asks for a gradient, as after from_pretrained."""
    random = torch.Generator().manual_seed(n + k)
    made = cast(Any, FP8Linear)(k, n, **{"block_size": (128, 128), **settings})
    with torch.no_grad():
        made.weight.copy_((torch.randn(n, k, generator=random) * 100).clamp(-448, 448))
        scales = torch.rand(made.weight_scale_inv.shape, generator=random) / 1000 + 0.001
        made.weight_scale_inv.copy_(scales)
        if made.activation_scale is not None:
            made.activation_scale.fill_(0.02)
    return made


def numbers(module: Any) -> Tensor:
    """The weight in float64."""
    scale = module.weight_scale_inv.detach().double()
    if scale.ndim:
        rows, columns = module.block_size
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: module.weight.shape[0]]
    return module.weight.detach().double() * (scale[:, : module.weight.shape[1]] if scale.ndim else scale)


def of_experts(module: Any, name: str) -> Tensor:
    """The weights of experts in float64."""
    data, scale = getattr(module, name).detach().double(), getattr(module, f"{name}_scale_inv").detach().double()
    rows, columns = module.block_size
    if name == "gate_up_proj" and data.shape[1] <= rows:
        rows = data.shape[1] // 2
    scale = scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
    return data * scale[:, : data.shape[1], : data.shape[2]]


def run(module: nn.Module, **settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, fp8graph.Report]:
    fp8graph.compile(module, compiler="eager", fullgraph=True, **settings)
    x = torch.randn(64, K, dtype=BF16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = module(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    return x.detach(), y.detach(), dy, cast(Tensor, x.grad), fp8graph.backend_of(module).report


@pytest.mark.parametrize(
    ("settings", "recipe"),
    [
        ({}, "blockwise"),
        ({"scale_fmt": "ue8m0"}, "blockwise"),
        ({"block_size": None}, "rowwise"),
        ({"block_size": None, "activation_scheme": "static"}, "tensorwise"),
    ],
)
def test_numbers(settings: dict[str, Any], recipe: str) -> None:
    module = layer(**settings)
    x, y, dy, dx, report = run(module)
    assert [(gemm.gemm, gemm.recipe) for gemm in report.gemms] == [("fprop", recipe), ("dgrad", recipe)]
    assert sqnr_db(x.double() @ numbers(module).t(), y) > 27
    assert sqnr_db(dy.double() @ numbers(module), dx) > 25
    assert module.weight.requires_grad
    assert module.weight.grad is None
    assert "quantize_weight" not in report.graphs[0].after


def test_rows_that_fill_no_tile_are_multiplied_as_they_are() -> None:  # DeepSeek-V3: 576 = 4.5 tiles
    module = layer(n=160)
    x, y, dy, dx, report = run(module)
    assert {gemm.recipe for gemm in report.gemms} == {"blockwise"}
    assert sqnr_db(x.double() @ numbers(module).t(), y) > 27
    assert sqnr_db(dy.double() @ numbers(module), dx) > 25


def test_tiles_of_mxfp8_are_multiplied_as_they_are() -> None:  # MiniMax-M3, Inkling 2
    module = layer(block_size=(1, 32), scale_fmt="ue8m0")
    x, y, dy, dx, report = run(module)
    assert [(gemm.gemm, gemm.recipe) for gemm in report.gemms] == [("fprop", "mxfp8"), ("dgrad", None)]
    assert sqnr_db(x.double() @ numbers(module).t(), y) > 27
    assert sqnr_db(dy.double() @ numbers(module), dx) > 45


def test_one_static_scale_stands_for_those_of_tiles() -> None:
    module = layer(activation_scheme="static")
    x, y, _, _, report = run(module)
    assert {gemm.recipe for gemm in report.gemms} == {"blockwise"}
    rounded = (x.float() / 0.02).clamp(-448, 448).to(E4M3).double() * 0.02
    assert sqnr_db(rounded @ numbers(module).t(), y) > 45


def test_the_device_multiplies_each_natively() -> None:
    model = nn.Sequential(layer(512, 512), layer(512, 512, block_size=None))
    fp8graph.adopt(model)
    x = torch.randn(64, 512, dtype=BF16, requires_grad=True)
    report = fp8graph.explain(model, x, target="sm_90")
    assert {gemm.execution for gemm in report.gemms} == {"native"}


def test_in_eager_the_library_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layer()
    state = {name: x.data_ptr() for name, x in module.state_dict().items()}
    fp8graph.adopt(module)
    assert {name: x.data_ptr() for name, x in module.state_dict().items()} == state
    monkeypatch.setattr(FP8Linear, "forward", lambda _, x: x + 1)
    assert torch.equal(module(torch.zeros(1)), torch.ones(1))


def test_by_name() -> None:
    model = torch.compile(fp8graph.adopt(layer()), backend="fp8graph", options={"compiler": "eager"}, fullgraph=True)
    with torch.no_grad():
        model(torch.randn(64, K, dtype=BF16))
    assert {gemm.recipe for gemm in fp8graph.backend_of(model).report.gemms} == {"blockwise"}


def _pickled(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: fp8graph.adopt(_pickled(model))])
def test_copies_are_adopted(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = fp8graph.compile(nn.Sequential(layer()), compiler="eager", fullgraph=True)
    other: Any = copied(model)
    x = torch.randn(64, K, dtype=BF16)
    with torch.no_grad():
        other[0].weight_scale_inv.mul_(2)
        assert sqnr_db(2 * model(x).double(), other(x)) > 45  # its own scales


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_copy_of_a_compiled_model_of_a_checkpoint_multiplies_as_it_does(copied: Callable[[nn.Module], Any]) -> None:
    model: Any = fp8graph.compile(nn.Sequential(layer(), nn.Sequential(layer(K, N))), compiler="eager")
    x, other = torch.randn(64, K, dtype=BF16), copied(model)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    reports = [fp8graph.backend_of(each).report for each in (model, other)]
    assert [[gemm.recipe for gemm in report.gemms] for report in reports] == [["blockwise"] * 2] * 2
    assert [report.eager_frames for report in reports] == [[], []]


def test_layers_share_code() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = layer(K, K)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    model = nn.Sequential(*(Block() for _ in range(4)))
    counters["stats"].clear()
    fp8graph.compile(model, regions=["Block"], compiler="eager", fullgraph=True)
    with torch.no_grad():
        model(torch.randn(64, K, dtype=BF16))
    assert counters["stats"]["unique_graphs"] == 1


def test_autocast_multiplies_the_bytes() -> None:
    module = fp8graph.compile(layer(), compiler="eager", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        module(torch.randn(64, K))
    assert {gemm.recipe for gemm in fp8graph.backend_of(module).report.gemms} == {"blockwise"}


# LoRA

SIZES: Any = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "dtype": BF16,
}
DEEPSEEK: Any = {
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 128,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,  # then experts
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 128,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(copy.deepcopy(CONFIG)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=64)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **DEEPSEEK)),
}


def checkpoint(name: str, folder: Path) -> Any:
    """A model in FP8 as transformers loads it from a folder that it wrote."""
    torch.manual_seed(0)
    whole: Any = MODELS[name]()
    whole.to(BF16).save_pretrained(folder / "bf16")
    kind: Any = type(whole)
    with any_device():
        made = kind.from_pretrained(folder / "bf16", quantization_config=FineGrainedFP8Config(), dtype=BF16)
        made.save_pretrained(folder / "fp8")
        return kind.from_pretrained(folder / "fp8", dtype=BF16)


def dequantized(model: Any) -> Any:
    """The same model in bf16."""
    other = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear):
            linear = nn.Linear(module.in_features, module.out_features, bias=False, dtype=BF16)
            linear.weight.data.copy_(numbers(module))
            other.set_submodule(name, linear)
        if isinstance(module, FP8Experts):
            experts: Any = other.get_submodule(name)
            for weight in ("gate_up_proj", "down_proj"):
                setattr(experts, weight, nn.Parameter(of_experts(module, weight).to(BF16), requires_grad=False))
            experts.config._experts_implementation = "eager"
    return other


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    torch.manual_seed(1)
    # of a model with experts, PEFT adapts router and experts with other linears: parametrizations, which do not trace
    experts = any(isinstance(module, FP8Experts) for module in model.modules())
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"] if experts else "all-linear"
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets))


def losses(model: Any, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = list[float]()
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@first_slow("name", ["llama", "qwen3", "deepseek_v3"])
def test_lora_multiplies_the_bytes_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    loaded = checkpoint(name, tmp_path)
    stored = {name: module for name, module in loaded.named_modules() if isinstance(module, FP8Linear)}
    assert len(stored) == 2 * (8 if name == "deepseek_v3" else 7)
    before = {name: module.weight.detach().view(torch.uint8).clone() for name, module in stored.items()}
    pointers = {name: module.weight.data_ptr() for name, module in stored.items()}
    reference = losses(adapted(dequantized(loaded)))

    model = fp8graph.compile(adapted(loaded), compiler="eager", fullgraph=True)
    saved = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        found = losses(model)
    assert found == pytest.approx(reference, rel=0.02)
    assert min(found) < found[0], found

    # every FP8 linear is native, by the checkpoint's bytes, forward and backward
    backend = fp8graph.backend_of(model)
    (view,) = backend.report.graphs
    base = [gemm for gemm in view.gemms if any(gemm.fqn.startswith(f"base_model.model.{name}") for name in stored)]
    base = [gemm for gemm in base if ".lora_" not in gemm.fqn]
    assert {gemm.recipe for gemm in base} == {"blockwise"}
    assert {gemm.gemm for gemm in base} == {"fprop", "dgrad"}
    decoded = [line for line in view.after.splitlines() if "fp8graph.stored_weight(" in line]
    assert len(decoded) == (2 if name == "deepseek_v3" else 0)  # dgrad of experts
    assert all(": bf16[4, " in line for line in decoded)
    assert "quantize_weight" not in view.after

    # one byte per weight: no copy in high precision among the inputs, in the graph, or kept for backward
    shapes = {tuple(module.weight.shape) for module in stored.values()}
    either = shapes | {shape[::-1] for shape in shapes}
    lines = [line for line in view.after.splitlines() if ": " in line]
    head = {"[512, 256]", "[256, 512]"}  # of embeddings and the head, in bf16
    for shape in either:
        text = str([*shape])
        results = [line.split(" = ")[0] for line in lines]
        wide = [line for line in results if line.endswith(f": bf16{text}")]  # FP32: of a GEMM that a CPU emulates
        assert text in head or not wide, wide
    whole: Any = model
    kept = {id(x) for x in whole.get_base_model().get_output_embeddings().parameters()}
    kept |= {id(x) for x in whole.get_base_model().get_input_embeddings().parameters()}
    for x in saved:
        assert x.dtype not in (BF16, F32) or tuple(x.shape) not in either or id(x) in kept or x.ndim != 2
    sizes = sum(module.weight.numel() for module in stored.values())
    scales = sum(4 * module.weight_scale_inv.numel() for module in stored.values())
    assert backend.weights.bytes <= sizes + scales  # one transposed copy, in FP8

    for name, module in stored.items():
        assert module.weight.dtype == E4M3
        assert module.weight.data_ptr() == pointers[name]
        assert torch.equal(module.weight.detach().view(torch.uint8), before[name])


@pytest.mark.slow
def test_lora_is_native_where_the_device_multiplies_tiles(tmp_path: Path) -> None:
    model = adapted(checkpoint("llama", tmp_path))
    report = fp8graph.explain(fp8graph.adopt(model), input_ids=IDS, labels=IDS, use_cache=False, target="sm_90")
    base = [gemm for gemm in report.gemms if gemm.fqn.endswith("base_layer")]
    assert {(gemm.gemm, gemm.execution) for gemm in base} == {("fprop", "native"), ("dgrad", "native")}
    assert len(base) == 2 * 14 - 3  # the first layer's q, k and v need no gradient of their input


# Experts

TOKENS, EXPERTS = 48, 4


def experts(**settings: Any) -> Any:
    """Four experts with random numbers."""
    config = DeepseekV3Config(**SIZES, **DEEPSEEK)
    config._experts_implementation = "grouped_mm"
    replaced: Any = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.Module()})})
    replaced.config = replaced["mlp"]["experts"].config = config
    replace_with_fp8_linear(replaced, quantization_config=FineGrainedFP8Config(**settings))
    made: Any = replaced["mlp"]["experts"].to_empty(device="cpu")
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, x in made.named_parameters():
            if x.dtype == E4M3:
                x.copy_((torch.randn(x.shape, generator=random) * 100).clamp(-448, 448))
            elif "activation" in name:
                x.fill_(0.02)
            else:
                x.copy_(torch.rand(x.shape, generator=random) / 1000 + 0.001)
    return made.requires_grad_(False)


def routed() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, 256, generator=random).to(BF16)
    weights, index = torch.rand(TOKENS, EXPERTS, generator=random).topk(2)
    return x, index, weights.to(BF16)


def of_all_experts(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Their output in float64, every token through every expert."""
    gate_up, down = (of_experts(module, name) for name in ("gate_up_proj", "down_proj"))
    gate, up = torch.einsum("tk,enk->etn", x, gate_up).chunk(2, -1)
    each = torch.einsum("etk,enk->etn", nn.functional.silu(gate) * up, down)
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.double).scatter(1, index, weights.double())
    return torch.einsum("te,etn->tn", chosen, each)


@first_fast("settings", [{}, {"scale_fmt": "ue8m0"}, {"weight_block_size": [96, 128]}])
def test_experts_are_multiplied_as_they_are(settings: dict[str, Any]) -> None:
    module, (x, *route) = experts(**settings), routed()
    given = x.clone().requires_grad_()
    exact = x.double().requires_grad_()
    expected = of_all_experts(module, exact, *route)
    fp8graph.compile(module, compiler="eager", fullgraph=True)
    y = module(given, *route)
    y.backward(dy := torch.randn_like(y))
    expected.backward(dy.double())
    assert sqnr_db(expected.detach(), y.detach()) > 22
    assert sqnr_db(cast(Tensor, exact.grad), cast(Tensor, given.grad)) > 22
    (view,) = fp8graph.backend_of(module).report.graphs
    assert {(gemm.op, gemm.gemm): gemm.recipe for gemm in view.gemms} == {
        ("grouped_mm", "fprop"): "blockwise",
        ("grouped_mm", "dgrad"): None,
    }
    assert "quantize_weight" not in view.after
    assert all("a transposed copy of each" in gemm.reason for gemm in view.gemms if gemm.gemm == "dgrad")


def test_experts_where_no_grouped_gemm_takes_tiles() -> None:
    module, (x, *route) = fp8graph.adopt(experts()), routed()
    with torch.no_grad():
        report = fp8graph.explain(module, x, *route, target="sm_90")
    assert {gemm.execution for gemm in report.gemms} == {"high precision"}
    reason = "no grouped FP8 GEMM with one scale per tile: torch 2.11 to 2.15 has none"
    assert all(reason in gemm.reason and "; a rule" in gemm.reason for gemm in report.gemms)


def test_experts_with_static_scales_of_their_own() -> None:
    module, (x, *route) = experts(activation_scheme="static"), routed()
    expected = of_all_experts(module, x.double(), *route)
    fp8graph.compile(module, compiler="eager", fullgraph=True)
    with torch.no_grad():
        assert sqnr_db(expected, module(x, *route)) > 40
    report = fp8graph.backend_of(module).report
    assert all("a static scale for the activations of each expert" in gemm.reason for gemm in report.gemms)


class Routed(nn.Module):
    """A linear that is trained, a router, and experts in FP8."""

    def __init__(self, checkpointed: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.router = nn.Linear(256, 256), nn.Linear(256, EXPERTS)
        self.experts, self.checkpointed = experts(**settings), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return x + (checkpoint_of(self.sent, x, use_reentrant=False) if self.checkpointed else self.sent(x))

    def sent(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.experts(x, index, weights)


def kernel(
    x: Tensor, weight: Tensor, scale_inv: Tensor, block: Any, bias: Any = None, activation_scale: Any = None
) -> Tensor:
    """The numbers of transformers' Triton kernel, in float64: tokens in E4M3 with one scale for each 1x128."""
    tiles = x.float().unflatten(-1, (-1, 128))
    scale = tiles.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    rounded = (tiles / scale).clamp(-448, 448).to(E4M3).double() * scale
    scales = scale_inv.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    exact = weight.double() * scales[: weight.shape[0], : weight.shape[1]]
    return (rounded.flatten(-2) @ exact.t()).to(x.dtype)


def gradients(model: nn.Module) -> list[Tensor]:
    """The output, and the gradients of the input, the linear and the router."""
    x = routed()[0].float().requires_grad_()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    trained = [p for name, p in model.named_parameters() if "experts" not in name]
    return [y.detach(), *(cast(Tensor, p.grad) for p in (x, *trained))]


@pytest.mark.parametrize(
    ("checkpointed", "compiler"),
    [(False, "eager"), *(pytest.param(True, each, marks=pytest.mark.slow) for each in ("eager", "inductor"))],
)
def test_gradients_through_experts_are_those_of_transformers(
    checkpointed: bool, compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its eager loop over the experts, its own backward; its kernel does not run on a CPU."""
    reference, model = Routed(), Routed(checkpointed)
    reference.experts.config._experts_implementation = "eager"
    with monkeypatch.context() as patched:
        patched.setattr(finegrained_fp8, "finegrained_fp8_linear", kernel)
        expected = gradients(reference)
    assert len(expected) == 6
    high_precision = Policy([Rule("before", None), Rule("router", None)], extends="default")
    fp8graph.compile(model, policy=high_precision, compiler=compiler, fullgraph=True)
    for theirs, ours in zip(expected, gradients(model), strict=True):
        assert sqnr_db(theirs.double(), ours) > 115  # FP32 sums in another order: 118 on a CPU without AVX-512
    report = fp8graph.backend_of(model).report
    assert {gemm.recipe for gemm in report.gemms if gemm.op == "grouped_mm" and gemm.gemm == "fprop"} == {"blockwise"}


RANKS = 2


def rows(row: int) -> tuple[Tensor, Tensor]:
    """Tokens of one rank, and what they are to become."""
    random = torch.Generator().manual_seed(row)
    return torch.randn(TOKENS, 256, generator=random), torch.randn(TOKENS, 256, generator=random) * 30


def trained(model: nn.Module, parts: Sequence[int]) -> tuple[list[float], list[Tensor]]:
    """The losses of two steps on the rows ``parts``, and the linear and the router after these."""
    learned = {name: p for name, p in model.named_parameters() if "experts" not in name}
    optimizer = torch.optim.AdamW(learned.values(), lr=1e-3)
    losses: list[float] = []
    for _ in range(2):
        for row in parts:
            x, target = rows(row)
            loss = (model(x) - target).square().mean()
            (loss / len(parts)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    whole = [cast(Any, p).full_tensor() if hasattr(p, "full_tensor") else p for p in learned.values()]
    return losses, [p.detach() for p in whole]


def on_ranks(rank: int) -> Any:
    alone = trained(compiled_block(nn.Sequential(Routed())), range(RANKS))
    wrapped = DistributedDataParallel(compiled_block(nn.Sequential(Routed())), init_sync=False)  # gloo has no FP8
    found = {"alone": (alone[0][rank::RANKS], alone[1])}
    found["ddp"] = trained(wrapped, [rank])
    found["fsdp"] = trained(compiled_block(sharded_block(Routed())), [rank])
    by_hand, x = Routed(), rows(rank)[0]
    for linear in (by_hand.before, by_hand.router):
        linear.to(BF16)
    with torch.no_grad():
        cast_for_gathers = compiled_block(sharded_block(Routed(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16)))(x)
        expected = compiled_block(nn.Sequential(by_hand))(x.to(BF16))
    return found, cast_for_gathers, expected


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_experts_on_two_ranks_are_trained_through_as_on_one(tmp_path: Path) -> None:
    """DDP; FSDP2, which gathers the experts' codes as they are, whatever ``param_dtype`` says."""
    for found, cast_for_gathers, expected in run_ranks(on_ranks, RANKS, tmp_path):
        losses, parameters = found["alone"]
        assert losses[1] < losses[0]
        for how in ("ddp", "fsdp"):
            assert found[how][0] == losses
            assert same_bits(found[how][1], parameters)
        assert torch.equal(cast_for_gathers, expected)


def test_experts_are_frozen_whatever_requires_grad_says() -> None:
    model = Routed()
    model.experts.requires_grad_(True)  # as after from_pretrained
    before = {name: bits(x).clone() for name, x in model.experts.named_parameters()}
    fp8graph.compile(model, compiler="eager", fullgraph=True)
    gradients(model)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert all(x.grad is None for x in model.experts.parameters())
    assert all(torch.equal(bits(x), before[name]) for name, x in model.experts.named_parameters())
    assert model.router.weight.grad is not None


def test_adapters_of_experts_parameters_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    model = peft.get_peft_model(cast(Any, Routed()), config)
    message = "^base_model.model.experts: PEFT adapts down_proj of FP8Experts, which is in FP8: .* target_parameters"
    for refused in (fp8graph.adopt, fp8graph.compile):
        with pytest.raises(fp8graph.ConfigError, match=message):
            refused(model)
    dequantized = peft.get_peft_model(
        cast(Any, nn.ModuleDict({"up": nn.Linear(8, 8)})),
        peft.LoraConfig(r=4, target_modules=[], target_parameters=["up.weight"]),
    )
    fp8graph.adopt(dequantized)


@pytest.mark.parametrize("strict", [False, True])
def test_experts_in_fp4_are_left_to_transformers_by_name(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential()
    model.add_module("a", layer())
    model.add_module("mlp", Routed(expert_dtype="fp4", scale_fmt="ue8m0"))
    model.add_module("more", experts(expert_dtype="fp4"))
    message = (
        r"mlp\.experts \(FP8Experts\) has weights in torch\.int8 of a form that fp8graph does not read: "
        "they are left to the kernels of transformers, and so it is with 1 more"
    )
    if strict:
        with pytest.raises(fp8graph.Fp8CoverageError, match=message):
            fp8graph.compile(model, strict=True)
        return
    with caplog.at_level("WARNING", "fp8graph"):
        fp8graph.compile(model)
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.match(message, said)


def test_other_quantized_layers_of_transformers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config = GptOssConfig(hidden_size=64, intermediate_size=64, num_local_experts=2)
    for kind, made in (
        ("Mxfp4GptOssExperts", mxfp4.Mxfp4GptOssExperts(config)),
        ("FbgemmFp8Linear", fbgemm_fp8.FbgemmFp8Linear(64, 64, False)),
    ):
        with caplog.at_level("WARNING", "fp8graph"):
            fp8graph.compile(nn.Sequential(nn.Linear(64, 64), made))
        assert f"1 ({kind}) has weights in torch." in caplog.text
    caplog.clear()
    fp8graph.compile(nn.Sequential(layer(), experts(), nn.Embedding(8, 8)))
    assert not caplog.records


def test_scales_of_exponents_are_read_as_they_are() -> None:
    module = layer(scale_fmt="ue8m0")
    assert module.weight_scale_inv.dtype == E8M0
    *_, report = run(module)
    assert "float8_e8m0fnu[2, 3]" in report.graphs[0].after


@first_fast("breaks", [False, True])
@first_fast("how", ["name", "backend", "function"])
def test_torch_compile_adopts_in_the_first_call(how: str, breaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the library's layer broke the graph, and nothing but its first part had reached the backend."""

    def librarys(self: Any, x: Tensor) -> Tensor:
        if breaks:
            torch._dynamo.graph_break()
        return nn.functional.linear(x, self.weight.to(x.dtype))

    monkeypatch.setattr(FP8Linear, "forward", librarys)
    model, x = Two(), torch.randn(64, K, dtype=BF16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = fp8graph.compile(copy.deepcopy(model), compiler="eager")(x)
        if how == "function":
            step: Any = torch.compile(lambda model, x: model(x), backend=fp8graph.Backend(compiler="eager"))
            y, backend = step(model, x), fp8graph.backend_of(step)
        else:
            backend = fp8graph.Backend(compiler="eager")
            named: Any = {"backend": "fp8graph", "options": {"compiler": "eager"}}
            given: Any = named if how == "name" else {"backend": backend}
            compiled: Any = torch.compile(model, **given)
            y, backend = compiled(x), fp8graph.backend_of(compiled)
    assert torch.equal(y, expected)
    assert len(backend.report.graphs) == 1
    assert [gemm.reason.startswith("weight stored in") for gemm in backend.report.gemms] == [False, True]


@first_fast("how", ["name", "backend", "function", "global"])
def test_torch_compile_adopts_layers_that_cannot_be_traced(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, without the kernels of transformers: TorchRuntimeError of _load_finegrained_fp8_kernel."""
    model, x = Two(), torch.randn(64, K, dtype=BF16, generator=torch.Generator().manual_seed(1))
    by_name: Any = {"backend": "fp8graph", "options": {"compiler": "eager"}, "fullgraph": True}
    with_backend: Any = {"backend": fp8graph.Backend(compiler="eager"), "fullgraph": True}
    torch._dynamo.reset()  # it clears the callbacks of compiles
    with torch.no_grad():
        expected = fp8graph.compile(copy.deepcopy(model), compiler="eager")(x)
        if how == "function":
            compiled: Any = torch.compile(lambda model, x: model(x), **by_name)
            y = compiled(model, x)
        elif how == "global":
            monkeypatch.setitem(globals(), "MODEL", model)
            compiled = torch.compile(through_global, **by_name)
            y = compiled(x)
        else:
            compiled = torch.compile(model, **(with_backend if how == "backend" else by_name))
            y = compiled(x)
    assert torch.equal(y, expected)
    recipes = [gemm.recipe for gemm in fp8graph.backend_of(compiled).report.gemms]
    assert recipes[-1] == "blockwise"


MODEL: Any = None


def through_global(x: Tensor) -> Tensor:
    return MODEL(x)


def test_other_backends_adopt_nothing() -> None:
    model = Two()
    with torch.no_grad(), pytest.raises(Exception, match="finegrained-fp8 kernel unavailable"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(64, K, dtype=BF16))
    assert "forward" not in model.second.__dict__


class Two(nn.Module):
    """A linear in high precision, then one of the library."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(K, K, dtype=BF16), layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())
