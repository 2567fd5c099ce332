"""Small programs as data, and a module that runs one with ordinary torch ops. ``fuzz_draw.py`` draws random ones.

A program is a list of steps over a pool of values. The pool starts with the inputs; each step reads some values by
position and adds its results. Every matmul of a program is a *product*, ``y[..., m, n] = a[..., m, k] b[..., n, k]``:
``fuzz_reference.py`` computes it another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8graph
from fp8graph import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from fp8graph.recipes import Recipe

Dtype = Literal["float32", "bfloat16", "float16"]
Strides = Literal["contiguous", "transposed", "sliced", "expanded"]

# History 1024 is the default; rows of three steps are told apart by any length >= 3.
RECIPES: Final[dict[str, Recipe | None]] = {
    "tensorwise": Float8CurrentScaling(),
    "tensorwise_e4m3": Float8CurrentScaling(fp8_format=Format.E4M3, power_2_scale=True),
    "rowwise": Float8RowwiseScaling(),
    "rowwise_exact": Float8RowwiseScaling(fp8_format=Format.HYBRID, power_2_scale=False),
    "rowwise_with_gw_hp": Float8RowwiseScaling(high_precision_wgrad=True),
    "delayed": DelayedScaling(amax_history_len=8, initial_scale="one"),
    "delayed_recent": DelayedScaling(
        amax_history_len=1, amax_compute_algo="most_recent", margin=1, initial_scale="one"
    ),
    "blockwise": Float8BlockScaling(),
    "blockwise_small": Float8BlockScaling(x_block=(1, 8), w_block=(4, 16), grad_block=(2, 8), power_2_scale=False),
    "blockwise_e8m0": Float8BlockScaling(scale_format="ue8m0", amax_epsilon=1e-4),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    "nvfp4_rows": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    "high_precision": None,
}


@dataclass(frozen=True, kw_only=True)
class Input:
    shape: tuple[int, ...]  # [rows, columns] or [batch, rows, columns]
    strides: Strides = "contiguous"
    trains: bool = True  # requires a gradient


@dataclass(frozen=True, kw_only=True)
class Linear:
    """``nn.Linear``; ``tied`` is an earlier linear whose weight this one has."""

    inputs: int
    outputs: int
    bias: bool = False
    trains: bool = True
    tied: int | None = None


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter that the root module multiplies with: ``weights.<i>``."""

    shape: tuple[int, int]
    trains: bool = True


@dataclass(frozen=True)
class Step:
    """``op`` of the values at ``sources``. ``which``: the linear, weight or norm; ``numbers``: sizes, dims, factors."""

    op: str
    sources: tuple[int, ...]
    which: int = 0
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RuleSpec:
    """A rule of the policy, recipes by their names in ``RECIPES``."""

    pattern: str
    recipe: str
    op: Literal["linear", "matmul", "*"] = "linear"
    fprop: str | None = None  # None: as `recipe`
    dgrad: str | None = None
    wgrad: str | None = None


@dataclass(frozen=True, kw_only=True)
class Program:
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]  # positions in the pool
    linears: tuple[Linear, ...] = ()
    weights: tuple[Weight, ...] = ()
    norms: tuple[tuple[str, int, bool], ...] = ()  # kind, size, affine
    dtype: Dtype = "float32"
    recipe: str = "tensorwise"
    rules: tuple[RuleSpec, ...] = ()
    fuse_linears: bool = True
    save: Literal["speed", "memory"] = "speed"
    cache_weights: bool | Literal["update"] = True
    magnitude: float = 1.0  # of the inputs
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def policy(self) -> fp8graph.Policy:
        rules: list[fp8graph.Rule] = []
        for rule in self.rules:
            own = {gemm: getattr(rule, gemm) for gemm in ("fprop", "dgrad", "wgrad")}
            recipes: dict[str, Any] = {gemm: RECIPES[name] for gemm, name in own.items() if name is not None}
            rules.append(fp8graph.Rule(rule.pattern, RECIPES[rule.recipe], op=rule.op, **recipes))
        return fp8graph.Policy(rules, default=RECIPES[self.recipe], min_speedup=0)


class Module(nn.Module):
    """Runs a program. The same program gives the same parameters."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program = program
        self.linears = nn.ModuleList()
        for spec in program.linears:
            linear = nn.Linear(spec.inputs, spec.outputs, bias=spec.bias)
            if spec.tied is not None:
                linear.weight = cast(nn.Linear, self.linears[spec.tied]).weight
            else:
                linear.weight.requires_grad_(spec.trains)
            self.linears.append(linear)
        # [r, c]: as large as those of nn.Linear, whichever side is contracted
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(w.shape) / max(w.shape) ** 0.5, requires_grad=w.trains) for w in program.weights
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(size, elementwise_affine=affine)
            if kind == "layer_norm"
            else nn.RMSNorm(size, elementwise_affine=affine)
            for kind, size, affine in program.norms
        )
        with torch.no_grad():
            for parameter in self.norms.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        self.to(program.torch_dtype)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        pool = list(inputs)
        for step in self.program.steps:
            arguments = [pool[i] for i in step.sources]
            pool.extend(
                PRODUCTS[step.op](self, step, *arguments) if step.op in PRODUCTS else other(self, step, arguments)
            )
        return tuple(pool[i] for i in self.program.outputs)


def make_inputs(program: Program) -> tuple[list[Tensor], list[Tensor]]:
    """``(leaves, what the module is called with)``: views of the leaves, with the strides that the program says."""
    generator = torch.Generator().manual_seed(program.seed)
    leaves: list[Tensor] = []
    arguments: list[Tensor] = []
    for spec in program.inputs:
        *batch, rows, columns = spec.shape
        shape = {
            "contiguous": spec.shape,
            "transposed": (*batch, columns, rows),
            "sliced": (*batch, rows + 1, columns * 2),
            "expanded": (*batch[:-1], 1, *spec.shape[-2:]) if batch else (1, columns),
        }[spec.strides]
        leaf = torch.randn(shape, generator=generator) * program.magnitude
        leaf = leaf.to(program.torch_dtype).requires_grad_(spec.trains)
        leaves.append(leaf)
        if spec.strides == "transposed":
            arguments.append(leaf.transpose(-2, -1))
        elif spec.strides == "sliced":
            arguments.append(leaf[..., 1:, columns // 2 : columns // 2 + columns])
        else:
            arguments.append(leaf.expand(spec.shape) if spec.strides == "expanded" else leaf)
    return leaves, arguments


# One matmul each, as users write it. `fuzz_reference.product` says which product it is.
PRODUCTS: Final[dict[str, Callable[..., tuple[Tensor, ...]]]] = {
    "linear": lambda m, s, x: (m.linears[s.which](x),),
    "transposed_use": lambda m, s, x: (x @ m.linears[s.which].weight,),  # [..., N] @ [N, K]
    "functional": lambda m, s, x: (functional.linear(x, m.weights[s.which]),),  # [N, K]
    "columns": lambda m, s, x: (torch.matmul(x, m.weights[s.which]),),  # [K, N], GPT-2's
    "sliced_rows": lambda m, s, x: (functional.linear(x, m.weights[s.which][s.numbers[0] : s.numbers[1]]),),
    "sliced_columns": lambda m, s, x: (functional.linear(x, m.weights[s.which][:, s.numbers[0] : s.numbers[1]]),),
    "weight_first": lambda m, s, x: (m.weights[s.which] @ x,),  # [M, K] @ [K, N]
    "einsum": lambda m, s, x: (torch.einsum("...k,nk->...n", x, m.weights[s.which]),),
    "addmm": lambda m, s, r, x: (torch.addmm(r, x, m.weights[s.which], beta=s.numbers[0], alpha=s.numbers[1]),),
    "scores": lambda _m, _s, a, b: (a @ b.transpose(-2, -1),),
    "values": lambda _m, _s, a, b: (torch.matmul(a, b),),
    "einsum_scores": lambda _m, _s, a, b: (torch.einsum("...mk,...nk->...mn", a, b),),
    "baddbmm": lambda _m, s, r, a, b: (
        torch.baddbmm(r, a, b.transpose(-2, -1), beta=s.numbers[0], alpha=s.numbers[1]),
    ),
}
OF_ACTIVATIONS: Final = ("scores", "values", "einsum_scores", "baddbmm")  # products of two activations

_POINTWISE: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "tanh": torch.tanh,
    "softmax": lambda x: torch.softmax(x, -1),
    "half": lambda x: x * 0.5,
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "transpose": lambda x: x.transpose(-2, -1),
    "flatten": lambda x: x.reshape(-1, x.shape[-1]),
    "every_other_row": lambda x: x[..., ::2, :],
    "without_first_column": lambda x: x[..., 1:],
    "through_float64": lambda x: x.double().to(x.dtype),
}
POINTWISE_NAMES: Final = tuple(_POINTWISE)


def other(module: Any, step: Step, x: Sequence[Tensor]) -> Sequence[Tensor]:
    """A step that is no product."""
    if step.op in _POINTWISE:
        return (_POINTWISE[step.op](x[0]),)
    if step.op == "norm":
        return (module.norms[step.which](x[0]),)
    if step.op == "add":
        return (x[0] + x[1],)
    if step.op == "mul":
        return (x[0] * x[1],)
    if step.op == "cat":
        return (torch.cat(list(x), int(step.numbers[0])),)
    if step.op == "chunk":
        return torch.chunk(x[0], 2, -1)
    if step.op == "split":
        return torch.split(x[0], [int(size) for size in step.numbers], -1)
    if step.op == "unflatten":  # [rows, columns] -> [n, rows / n, columns]
        return (x[0].reshape(int(step.numbers[0]), -1, x[0].shape[-1]),)
    if step.op == "heads":  # [rows, h * c] -> [h, rows, c]
        return (x[0].reshape(x[0].shape[0], int(step.numbers[0]), -1).permute(1, 0, 2),)
    if step.op == "merge":  # [h, rows, c] -> [rows, h * c]
        return (x[0].permute(1, 0, 2).reshape(x[0].shape[1], -1),)
    raise ValueError(step.op)


def parents(program: Program) -> list[tuple[int, ...]]:
    """For each value of the pool the values that it is computed from."""
    result: list[tuple[int, ...]] = [() for _ in program.inputs]
    for step in program.steps:
        results = {"chunk": 2, "split": len(step.numbers)}.get(step.op, 1)
        result += [step.sources] * results
    return result


def live_values(program: Program) -> set[int]:
    """The values that some output needs."""
    needs = parents(program)
    found: set[int] = set()
    pending = list(program.outputs)
    while pending:
        if (value := pending.pop()) not in found:
            found.add(value)
            pending += needs[value]
    return found
