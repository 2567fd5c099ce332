"""Activation checkpointing and FP8: bytes that a layer keeps until backward, and the kernels that run again.

    python -m benchmarks.checkpointing  # writes results/checkpointing.json; a quarter of an hour, and no GPU

One Llama-3-8B decoder layer of 8,192 tokens, on fake tensors. The whole model is compiled with its checkpointed layer
inside, so that the partitioner sees forward, recomputation and backward in one graph. Everything is counted: the
tensors that the backward graph takes from forward, the quantize nodes of both graphs, the launches of their code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8graph
from benchmarks.decoder_layer import DecoderLayer
from benchmarks.records import console, write_json
from fp8graph.backend.inductor_passes import run_eagerly
from fp8graph.ir import ops
from fp8graph.ir.nodes import OPERAND_KEY, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.recipes import OPERANDS
from fp8graph.tools.explain import Generating, trace

TOKENS: Final = 8192
MIB: Final = 2**20
TARGETS: Final = {"mxfp8": "sm_100"}  # of the other recipes: sm_90
RECIPES: Final = ("bf16", "tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
_MATMULS: Final = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_ATTENTION: Final = torch.ops.fp8graph_benchmarks.attention.default


def _save(op: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in (*_MATMULS, _ATTENTION) else CheckpointPolicy.PREFER_RECOMPUTE


def _every_second() -> Any:
    """The policy that torchtitan had before its matmuls had names: attention, and every second matmul."""
    seen = {True: 0, False: 0}

    def policy(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op not in _MATMULS:
            return _save(op)
        seen[context.is_recompute] += 1
        return _save(op) if seen[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _all() -> Any:
    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return _save(op)

    return create_selective_checkpoint_contexts(policy)


# further arguments of torch.utils.checkpoint, beside ``use_reentrant=False``; None: it is not called
NOTHING, WHOLE, MATMULS, EVERY_SECOND = "nothing", "the layer", "all but matmuls", "all but every second matmul"
WAYS: Final[dict[str, dict[str, Any] | None]] = {
    NOTHING: None,
    WHOLE: {},
    MATMULS: {"context_fn": _all},
    EVERY_SECOND: {"context_fn": _every_second},
}
SAVES: Final[dict[str, dict[str, Any]]] = {
    "speed": {},
    "memory": {"save": "memory"},
    "memory, activations in FP8": {"save": "memory", "save_activations_in_fp8": True},
}
# within a checkpointed layer ``save`` changes nothing
CASES: Final = [
    (recipe, way, save)
    for recipe in RECIPES
    for way in WAYS
    for save in (SAVES if way == NOTHING and recipe != "bf16" else ["speed"])
]


class _Counting(Generating):
    """Keeps the partitioned graphs; generates code only if it is asked to."""

    def __init__(self, *, generate: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.graphs: dict[str, fx.GraphModule] = {}
        self._generate = generate

    @property
    def inner_compile(self) -> Callable[..., Any]:
        generate = super().inner_compile if self._generate else run_eagerly

        def keep(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            self.graphs["backward" if kwargs.get("is_backward") else "forward"] = module
            return generate(module, inputs, **kwargs)

        return keep


class _Layer(nn.Module):
    """A decoder layer, checkpointed in one of ``WAYS``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = DecoderLayer(device="meta", dtype=torch.bfloat16)
        self.settings = WAYS[way]

    def forward(self, x: Tensor) -> Any:
        return (
            self.layer(x) if self.settings is None else checkpoint(self.layer, x, use_reentrant=False, **self.settings)
        )


def compiled(recipe: str, way: str, *, generate: bool = False, **settings: Any) -> _Counting:
    """The graphs of one case, and its kernels."""
    torch._dynamo.reset()
    policy = fp8graph.Policy(default=None if recipe == "bf16" else recipe, min_speedup=0)
    arguments = {"policy": policy, "compiler": "eager", "target": TARGETS.get(recipe, "sm_90"), **settings}
    backend = _Counting(generate=generate, **arguments)
    x = torch.empty(TOKENS, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    trace(backend, _Layer(way), (x,), {}, True)
    return backend


def kept(graphs: dict[str, fx.GraphModule]) -> list[Tensor]:
    """The tensors that backward takes from forward, and the layer's input: no weights, no gradients."""
    weights = {tuple(p.shape) for p in _Layer(NOTHING).parameters()}
    given = {node.name for node in graphs["forward"].graph.find_nodes(op="placeholder")}
    found: list[Tensor] = []
    for node in graphs["backward"].graph.find_nodes(op="placeholder"):
        is_weight = node.name in given and tuple(value(node).shape) in weights
        if not is_weight and not str(node.target).startswith("tangents"):
            found.append(value(node))
    return found


def count(recipe: str, way: str, save: str, *, generate: bool = False) -> dict[str, Any]:
    """A row: bytes, quantizations of weights and of activations, GEMMs and, if asked for, kernels."""
    found = compiled(recipe, way, generate=generate, **SAVES[save])
    row: dict[str, Any] = {"recipe": recipe, "recomputed": way, "save": save}
    row["kept_mib"] = round(sum(x.numel() * x.itemsize for x in kept(found.graphs)) / MIB, 1)
    for direction, module in found.graphs.items():
        quantized = [*module.graph.find_nodes(op="call_function", target=ops.quantize)]
        gemms = [node for node in module.graph.nodes if node.target in (ops.scaled_mm, *_MATMULS)]
        row[direction] = {
            "gemms": len(gemms),
            **{f"{operand}s": count_casts(quantized, operand) for operand in OPERANDS},
            "amaxes": sum(reads_for_scale(node) for node in quantized if node.meta[OPERAND_KEY] != "grad_output"),
        }
        if direction == "backward":
            row["gemms_again"] = sum("recompute" in node.meta for node in gemms)
        if generate:
            kernels = [k for k in found.generator.kernels if k.graph == direction and k.kind == "triton"]
            row[direction] |= {"kernels": len(kernels), "mib": round(sum(k.bytes for k in kernels) / MIB)}
    return row


def count_casts(quantized: Sequence[fx.Node], operand: str) -> int:
    """The quantize nodes of one operand that write FP8 data; nodes that only make a scale are left out."""
    return sum(node.meta[OPERAND_KEY] == operand and bool(QuantizeNode(node).arguments.layouts) for node in quantized)


def reads_for_scale(node: fx.Node) -> bool:
    """Whether a quantize node reads its tensor once more, before the cast, for the amax of the whole."""
    quantized = QuantizeNode(node)
    return quantized.kind.own_scale and quantized.arguments.scales is None


def main() -> None:
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows.append(count(*case, generate=True))
        console.print(rows[-1])
        write_json("checkpointing", rows)


if __name__ == "__main__":
    main()
