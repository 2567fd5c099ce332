"""A GPU adds up what belongs to a token by kernels of one configuration, and what may do otherwise is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph
from fp8graph import Backend, Policy, offline
from fp8graph.compat.attention import FORMS
from fp8graph.errors import ConfigError
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.settings import Settings
from fp8graph.passes.batch_invariance.fix_order import fix_order, refuse_batches
from fp8graph.passes.batch_invariance.fix_sums import fix_sums
from generated import OF_ONE_INDUCTOR
from helpers import NONE, facts_of, first_fast
from tiny_models import causal_lm

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]
POLICY = Policy(default="rowwise", min_speedup=0)
WANTED: dict[str, Any] = {"target": "sm_90", "batch_invariant": True}


def compilation() -> Compilation:
    return Compilation(facts=facts_of(NONE, settings=Settings(**WANTED)))


class Norms(nn.Module):
    """A softmax, both norms, and a linear that is left in high precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.rms = nn.LayerNorm(64), nn.RMSNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(functional.gelu(self.norm(self.up(x))))
        return self.rms(h).softmax(-1)


def test_sums_of_tokens_are_ordered_and_those_of_weights_stay() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Norms(), torch.randn(4, 8, 32, requires_grad=True)
    backend = Backend(POLICY, compiler="eager", **WANTED)
    y = torch.compile(model, backend=backend)(x)
    y.square().sum().backward()
    (view,) = backend.report.graphs
    names = [str(node.target) for node in view.module.graph.nodes]
    assert names.count("fp8graph.ordered_var_mean.default") == 1
    assert names.count("fp8graph.ordered_sum.default") == 2 + 4  # RMSNorm and softmax; what their backwards add up
    left = [node for node in view.module.graph.nodes if node.target is aten.sum.dim_IntList]
    assert {tuple(node.args[1]) for node in left} == {(0, 1), (0,)}  # gradients of norms' weights and of biases
    ours = [y.detach(), *(p.grad for p in model.parameters()), x.grad]
    model.zero_grad()
    x.grad = None
    torch._dynamo.reset()
    y = torch.compile(model, backend=Backend(POLICY, compiler="eager", batch_invariant=True))(x)
    y.square().sum().backward()
    for one, other in zip(ours, [y.detach(), *(p.grad for p in model.parameters()), x.grad], strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_generated_code_adds_up_nothing() -> None:
    """Every sum of a token is in an op of ours, which runs one kernel; what is fused rounds as eager code does."""
    model = Norms().bfloat16()
    report = fp8graph.explain(model, torch.randn(4, 32).bfloat16(), policy=POLICY, training=False, **WANTED)
    kernels = [kernel for kernel in report.kernels if kernel.graph != "weights"]
    generated = [kernel.source for kernel in kernels if kernel.source]
    assert generated
    for source in generated:
        assert "tl.sum(" not in source
        assert "welford" not in source
        assert "tl.atomic_add" not in source
        assert "'enable_fp_fusion': False" in source
    called = [kernel.name for kernel in kernels if not kernel.source]
    assert {name.removeprefix("torch.ops.fp8graph.").partition(".")[0] for name in called} == {
        *("ordered_scaled_mm", "ordered_sum", "ordered_var_mean")
    }


def test_experts_put_their_tokens_back_in_one_order() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    model = causal_lm("Qwen3Moe", **sizes)(1).bfloat16()
    backend = Backend(POLICY, compiler="eager", **WANTED)
    ids = torch.randint(3, 256, (2, 16))
    torch.compile(model, backend=backend)(ids, labels=ids, use_cache=False).loss.backward()
    (view,) = backend.report.graphs
    names = [str(node.target).removeprefix("fp8graph.").partition(".")[0] for node in view.module.graph.nodes]
    counts = {name: names.count(name) for name in names if name.startswith("ordered_")}
    # backward of what each token is sent to, and of the embedding, which is masked from torch 2.13 on
    assert counts["ordered_index_put"] + counts.get("ordered_masked_index_put", 0) == 3 + 1
    assert counts["ordered_scaled_grouped_mm"] == 4


def test_a_layer_is_in_fp8_for_few_tokens_as_for_many() -> None:
    """``min_speedup`` would leave it in bf16 for few: other bits."""
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False)).bfloat16().to("meta")
    for batch_invariant, wanted in ((True, ["rowwise"] * 2), (False, [None, "rowwise"])):
        recipes: list[str | None] = []
        for rows in (8, 8192):
            x, settings = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta"), dict(WANTED)
            settings["batch_invariant"] = batch_invariant
            torch._dynamo.reset()
            report = fp8graph.explain(model, x, policy=Policy(default="rowwise"), training=True, **settings)
            recipes.append(report.gemms[0].recipe)
        assert recipes == wanted


class Running(nn.Module):
    """A sum of everything before a token."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).cumsum(-1)


def test_sums_of_unknown_order_are_refused() -> None:
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match=r"hold for\n  the model: aten\.cumsum\.default may add up in another order"):
        torch.compile(Running(), backend=Backend(POLICY, compiler="eager", **WANTED))(torch.randn(4, 32))


Q, K = (2, 4, 6, 16), (2, 2, 6, 16)


def biased(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    out, logsumexp, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0)
    more = out, logsumexp, seed, offset, 0.0, [True] * 4, False
    return out, *aten._scaled_dot_product_efficient_attention_backward(grad, q, k, v, bias, *more)


def test_the_gradient_of_a_mask_is_refused() -> None:
    with FakeTensorMode():
        fakes = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in (Q, Q, Q, Q, (2, 4, 6, 6))]
        module = make_fx(biased)(*fakes)
    with pytest.raises(ConfigError, match=r"hold for\n  the model: the gradient of an attention mask has no order"):
        refuse_batches(module.graph, compilation())


def flash(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    of_queries, of_keys, longest, longest_key, seed, offset = out[2:8]
    lengths = of_queries, of_keys, longest, longest_key
    more = *lengths, 0.0, True, seed, offset
    return out[0], *aten._scaled_dot_product_flash_attention_backward(grad, q, k, v, out[0], out[1], *more)


def memory_efficient(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    out, logsumexp, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
    more = out, logsumexp, seed, offset, 0.0, [True, True, True, False], True
    return out, *aten._scaled_dot_product_efficient_attention_backward(grad, q, k, v, None, *more)[:3]


def cudnn(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    out = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    of_queries, of_keys, longest, longest_key, seed, offset = out[2:8]
    more = seed, offset, None, of_queries, of_keys, longest, longest_key, 0.0, True
    return out[0], *aten._scaled_dot_product_cudnn_attention_backward(grad, q, k, v, out[0], out[1], *more)


@first_fast("function", [flash, memory_efficient, cudnn], ids=["flash", "memory-efficient", "cuDNN"])
def test_the_attention_of_a_gpu_is_ordered(function: Any) -> None:
    """As a GPU's graph has it, forward and backward; run on the CPU, it is torch's attention."""
    with FakeTensorMode():
        fakes = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in (Q, K, K, Q)]
        module = make_fx(function)(*fakes)
    assert any(node.target in FORMS for node in module.graph.nodes)
    refuse_batches(module.graph, compilation())  # nothing: no dropout
    fix_order(module.graph, compilation())
    fix_sums(module.graph, compilation())
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    targets = [node.target for node in module.graph.nodes if isinstance(node, fx.Node)]
    assert not any(target in FORMS or target in [form.backward for form in FORMS.values()] for target in targets)
    inputs = [torch.randn(size, dtype=torch.bfloat16) for size in (Q, K, K, Q)]
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected.backward(inputs[3])
    out, dq, *others = module(*inputs)
    torch.testing.assert_close(out, expected.detach(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(dq, q.grad, rtol=2e-2, atol=2e-2)
    for gradient, leaf in zip(others, (k, v), strict=True):
        assert leaf.grad is not None
        gradient = gradient if gradient.shape == leaf.shape else gradient.unflatten(1, (2, 2)).sum(2)
        torch.testing.assert_close(gradient, leaf.grad, rtol=3e-2, atol=3e-2)


@OF_ONE_INDUCTOR
@pytest.mark.slow
@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_the_page_says_how_many_launches_more_there_are() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    with torch.device("meta"):
        config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=128256)
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        ids = torch.zeros(1, 2048, dtype=torch.long)
    launches: list[int] = []
    for batch_invariant in (True, False):
        torch._dynamo.reset()
        settings: dict[str, Any] = {"use_cache": False, **WANTED, "batch_invariant": batch_invariant}
        report = fp8graph.explain(model, ids, recipe="rowwise", training=False, **settings)
        launches.append(sum(kernel.graph != "weights" for kernel in report.kernels))
    page = " ".join((ROOT / "docs" / "reinforcement_learning.md").read_text(encoding="utf-8").split())
    assert "{} launches in place of {} in forward of two layers of Llama-3-8B".format(*launches) in page
