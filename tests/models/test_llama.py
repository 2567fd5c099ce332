"""A real Hugging Face Llama: the counts of its rewritten graph are those of tests/support/tiny_models.py."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8graph
from fp8graph.numerics import sqnr_db
from fp8graph.recipes import RECIPE_NAMES
from helpers import dialect_counts, eager_backend, first_slow
from tiny_models import TINY, llama_config


def llama(layers: int = 2) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(layers)).bfloat16()


def ids() -> Tensor:
    return torch.randint(0, 256, (2, 16))


@pytest.mark.slow
def test_the_head_is_left_alone_and_says_why() -> None:
    tokens = ids()
    report = fp8graph.explain(llama(2), input_ids=tokens, labels=tokens)
    left = [g for g in report.gemms if not g.recipe]
    assert {(g.fqn, g.reason) for g in left} == {("lm_head", "output head: the loss reads its output")}
    report.check()


@pytest.mark.slow
def test_operand_dtypes() -> None:
    tokens = ids()
    report = fp8graph.explain(llama(1), input_ids=tokens, labels=tokens)
    by_gemm = {g.gemm: g.dtypes for g in report.gemms if g.recipe}
    assert by_gemm == {
        "fprop": ("e4m3", "e4m3", "bf16"), "dgrad": ("e5m2", "e4m3", "bf16"), "wgrad": ("e5m2", "e4m3", "bf16"),
    }  # fmt: skip


@pytest.mark.slow
def test_training_step_beside_bf16() -> None:
    model, tokens = llama(), ids()
    reference = model(input_ids=tokens, labels=tokens)
    reference.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend=eager_backend(None))
    out = compiled(input_ids=tokens, labels=tokens)
    out.loss.backward()
    # E4M3 rounds to 2^-4 relative: 28 dB a GEMM, less after two layers of them
    assert sqnr_db(reference.logits, out.logits) > 24
    assert abs(out.loss.item() - reference.loss.item()) < 0.01
    gradients = {
        name: sqnr_db(g, p.grad) for (name, p), g in zip(model.named_parameters(), expected.values(), strict=True)
    }
    assert min(gradients.values()) > 15, min(gradients.items(), key=lambda item: item[1])


@pytest.mark.slow
def test_tensors_saved_for_backward_are_fp8() -> None:
    saved: list[Tensor] = []
    model, tokens = llama(1), ids()
    compiled = torch.compile(model, backend=eager_backend(None))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        compiled(input_ids=tokens, labels=tokens)
    fp8 = [t for t in saved if t.dtype == torch.float8_e4m3fn]
    assert len(fp8) == 4 + 4  # the columnwise copies of 4 activations and 4 (joined) weights


@first_slow("dtype", [torch.float16, torch.float32])
def test_other_dtypes_train(dtype: torch.dtype) -> None:
    model, tokens = llama(1).to(dtype), ids()
    loss = torch.compile(model, backend=eager_backend(None))(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert abs(loss.item() - model(input_ids=tokens, labels=tokens).loss.item()) < 0.02
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_master_weights_under_autocast_train() -> None:
    model, tokens = llama(1).float(), ids()
    backend = eager_backend(None)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert {g.dtypes[2] for g in backend.report.gemms if g.recipe} == {"bf16"}
    counts = dialect_counts(backend.report.graphs[0].after)
    assert counts["quantize"] == TINY["llama"].counts(1).quantized_tensors  # the casts of autocast are seen through


@first_slow("use_reentrant", [False, True])
def test_gradient_checkpointing_leaves_the_scaling_state_as_it_is_without(use_reentrant: bool) -> None:
    """Layers that are computed twice are recorded once, with the scale that forward used."""
    plain, checkpointed = scaling_state_of_training(), scaling_state_of_training(use_reentrant=use_reentrant)
    assert plain.keys() == checkpointed.keys()
    assert len(plain) == 1 + 2 * 3 * (7 * 2 + 1)  # scale and history x operands x linears, the head included
    for key, value in plain.items():
        assert torch.equal(value, checkpointed[key]), key


@functools.cache
def scaling_state_of_training(**checkpointing: bool) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = llama().float()
    model.train()
    if checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the name that users still type
            model.gradient_checkpointing_enable(checkpointing)
    backend = eager_backend(fp8graph.Policy(default=fp8graph.DelayedScaling(amax_history_len=4)))
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(3):
        tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        compiled(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    return dict(backend.state_dict())


@first_slow("recipe", [r for r in RECIPE_NAMES if r != "tensorwise"])
def test_counts_of_every_recipe(recipe: str) -> None:
    """Sharing does not depend on the recipe: as many quantize nodes as with one scale per tensor.

    Of one layer: how the counts grow with the number of layers is in tests/models/test_families.py.
    """
    counts, tensorwise = dialect_counts_of(recipe), dialect_counts_of("tensorwise")
    if recipe == "rowwise_with_gw_hp":
        assert counts["quantize"] == tensorwise["quantize"]
        assert counts["casts"] == 4 + 7 + 7 + 7  # no columnwise inputs and gradients
    else:
        # SwiGLU's result, in backward: pass `save_for_backward`
        again = int(recipe == "rowwise")
        assert (counts["quantize"], counts["casts"]) == (tensorwise["quantize"] + again, tensorwise["casts"])
    assert counts["update_page"] == (2 if recipe == "delayed" else 0)


@functools.cache
def dialect_counts_of(recipe: str) -> Counter[str]:
    torch._dynamo.reset()
    model, tokens = llama(1), ids()
    backend = eager_backend(fp8graph.Policy([fp8graph.Rule("lm_head", None)], default=recipe), fuse_linears=False)
    torch.compile(model, backend=backend)(input_ids=tokens, labels=tokens, use_cache=False)
    return dialect_counts(backend.report.graphs[0].after)
