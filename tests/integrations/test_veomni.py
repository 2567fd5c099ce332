"""VeOmni compiles each decoder block with the backend that its config names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fp8graph
from trainers_page import wrong_set_ups

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # VeOmni's own

compiling: Any = pytest.importorskip("veomni.distributed.torch_compile", exc_type=ImportError)
IDS = torch.arange(32).view(2, 16)
LAYERS = 10  # more than Dynamo compiles of one function


@pytest.fixture(autouse=True)
def _start() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def qwen3() -> Any:
    """Its own Qwen 3, small, in bf16."""
    from transformers import Qwen3Config
    from veomni.models.transformers.qwen3.generated import (  # pyright: ignore[reportMissingImports]
        patched_modeling_qwen3_gpu as modeling,
    )

    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 256, "attn_implementation": "sdpa",
    }  # fmt: skip
    config = Qwen3Config(num_hidden_layers=LAYERS, **sizes)
    return modeling.Qwen3ForCausalLM(config).bfloat16()


def loss_of(model: Any) -> float:
    logits = model(input_ids=IDS, use_cache=False).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
    loss.backward()
    return loss.item()


def compiled(backend: str) -> Any:
    model = qwen3()
    config = compiling.CompileConfig(enable=True, backend=backend)  # fullgraph, without dynamic shapes
    assert compiling.compile_decoder_blocks(model, config) == LAYERS
    return model


def test_its_function_compiles_each_block_in_fp8() -> None:
    expected = loss_of(qwen3())
    torch.manual_seed(0)
    model = compiled("fp8graph:tensorwise")
    assert loss_of(model) == pytest.approx(expected, rel=0.01)
    report = fp8graph.backend_of(model).report
    assert [gemm.recipe for gemm in report.gemms] == ["tensorwise"] * 7 * 3  # one graph for all blocks
    assert next(iter(report.gemms)).fqn == "self_attn.q_proj"
    assert all(weight.grad is not None for weight in model.parameters())


def test_bound_blocks_have_the_models_names_and_scales_of_their_own() -> None:
    model = compiled("fp8graph:delayed")
    backend = fp8graph.backend_of(model)
    backend.bind(model)
    loss_of(model)
    assert {gemm.fqn.partition(".self_attn")[0] for gemm in backend.report.gemms if "q_proj" in gemm.fqn} == {
        f"model.layers.{i}" for i in range(LAYERS)
    }
    scales = [name for name in backend.state_dict() if name.endswith("q_proj.input|delayed()|scale")]
    assert len(scales) == LAYERS


def test_wrong_set_ups_have_the_messages_of_the_page() -> None:
    name, no_gpu = map(re.escape, wrong_set_ups("VeOmni"))
    with pytest.raises(Exception, match=name):
        compiled("fp8graph:rowise")
    with pytest.raises(RuntimeError, match=no_gpu):
        compiling.validate_compile_runtime(
            compiling.CompileConfig(enable=True, backend="fp8graph:tensorwise"),
            device_type="cpu",
            fsdp_enabled=True,
            fsdp_mode="fsdp2",
            any_extra_parallel_enabled=False,
            enable_reshard_after_forward=True,
        )
