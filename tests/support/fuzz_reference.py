"""The same programs another way: eager autograd, and each product quantized by ``tests/support/oracle.py``.

Of fp8graph it uses the report, to compare what was decided with what should have been, which is worked out here. How
far two right computations may be apart is found by computing a third one, see :class:`Noise`.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

import fp8graph
import oracle
from fp8graph import hardware
from fp8graph.numerics import sqnr_db
from fp8graph.recipes import DelayedScaling, Recipe
from fp8graph.records import GemmRecord
from fuzz import OF_ACTIVATIONS, PRODUCTS, RECIPES, Module, Program, Step, live_values, make_inputs, other

GEMMS: Final = ("fprop", "dgrad", "wgrad")

# The noise on results: how much, relative, and of how many elements. In 32 bits all differ by a rounding or two; in 16
# bits most come out equal, bit for bit, and some differ by one unit in the last place.
_ROUNDING: Final = {"float32": (2.0**-22, 1.0), "bfloat16": (2.0**-7, 0.25), "float16": (2.0**-10, 0.25)}
_OF_SUMS: Final = 2.0**-23  # of a matmul in FP32, relative to the sum of what it adds up, without signs
_BEFORE_QUANTIZING: Final = (
    2.0**-20
)  # relative distance from a rounding boundary of FP8 within which an element may flip
# What right results may lose beyond the noisy computation, in dB, and what no bound asks to surpass.
MARGIN_DB: Final = 12.0
CAP_DB: Final = {"float32": 90.0, "bfloat16": 36.0, "float16": 50.0}
# Computations with noise, of which the worst counts: an element on a boundary is by chance where the exact one has it.
# The second and further ones only if a result is worse than the first one allows.
_SEEDS: Final = 16
# Steps of the program, and the factor on all parameters after each. Delayed scaling needs a history in which the
# largest amax is not the newest.
# No simple fractions: they put the largest element on a rounding boundary.
_UPDATES: Final = {True: (0.53, 0.71), False: (0.83,)}


class Noise:
    """Makes a computation as wrong as rounding can.

    Every result gets noise of a rounding or two; every quantized element that lies so close to a rounding boundary that
    the noise could move it to the other side is on the other side. Every second one leaves these where the noise put
    them: moved there by the noise, they would come back. Half of them put the same noise on all rows: rows that are
    equal (of an expanded input) are rounded alike, and with noise of their own one nearly always raises the amax.
    """

    def __init__(self, program: Program, seed: int) -> None:
        self.size, self.part = _ROUNDING[program.dtype]
        self.flips = seed % 2 == 0
        self.rows_alike = seed % 4 >= 2
        self.generator = torch.Generator().manual_seed(1000 * (seed + 1) + program.seed)

    def on(self, x: Tensor) -> Tensor:
        return (x.double() * (1 + self.size * self.signs(x, self.part))).to(x.dtype)

    def signs(self, x: Tensor, part: float) -> Tensor:
        """-1 and 1 for a part of the elements of ``x``, 0 for the others."""
        shape = x.shape[-1:] if self.rows_alike else x.shape
        chosen = torch.rand(shape, generator=self.generator).expand(x.shape)
        return (chosen < part / 2).double() - (chosen > 1 - part / 2).double()


@dataclass(eq=False)
class Site:
    """One product of the program as it should be, and what it did."""

    fqn: str
    index: int
    op: str
    batched: bool  # a bmm of more than one matrix
    recipes: dict[str, Recipe | None]  # what runs
    amaxes: dict[str, float] = field(default_factory=dict[str, float])  # delayed: of this step, by operand
    history: dict[str, list[float]] = field(default_factory=dict[str, "list[float]"])
    grouped: bool = False  # its weight and gradient may share a scale with a sibling's
    is_bmm: bool = False  # also of one matrix, as einsum has it
    ran: dict[str, bool] = field(default_factory=dict[str, bool])  # by GEMM, whether Inductor decomposes it


@dataclass(frozen=True, kw_only=True)
class Product:
    """``a [..., m, k]`` and ``b [..., n, k]``; ``finish`` makes the step's result of their product."""

    fqn: str
    a: Tensor
    b: Tensor
    a_is_weight: bool = False
    addend: Tensor | None = None
    beta: float = 1.0
    alpha: float = 1.0


def product(module: Any, step: Step, x: list[Tensor]) -> Product:
    """Which product a step is: the other description of ``fuzz.PRODUCTS``."""
    i, name = step.which, f"weights.{step.which}"
    if step.op == "linear":
        return Product(fqn=f"linears.{i}", a=x[0], b=module.linears[i].weight, addend=module.linears[i].bias)
    if step.op == "transposed_use":
        return Product(fqn=f"linears.{i}", a=x[0], b=module.linears[i].weight.t())
    if step.op in ("functional", "einsum"):
        return Product(fqn=name, a=x[0], b=module.weights[i])
    if step.op == "columns":
        return Product(fqn=name, a=x[0], b=module.weights[i].t())
    if step.op == "sliced_rows":
        return Product(
            fqn=name, a=x[0], b=module.weights[i].narrow(0, int(step.numbers[0]), int(np.diff(step.numbers)[0]))
        )
    if step.op == "sliced_columns":
        return Product(
            fqn=name, a=x[0], b=module.weights[i].narrow(1, int(step.numbers[0]), int(np.diff(step.numbers)[0]))
        )
    if step.op == "weight_first":
        return Product(fqn=name, a=module.weights[i], b=x[0].transpose(0, 1), a_is_weight=True)
    scaled: Any = {}
    if step.op in ("addmm", "baddbmm"):
        scaled = {"addend": x[0], "beta": step.numbers[0], "alpha": step.numbers[1]}
    if step.op == "addmm":
        return Product(fqn=name, a=x[1], b=module.weights[i].t(), **scaled)
    b = x[-1].transpose(-2, -1) if step.op == "values" else x[-1]
    return Product(fqn="", a=x[-2], b=b, **scaled)


def decomposed(m: int, n: int, k: int, *, is_bmm: bool, biased: bool) -> bool:
    """Whether Inductor's decompositions for CPUs turn a product this small into something else (torch 2.11 to 2.15)."""
    if is_bmm:
        return k == 1 or (m == 1 and n == 1)
    if m == 1 and (n == 1 or (biased and k <= 16 and n <= 16)):
        return True
    return not biased and k == 1 and m != 1 and n != 1 and m + n <= 32


class Reference:
    """Runs a program eagerly. ``records``: the report's, None for high precision throughout."""

    def __init__(self, program: Program, records: list[GemmRecord], noise: Noise | None = None) -> None:
        self.program, self.noise = program, noise
        self.module = Module(program)
        self.records = {(r.fqn, r.index, r.gemm): r for r in records}
        self.sites: dict[int, Site] = {}  # by position of the step
        self.live = live_values(program)
        self.shared = {
            s for s, count in Counter(s.sources for s in program.steps if s.op in PRODUCTS).items() if count > 1
        }
        self.small: list[str] = []  # products that are none for Inductor

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        pool = list(inputs)
        seen: Counter[str] = Counter()
        for position, step in enumerate(self.program.steps):
            results = 1
            if step.op in ("chunk", "split"):
                results = 2 if step.op == "chunk" else len(step.numbers)
            if not self.live & set(range(len(pool), len(pool) + results)):
                pool += [torch.empty(0)] * results
                continue
            arguments = [pool[i] for i in step.sources]
            made = (
                (self._product(position, step, arguments, seen),)
                if step.op in PRODUCTS
                else self._other(step, arguments)
            )
            pool += [self.noise.on(x) for x in made] if self.noise else made
        return tuple(pool[i] for i in self.program.outputs)

    def _other(self, step: Step, arguments: list[Tensor]) -> Sequence[Tensor]:
        if self.noise is None or step.op == "norm":
            return other(self.module, step, arguments)
        # With noise: without rounding inside. How much rounding a saturated tanh or softmax leaves of its gradient,
        # 1 - y ** 2, shows by how far that is from the ordinary one.
        return [x.to(arguments[0].dtype) for x in other(self.module, step, [x.double() for x in arguments])]

    def _product(self, position: int, step: Step, arguments: list[Tensor], seen: Counter[str]) -> Tensor:
        p = product(self.module, step, arguments)
        a, b, leading = p.a, p.b, None
        (m, k), n = a.shape[-2:], b.shape[-2]
        biased = step.op == "addmm" or (step.op == "linear" and p.addend is not None)
        if a.ndim == 3 and b.ndim == 2:
            record = self.records.get((p.fqn, seen[p.fqn], "fprop"))
            # torch folds the batch into the rows, except where that would copy an operand that needs no gradient
            if record is None or record.m == a.shape[0] * m or a.shape[0] == 1:
                leading = a.shape[:-1]
                a = a.reshape(-1, k)
                m = a.shape[0]
            else:
                b = b.expand(a.shape[0], n, k)
                biased = False
        batched = a.ndim == 3 and a.shape[0] > 1
        is_bmm = a.ndim == 3 or step.op.startswith("einsum")
        if decomposed(m, n, k, is_bmm=is_bmm, biased=biased):
            self.small.append(p.fqn)
            site = Site(fqn=p.fqn, index=-1, op="", batched=batched, recipes=dict.fromkeys(GEMMS))
        else:
            site = self.sites.get(position)
            index, seen[p.fqn] = seen[p.fqn], seen[p.fqn] + 1
            if site is None:
                site = self.sites[position] = self._site(p.fqn, index, step, batched, is_bmm, n)
        y = cast(Tensor, _Product.apply(a, b, p.a_is_weight, site, self.noise))
        if leading is not None:
            y = y.reshape(*leading, n)
        if p.alpha != 1:
            y = y * p.alpha
        if p.addend is not None and p.beta == 0:  # not read, and its gradient is zero
            y = y + torch.nan_to_num(p.addend, 0.0, 0.0, 0.0) * 0
        elif p.addend is not None:
            y = y + (p.addend * p.beta if p.beta != 1 else p.addend)
        return y

    def _site(self, fqn: str, index: int, step: Step, batched: bool, is_bmm: bool, n: int) -> Site:
        op = "matmul" if step.op in OF_ACTIVATIONS else "linear"
        recipes = {gemm: expected_recipe(self.program, fqn, op, gemm, batched) for gemm in GEMMS}
        grouped = self.program.fuse_linears and step.op == "linear" and step.sources in self.shared and n % 16 == 0
        return Site(fqn=fqn, index=index, op=op, batched=batched, recipes=recipes, grouped=grouped, is_bmm=is_bmm)

    def end_of_step(self) -> None:
        for site in self.sites.values():
            for operand, amax in site.amaxes.items():
                if 0 < amax < float("inf"):
                    site.history.setdefault(operand, []).append(amax)
            site.amaxes.clear()


def expected_recipe(program: Program, fqn: str, op: str, gemm: str, batched: bool) -> Recipe | None:
    """The recipe that the policy has for a GEMM, if FP8 can run it: the rules read once more."""
    recipe, by_rule = RECIPES[program.recipe] if op == "linear" else None, False
    for rule in program.rules:
        if rule.op in ("*", op) and fnmatch.fnmatchcase(fqn, rule.pattern):
            own = getattr(rule, gemm)
            recipe, by_rule = RECIPES[rule.recipe if own is None else own], True
            break
    if batched and not by_rule:
        return None  # torch has no scaled bmm: only a rule gets it emulated
    if recipe is RECIPES["rowwise_with_gw_hp"] and gemm == "wgrad":
        return None
    return recipe


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, a_is_weight: bool, site: Site, noise: Noise | None) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.roles = ("weight", "input") if a_is_weight else ("input", "weight")
        ctx.site, ctx.noise = site, noise
        return _multiply("fprop", a, b, *ctx.roles, site, noise)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads  # [..., m, n]
        a, b = ctx.saved_tensors
        role_a, role_b = ctx.roles
        names = {"input": "dgrad", "weight": "wgrad"}
        da = db = None
        if ctx.needs_input_grad[0]:  # da[m, k] contracts n
            da = _multiply(names[role_a], dy, b.transpose(-2, -1), "grad_output", role_b, ctx.site, ctx.noise)
        if ctx.needs_input_grad[1]:  # db[n, k] contracts m
            left, right = dy.transpose(-2, -1), a.transpose(-2, -1)
            db = _multiply(names[role_b], left, right, "grad_output", role_a, ctx.site, ctx.noise)
        return da, db, None, None, None


def _multiply(gemm: str, a: Tensor, b: Tensor, role_a: str, role_b: str, site: Site, noise: Noise | None) -> Tensor:
    """``a [..., m, k] @ b [..., n, k]``, in float64, rounded once."""
    m, n, k = a.shape[-2], b.shape[-2], a.shape[-1]
    site.ran[gemm] = gemm != "fprop" and decomposed(m, n, k, is_bmm=site.is_bmm, biased=False)
    recipe = None if site.ran[gemm] else site.recipes[gemm]
    left, right = a.double(), b.double()
    if recipe is not None:
        left, right = (_quantized(x, role, recipe, site, noise) for x, role in ((a, role_a), (b, role_b)))
    result = left @ right.transpose(-2, -1)
    if noise is None:
        return result.to(a.dtype)
    # cancelled sums leave their rounding errors: one that is exactly 0 here is 1e-9 there, and relu lets it through
    sizes = left.abs() @ right.abs().transpose(-2, -1)
    result = (result + noise.signs(result, 1.0) * sizes * _OF_SUMS).to(a.dtype)
    return noise.on(result) if gemm != "fprop" else result


def _quantized(x: Tensor, role: str, recipe: Recipe, site: Site, noise: Noise | None) -> Tensor:
    """The numbers that the quantized ``x`` [..., rows, contracted] stands for, in float64."""
    quantizer = recipe.quantizer(cast(Any, role))
    factor = 1.0
    if isinstance(recipe, DelayedScaling):
        site.amaxes[role] = float(x.double().abs().max())
        if history := site.history.get(role):
            newest = history[-1] if recipe.amax_compute_algo == "most_recent" else max(history)
            factor = oracle.round_to_float32(oracle.fp8_max(quantizer.dtype) * 2.0**-recipe.margin / newest)
    nominal = _decoded(x, quantizer, factor)
    if noise is None or not (noise.flips or site.grouped):
        return nominal
    values = x.double()
    # cancellation makes the noise of small elements that of large ones
    size = _BEFORE_QUANTIZING * (values.abs() + values.abs().max() / 16)
    moved = [values + sign * size for sign in (1, -1)]
    if site.grouped and role != "input" and quantizer.scaling in ("tensor", "delayed", "row"):
        moved, factor = [_beside_larger(y, quantizer) for y in moved], factor / 1.4 if site.history.get(role) else 1.0
    upper, lower = (_decoded(y, quantizer, factor)[..., : x.shape[-1]] for y in moved)
    return torch.where((upper - nominal).abs() > (lower - nominal).abs(), upper, lower)


def _beside_larger(x: Tensor, quantizer: Any) -> Tensor:
    """``x`` with a column that makes every amax another one's, as the linears of a group have one scale.

    Which one it is depends on what is grouped, which only the report says: results may be as far apart as two roundings
    to FP8 are. Under scales that are powers of two the codes stay the same, all but the smallest.
    """
    largest = x.abs().amax(-1, keepdim=True) if quantizer.scaling == "row" else x.abs().max().expand(*x.shape[:-1], 1)
    return torch.cat([x, largest * (2.0 if quantizer.power_2_scale else 1.4)], -1)


def _decoded(x: Tensor, quantizer: Any, factor: float) -> Tensor:
    """Quantized by the oracle and decoded, float64."""
    if quantizer.scaling == "tensor":
        settings = {"power_2_scale": quantizer.power_2_scale, "epsilon": quantizer.amax_epsilon}
        codes, scale_inv = oracle.quantize(x, quantizer.dtype, **settings)
        return torch.from_numpy(_values(codes, quantizer.dtype) * scale_inv)
    if quantizer.scaling == "delayed":
        scaled = (x.float().numpy() * np.float32(factor)).astype(np.float64)
        return torch.from_numpy(_values(oracle.cast(scaled, quantizer.dtype), quantizer.dtype)) / factor
    codes, stored, global_scale_inv = oracle.quantize_tiles(x, quantizer)
    rows, columns = codes.shape[-2:]
    tile = (1, columns) if quantizer.scaling == "row" else quantizer.block
    inverse = np.exp2(stored - 127) if quantizer.scaling in ("mxfp8", "block_e8m0") else stored
    inverse = np.repeat(np.repeat(inverse, tile[0], -2), tile[1], -1)[..., :rows, :columns]
    fp4 = quantizer.scaling == "nvfp4"
    return torch.from_numpy(_values(codes, None if fp4 else quantizer.dtype) * inverse * global_scale_inv)


def _values(codes: Any, dtype: torch.dtype | None) -> Any:
    """FP8 codes as numbers; None: codes of E2M1, not packed."""
    sign = 3 if dtype is None else 7
    magnitude = (oracle.finite_table(None) if dtype is None else oracle.table(dtype))[codes & ((1 << sign) - 1)]
    return np.where(codes >> sign, -magnitude, magnitude)


def steps_of(model: Any, module: Module, end_of_step: Any = None) -> list[tuple[str, Tensor | None]]:
    """Some training steps of a program: every output and every gradient of each, by name."""
    program = module.program
    delayed = any(isinstance(recipe, DelayedScaling) for recipe in program.policy().recipes())
    found: list[tuple[str, Tensor | None]] = []
    leaves, _ = make_inputs(program)
    for step, update in enumerate((*_UPDATES[delayed], None)):
        leaves, arguments = make_inputs(program)
        module.zero_grad(set_to_none=True)
        outputs = model(*arguments)
        generator = torch.Generator().manual_seed(program.seed + 2)
        losses: list[Tensor] = []
        for i, out in enumerate(outputs):
            found.append((f"step {step} output {i}", out.detach().clone()))
            factors = torch.randn(out.shape, generator=generator)
            if out.requires_grad:
                losses.append((out.float() * factors).sum())
        if losses:
            torch.stack(losses).sum().backward()
        found += [(f"step {step} gradient of input {i}", leaf.grad) for i, leaf in enumerate(leaves)]
        for name, parameter in module.named_parameters():
            gradient = parameter.grad
            found.append((f"step {step} gradient of {name}", None if gradient is None else gradient.clone()))
        if end_of_step is not None:
            end_of_step()
        Scaled(module.parameters(), update or 1.0).step()
    return found


class Scaled(torch.optim.Optimizer):
    """Multiplies each parameter by ``factor``."""

    def __init__(self, parameters: Iterable[Tensor], factor: float) -> None:
        super().__init__([nn.Parameter(torch.empty(0)), *parameters], {"factor": factor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(group["factor"])


def check_decisions(reference: Reference, records: list[GemmRecord]) -> None:
    """Exactly the GEMMs that the policy names run in FP8; all GEMMs are there, each once."""
    expected = {(site.fqn, site.index, gemm): site for site in reference.sites.values() for gemm in site.ran}
    orphans = [r for r in records if r.reason == "a backward matmul; no forward one of its operands was found"]
    assert len(orphans) <= 2 * len(reference.small), [r.name for r in orphans]
    found = {(r.fqn, r.index, r.gemm): r for r in records if r not in orphans}
    assert len(found) + len(orphans) == len(records), "a GEMM is reported twice"
    assert not found.keys() - expected.keys(), f"nothing such runs: {sorted(found.keys() - expected.keys())}"
    for fqn, index, gemm in expected.keys() - found.keys():
        assert expected[fqn, index, gemm].ran[gemm], f"{fqn}[{index}] {gemm} is not in the report"
    for (fqn, index, gemm), record in found.items():
        site = expected[fqn, index, gemm]
        recipe = site.recipes[gemm]
        assert record.op == site.op, (record, site.op)
        assert record.recipe == (recipe and recipe.name), (record, recipe)
        native = (
            recipe is not None
            and not site.batched
            and hardware.from_target("cpu").multiplies(recipe.quantizer("input").scaling)
        )
        execution = "high precision" if recipe is None else "native" if native else "emulated"
        assert record.execution == execution, (record, execution)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The distance of one result from the reference's, and the allowed one, in dB."""

    name: str
    got: float
    bound: float

    @property
    def is_right(self) -> bool:
        return self.got >= self.bound


def _ratio_db(right: Tensor, value: Tensor) -> float:
    """SQNR. What overflows counts as the largest number; nothing is compared with a NaN, which is inf - inf."""
    if right.isnan().any():
        return math.inf
    return sqnr_db(*(x.clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max) for x in (right, value)))


def _with_eager_strides(model: Any, module: Module) -> Any:
    """``model``, whose results have to have the strides of the module's own, as plain ``torch.compile`` promises."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = model(*inputs)
        with torch.no_grad():
            for i, (got, right) in enumerate(zip(outputs, module(*inputs), strict=True)):
                of_each_size = zip(right.shape, got.stride(), right.stride(), strict=True)
                assert all(size == 1 or a == b for size, a, b in of_each_size), (i, got.stride(), right.stride())
        return outputs

    return run


def check(program: Program, compiler: Any = "eager") -> list[Measured]:
    """Compile and run a program, and measure every result. Raises AssertionError if decisions or shapes are wrong."""
    torch._dynamo.reset()
    backend = fp8graph.Backend(
        program.policy(),
        compiler=compiler,
        fuse_linears=program.fuse_linears,
        save=program.save,
        cache_weights=program.cache_weights,
    )
    module = Module(program)
    got = steps_of(_with_eager_strides(torch.compile(module, backend=backend, fullgraph=True), module), module)
    records = backend.report.gemms
    exact = Reference(program, records)
    expected = steps_of(exact, exact.module, exact.end_of_step)
    check_decisions(exact, records)
    ratios: dict[str, float] = {}
    for (name, value), (_, right) in zip(got, expected, strict=True):
        assert (value is None) == (right is None), f"{name}: got {value}, expected {right}"
        if value is not None and right is not None:
            assert (value.dtype, value.shape) == (right.dtype, right.shape), name
            ratios[name] = _ratio_db(right, value)
    bounds = dict.fromkeys(ratios, CAP_DB[program.dtype])
    for seed in range(_SEEDS):
        noisy = Reference(program, records, Noise(program, seed))
        for (name, right), (_, wrong) in zip(expected, steps_of(noisy, noisy.module, noisy.end_of_step), strict=True):
            if right is not None and wrong is not None:
                bounds[name] = min(bounds[name], _ratio_db(right, wrong) - MARGIN_DB)
        if all(ratios[name] >= bound for name, bound in bounds.items()):
            break
    return [Measured(name=name, got=ratio, bound=bounds[name]) for name, ratio in ratios.items()]


def assert_right(program: Program, compiler: Any = "eager") -> None:
    wrong = [m for m in check(program, compiler) if not m.is_right]
    assert not wrong, "\n".join(f"{m.name}: {m.got:.1f} dB, at least {m.bound:.1f} expected" for m in wrong)
