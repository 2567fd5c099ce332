"""Run Inductor's GPU code on the CPU, in Triton's interpreter, and compare it with the reference numerics.

    TRITON_INTERPRET=1 python -m interpreted [all | experts | tiles | cards]      one JSON line a case

Without ``all``: behind a norm, and gradients of joined linears. ``experts``: a layer of them, forward and backward, in
which torch's grouped GEMM is a product of the decoded numbers whose scales are where MSLK's kernel reads them.
``cards``: block scales on sm_120, random bits included. ``tiles``: the kernel of ``numerics/tile_kernel.py``, launched
by hand: no code can be generated for it in this process.

A script, because the interpreter is chosen before triton is imported. The generated module runs as it is but for names
of devices. Replaced in the interpreter: casts between floats, which it gets wrong (fp32 -> bf16 truncates,
fp32 -> FP8 misrounds; triton 3.6 to 3.9), products (those of bf16 are of its bits), libdevice, which is empty outside a
compiler, and reductions with a function of Inductor's, one Python call an element otherwise.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
import triton.runtime.interpreter as interpreter  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402

import fp8graph  # noqa: E402
from fp8graph.compat import inductor  # noqa: E402
from fp8graph.ir import ops  # noqa: E402
from fp8graph.numerics import formats, hints, quantization, tile_casts  # noqa: E402
from fp8graph.numerics.tile_kernel import scale_of  # noqa: E402
from fp8graph.numerics.transforms import hadamard  # noqa: E402
from fp8graph.recipes import FP8_MAX  # noqa: E402
from generated import (  # noqa: E402
    generate,
    joined_weights,
    quantize_after,
    quantize_inputs,
    quantize_joined,
    write_weights,
)

_FLOATS = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
}  # fmt: skip
_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}  # PTX: cvt.rn.satfinite
_cast: Any = interpreter._convert_float


def exact_cast(x: Any, source: Any, target: Any, rounding: Any) -> Any:
    """A cast between floats as torch does it: to the nearest, ties to even."""
    if source.name not in _FLOATS or target.name not in _FLOATS or rounding == interpreter._ir.ROUNDING_MODE.RTZ:
        return _cast(x, source, target, rounding)
    values = torch.from_numpy(np.ascontiguousarray(x).reshape(-1).copy()).view(_FLOATS[source.name])
    if target.name in _LARGEST:
        values = values.float().clamp(-_LARGEST[target.name], _LARGEST[target.name])
    payload = values.to(_FLOATS[target.name]).contiguous().view(torch.uint8).numpy()
    return payload.view(getattr(np, f"uint{target.primitive_bitwidth}")).reshape(x.shape)


def wrap(data: Any, dtype: Any) -> Any:
    data = np.asarray(data)
    return tl.tensor(
        interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if data.shape else dtype
    )


class TorchLibdevice:
    """Functions of libdevice by torch's of the same name."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(torch, name)

        def call(*arguments: Any) -> Any:
            first = next(a for a in arguments if isinstance(a, tl.tensor))
            values = [torch.from_numpy(np.array(a.handle.data)) if isinstance(a, tl.tensor) else a for a in arguments]
            result = function(*values).numpy()
            return wrap(result, tl.int1 if result.dtype == np.bool_ else first.dtype)

        return call


def reduction(function: Any) -> Callable[..., Any]:
    return lambda x, dim: wrap(function(x.handle.data, axis=dim), x.dtype)


def pairwise(function: Any) -> Callable[..., Any]:
    return lambda a, b: wrap(function(a.handle.data, b.handle.data), a.dtype)


def exact_dot(_self: Any, a: Any, b: Any, sums: Any, *_settings: Any) -> Any:
    """A product in FP32: numpy would multiply the bits of bf16 as integers. In one order, as a GPU's is."""
    values = [x.data if x.dtype.name == "fp32" else _cast(x.data, x.dtype, tl.float32, None) for x in (a, b)]
    x, y = (np.asarray(value).view(np.float32) for value in values)
    result = np.zeros_like(sums.data)
    for k in range(x.shape[1]):
        result += x[:, k : k + 1] * y[k]
    return interpreter.TensorHandle(result + sums.data, sums.dtype.scalar)


def prepare() -> None:
    interpreter._convert_float = exact_cast
    builder: Any = interpreter.InterpreterBuilder
    builder.create_dot = exact_dot
    helpers: Any = triton_helpers
    helpers.libdevice = TorchLibdevice()
    helpers.max2, helpers.maximum, helpers.minimum = reduction(np.max), pairwise(np.maximum), pairwise(np.minimum)
    helpers.promote_to_tensor = lambda x: x
    helpers.set_driver_to_gpu = lambda: None


def load(code: str) -> Callable[[list[Tensor]], Any]:
    """The generated ``call`` of a module, for CPU tensors."""
    for pattern, replacement in (
        (r"empty_strided_cuda\(", "empty_strided_cpu("),
        (r"with torch\.cuda\._DeviceGuard\(\d+\):", "if True:"),
        (r"torch\.cuda\.set_device\(\d+\)", "pass"),
        (r"from torch\._C import _cuda_getCurrentRawStream as get_raw_stream", "get_raw_stream = lambda d: 0"),
    ):
        code = re.sub(pattern, replacement, code)
    namespace: dict[str, Any] = {"__name__": "generated_code", "__file__": "generated_code.py"}
    exec(compile(code, "generated_code.py", "exec"), namespace)
    whole = dict(re.findall(r"def (\w+)\([^)]*\):\n    xnumel = (\d+)\n(?:    .*\n){2}    xmask = tl\.full\(", code))
    for name, kernel in namespace.items():
        if type(kernel).__name__.endswith("CachingAutotuner") and kernel.configs:
            _few_large_programs(kernel, int(whole.get(name, 0)))
    return namespace["call"] if "call" in namespace else namespace["runner"].call


def _few_large_programs(kernel: Any, whole: int) -> None:
    """The interpreter's cost is per operation of a program; what is computed does not depend on their size.

    ``whole``: the number of elements, if programs must divide it, since nothing is masked.
    """
    blocks, sizes = kernel.configs[0].kwargs, kernel.size_hints or {}
    if "XBLOCK" in blocks and sizes:  # a kernel without them was written for its blocks
        reduced = blocks.get("R0_BLOCK") or sizes.get("r0_", 1)
        blocks["XBLOCK"] = max(1, min(sizes.get("x", 1), (1 << 18) // max(reduced, 1)))
        if "YBLOCK" in blocks:
            blocks["XBLOCK"], blocks["YBLOCK"] = min(sizes["x"], 512), min(sizes["y"], 512)
        if whole:
            blocks["XBLOCK"] = min(blocks["XBLOCK"], whole & -whole)


CASES: list[tuple[str, str, Any, tuple[bool, bool]]] = [
    *(("joined", recipe, "grad_output", (True, True)) for recipe in ("delayed", "tensorwise", "rowwise")),
    *(
    (producer, recipe, operand, layouts)
    for producer in ("nothing", "rms_norm", "silu_mul")
    for recipe, operand in (
        ("delayed", "input"), ("tensorwise", "input"), ("rowwise", "input"), ("blockwise", "input"),
        ("blockwise", "weight"), ("mxfp8", "input"), ("delayed", "grad_output"),
    )
    for layouts in ((True, False), (True, True))
    ),
]  # fmt: skip


def inputs(rows: int, columns: int) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(rows, columns) * torch.logspace(-3, 3, rows).unsqueeze(1)
    x[1], x[:, 2], x[3, 4] = 0.0, 0.0, 3e38  # a row, a column of zeros; one that saturates
    y = torch.randn(rows, columns)
    scales = torch.tensor([[3.5, 1 / 3.5]]).repeat(4, 1)
    return [x.bfloat16(), torch.randn(columns).bfloat16(), y.bfloat16(), scales]


def different_bytes(a: Tensor, b: Tensor) -> int:
    """NaN is NaN: its sign is free, and a GPU's cast drops it."""
    if a.dtype == b.dtype and a.is_floating_point():
        a, b = (torch.where(wide.isnan(), torch.nan, wide) for wide in (a.float(), b.float()))
    return int((a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).sum())


RAGGED, WHOLE = (40, 200), (64, 256)


def compare(
    function: Any,
    size: tuple[int, int],
    case: Sequence[Any],
    blocks: str = "",
    target: str = "sm_90",
    more: Sequence[Tensor] = (),
) -> None:
    """Run the generated code of a function and the function on the same numbers; print in how many bytes they differ.

    ``blocks``: those that its kernel has to have. ``more``: inputs after those of all cases.
    """
    with inductor_config.patch({"emulate_precision_casts": True}):  # round between producer and cast, as eager does
        offline = generate(function, [*quantize_inputs(*size), *more], target)
    tensors = [*inputs(*size), *more]
    if function is cast:
        tensors[0][0, :4], tensors[2][0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0]), 1.0
    expected = [x.clone() for x in function(*tensors)]
    (_, code), *_ = offline.code
    assert blocks in code
    used = [x for i, x in enumerate(tensors) if re.search(rf"\barg{i}_1\b", code)]
    got: list[Tensor] = [x for x in load(code)(list(used)) if isinstance(x, Tensor)]
    different = sum(different_bytes(a, b) for a, b in zip(got, expected, strict=True))
    print(json.dumps({"case": [*size, *case], "outputs": len(got), "different": different}), flush=True)


def cast(x: Tensor, weight: Tensor, y: Tensor, scales: Tensor) -> list[Tensor]:
    """Both layouts of x * y in FP8."""
    data = hints.saturating_cast(formats.overflow_as_nan(x * y) * scales[0, 0], torch.float8_e4m3fn)
    return [data, data.t().contiguous()]


def main(*, every: bool) -> None:
    prepare()
    if every:
        cases = [(RAGGED, case) for case in CASES] + [(WHOLE, case) for case in CASES if all(case[-1])]
    else:
        cases = [(RAGGED, case) for case in CASES if all(case[-1]) and case[0] in ("rms_norm", "joined")]
    for (rows, columns), (producer, recipe, operand, layouts) in cases:
        if producer == "joined":
            compare(quantize_joined(recipe), (rows, columns - columns % 16), (producer, recipe))
        else:
            of_case = producer, recipe, operand, *layouts
            compare(quantize_after(*of_case), (rows, columns), of_case)
    with mock.patch.multiple(inductor, LARGE=1, LOOPS=1):  # whole, and with ragged ends
        for size in ((128, 192), (200, 336)):
            compare(cast, size, ["cast"], "'XBLOCK': 64, 'YBLOCK': 64")
        for recipe, size in (("delayed", (64, 1024)), ("delayed", (40, 1200)), ("rowwise", (40, 1200))):
            loop = quantize_after("silu_mul", recipe, "input", True, True)
            compare(loop, size, ["loop", recipe], "'XBLOCK': 32, 'R0_BLOCK': 256")
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"):  # gate and up, written in place
        weights = inputs(*WHOLE)[::2][:2]
        expected = joined_weights(recipe, *weights)
        buffers = [torch.zeros_like(x) for x in expected]
        ((_, code),) = generate(write_weights(recipe), [*weights, *buffers]).code
        load(code)([*weights, *buffers])
        different = sum(different_bytes(a, b) for a, b in zip(buffers, expected, strict=True))
        case = {"case": ["weights", recipe], "outputs": len(buffers), "different": different}
        print(json.dumps(case), flush=True)


def cards() -> None:
    """MXFP8 and NVFP4 on sm_120: each operand behind what makes it, gradients of NVFP4 with random bits."""
    cases = [case for case in CASES if case[1] == "mxfp8"]
    for size, (producer, recipe, operand, layouts) in itertools.product((RAGGED, WHOLE), cases):
        of_case = producer, recipe, operand, *layouts
        compare(quantize_after(*of_case), size, of_case, target="sm_120")
    seed, matrix = torch.tensor([2**40 + 7]), hadamard(torch.empty(1, dtype=torch.bfloat16), 0)
    for size, operand in itertools.product((RAGGED, WHOLE), ("input", "weight", "grad_output")):
        quantizer = fp8graph.NVFP4BlockScaling().quantizer(operand)
        args, settings = quantization.quantizer_args(quantizer), quantization.quantizer_kwargs(quantizer)
        given = ({"matrix": 4} if quantizer.rotation is not None else {}) | (
            {"seed": 5} if quantizer.stochastic else {}
        )

        def quantize(*tensors: Tensor, args: Any = args, settings: Any = settings, given: Any = given) -> list[Tensor]:
            named = {name: tensors[place] for name, place in given.items()}
            return list(ops.quantize(tensors[0], *args, [1, 32], [16, 32], **settings, **named))

        compare(quantize, size, ["nvfp4", operand, quantizer.stochastic], target="sm_120", more=[matrix, seed])


class GroupedKernel:
    """Torch's grouped kernels for scales in blocks, as MSLK's find their operands. Rows of no group are NaN."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)  # of the transform: bmm

    def _scaled_grouped_mm(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, *, out_dtype: Any, **_settings: Any
    ) -> Tensor:
        assert out_dtype == torch.bfloat16
        return multiplied(a.float(), b.transpose(-2, -1).float(), scale_a, scale_b, ends, 32)


def grouped_mm_of_fp4(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, global_a: Tensor, global_b: Tensor, ends: Tensor
) -> Tensor:
    """The op of compat: the same for FP4."""
    x, w = (formats.unpack_e2m1(data) for data in (a, b))
    return multiplied(x, w, scale_a, scale_b, ends, 16, (global_a, global_b))


def multiplied(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, tile: int, scalars: tuple[Tensor, ...] = ()
) -> Tensor:
    """a [t, k] and b [experts, n, k], or [m, t] and [n, t], in FP32, not scaled."""
    ragged_k = b.ndim == 2
    shape = (len(ends), a.shape[0], b.shape[0]) if ragged_k else (a.shape[0], b.shape[1])
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    flat = [scales.view(torch.uint8).flatten() for scales in (scale_a, scale_b)]
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if end == start:  # its matrix has scales all the same
            assert not ragged_k
            continue
        if ragged_k:
            assert (end - start) % 32 == 0
            x, w, result = a[:, start:end], b[:, start:end], out[group]
        else:
            x, w, result = a[start:end], b[group], out[start:end]
            flat[1] = scale_b.view(torch.uint8)[group]
        values: list[Tensor] = []
        for side, data in enumerate((x, w)):
            count = -(-len(data) // 128) * 128 * -(-data.shape[1] // (4 * tile)) * 4
            numbers = data * scales_of(data, flat[side][:count], tile)
            values.append(numbers * scalars[side].expand(len(ends))[group] if scalars else numbers)
            flat[side] = flat[side][count:]
        result.copy_(values[0] @ values[1].t())
    return out


def scales_of(data: Tensor, blocks: Tensor, tile: int) -> Tensor:
    """The scale of each of ``data`` [rows, k] in FP32, from blocks of 128 rows x 4 tiles."""
    row, place = torch.arange(data.shape[0]).unsqueeze(1), torch.arange(data.shape[1]) // tile
    block = row // 128 * -(-data.shape[1] // (4 * tile)) + place // 4
    found = blocks[block * 512 + row % 32 * 16 + row % 128 // 32 * 4 + place % 4]
    return torch.exp2((found.to(torch.int32) - 127).float()) if tile == 32 else found.view(torch.float8_e4m3fn).float()


class Experts(nn.Module):
    """Gate and up, SwiGLU and down of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 96, dtype=torch.bfloat16) / 8)
        self.down = nn.Parameter(torch.randn(4, 96, 32, dtype=torch.bfloat16) / 8)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        h = torch._grouped_mm(x, self.up.transpose(-2, -1), offs=offs)
        gate, up = h.chunk(2, -1)
        return torch._grouped_mm(nn.functional.silu(gate) * up, self.down.transpose(-2, -1), offs=offs)


def experts(sizes: list[int], recipe: Any) -> None:
    """One step of a layer: its code for sm_100 and the emulation of a CPU. All memory begins as 255: NaN as a scale."""
    torch.manual_seed(0)
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    module, x = Experts(), torch.randn(sum(sizes), 96, dtype=torch.bfloat16, requires_grad=True)
    policy = fp8graph.Policy([fp8graph.Rule("*", recipe, op="*")], default=None, min_speedup=0)
    graphs: list[Any] = []
    # nvfp4 pads tokens to 32 there and to 16 here: FP32 sums in another order, so that its reference is that graph
    for target in (None if recipe == "mxfp8" else "sm_100", "sm_100"):
        torch._dynamo.reset()
        backend = fp8graph.Backend(policy, compiler="eager", target=target, cache_weights=False)
        torch.compile(module, backend=backend, fullgraph=True)(x, offs).sum().backward()
        graphs.append(backend.report.graphs[0].module)
    given = [node.meta["val"] for node in graphs[0].graph.nodes if node.op == "placeholder"]
    tensors = [offs if y.dtype == torch.int32 else torch.randn(y.shape).to(y.dtype) for y in given]
    expected = [y for y in graphs[0](*tensors) if isinstance(y, Tensor)]
    with inductor_config.patch({"emulate_precision_casts": True}):
        ((_, code),) = generate(graphs[1], tensors, "sm_100").code
    waits = re.search(r"\.item\(|\.tolist\(|\.cpu\(|_local_scalar_dense|synchronize", code)
    assert waits is None, waits
    call: Any = load(code)
    names = getattr(call, "__func__", call).__globals__
    allocate, names["extern_kernels"] = names["empty_strided_cpu"], GroupedKernel()

    def filled(*args: Any) -> Tensor:
        made = allocate(*args)
        made.untyped_storage().fill_(255)
        return made

    names["empty_strided_cpu"] = filled
    got = [y for y in call(list(tensors)) if isinstance(y, Tensor)]
    different = sum(different_bytes(a, b) for a, b in zip(got, expected, strict=True))
    name = getattr(recipe, "name", recipe)
    print(json.dumps({"case": name, "sizes": sizes, "outputs": len(got), "different": different}), flush=True)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, SQUARE, PLAIN, TRANSPOSED = [1, 128], [128, 128], ["", ""], ["transposed", "transposed"]
# a name; how many inputs; function, dtype, power of two, epsilon, tiles, dim, both layouts, kept scales, orders, row
TILES: list[tuple[str, int, tuple[Any, ...]]] = [
    ("SwiGLU", 2, ("swiglu", E4M3, True, 0.0, ROWS, -1, True, False, TRANSPOSED, 0)),
    ("its backward", 3, ("swiglu_backward", E5M2, True, 0.0, ROWS, -1, True, False, TRANSPOSED, 0)),
    ("side by side", 2, ("", E4M3, True, 0.0, ROWS, -1, True, False, PLAIN, 0)),
    ("FP32 scales", 2, ("", E4M3, False, 1e-4, ROWS, -2, True, False, TRANSPOSED, 0)),
    ("square", 2, ("", E4M3, True, 0.0, SQUARE, -2, False, True, PLAIN, 0)),
    ("square, both layouts", 1, ("", E5M2, False, 0.0, SQUARE, -2, True, True, PLAIN, 0)),
    ("delayed, SwiGLU", 2, ("swiglu", E4M3, False, 0.0, [], -1, True, False, PLAIN, 1)),
    ("delayed, its backward", 3, ("swiglu_backward", E5M2, False, 0.0, [], -1, True, False, PLAIN, 2)),
    ("delayed, a weight's parts", 2, ("", E4M3, False, 0.0, [], -2, True, False, PLAIN, 1)),
]


def sigmoid_of_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(1 / (1 + np.exp(-x.numpy())))


@triton.jit
def scales_of_amaxes(amaxes, out, size: tl.constexpr, largest: tl.constexpr, power_2: tl.constexpr):  # noqa: ANN001, ANN201
    i = tl.arange(0, size)
    tl.store(out + i, scale_of(tl.load(amaxes + i), largest, power_2, 0.0))


def tiles() -> None:
    """The kernel on zeros, all magnitudes and numbers that are not finite; its scales of amaxes of all exponents."""
    for name, count, settings in TILES:
        torch.manual_seed(0)
        numbers = torch.randn(3, 256, 128) * torch.logspace(-30, 30, 256).unsqueeze(1) * torch.logspace(-3, 3, 128)
        numbers[0, 0, 0], numbers[0, 3, 5], numbers[0, 9], numbers[0, 200:] = torch.inf, torch.nan, 0.0, 0.0
        given = list(numbers.bfloat16())[:count]
        if not tile_casts.TileCast(*settings).block:
            given.append(torch.tensor([[1.0, 1.0, 0.0], [1 / 3.5, 3.5, 0.0], [1 / 0.7, 0.7, 0.0]])[:, :2])
        described = [inductor.Described(shape=x.shape, stride=x.stride()) for x in given]
        shapes, zeros, launches = tile_casts.launches_of(described, *settings)
        results = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        for index in zeros:
            results[index].zero_()
        for launch in launches:
            tensors = {parameter: given[index] for parameter, index in launch.reads.items()}
            tensors |= {parameter: results[index] for parameter, index in launch.writes.items()}
            launch.kernel[launch.grid](**tensors, **launch.constants)
        with mock.patch.object(tile_casts, "LOGISTIC", sigmoid_of_numpy):  # exponentials differ in the last bit
            expected = tile_casts.cast_in_tiles(given, *settings)
        different = sum(different_bytes(a, b) for a, b in zip(results, expected, strict=True))
        print(json.dumps({"case": name, "outputs": len(results), "different": different}), flush=True)

    # every exponent; mantissas of 1, of 1.75, where the quotient is a power of two, of 2, and their neighbours
    mantissas = torch.tensor([0, 1, 2, 0x5FFFFE, 0x5FFFFF, 0x600000, 0x600001, 0x600002, 0x7FFFFE, 0x7FFFFF])
    mantissas = torch.cat([mantissas, torch.randint(2**23, (54,))])
    amaxes = (torch.arange(256).unsqueeze(1) * 2**23 + mantissas).flatten().to(torch.int32).view(torch.float32)
    for dtype, power_2 in itertools.product((E4M3, E5M2), (True, False)):
        made = torch.empty_like(amaxes)
        launch: Any = scales_of_amaxes[(1,)]
        launch(amaxes, made, size=len(amaxes), largest=FP8_MAX[dtype], power_2=power_2)
        largest = torch.finfo(torch.bfloat16).max
        expected = formats.scale_from_amax(amaxes, FP8_MAX[dtype], power_2_scale=power_2, largest=largest)
        case = f"scales of {str(dtype).removeprefix('torch.')}{', powers of two' if power_2 else ''}"
        print(json.dumps({"case": case, "outputs": 1, "different": different_bytes(made, expected)}), flush=True)


if __name__ == "__main__":
    if "tiles" in sys.argv:
        prepare()
        tiles()
    elif "cards" in sys.argv:
        prepare()
        cards()
    elif "experts" in sys.argv:
        prepare()
        experts([10, 0, 37, 3], "mxfp8")
        library = torch.library.Library("fp8graph_kernels", "IMPL")
        library.impl("grouped_mm_of_fp4", grouped_mm_of_fp4, "CPU")
        experts([10, 0, 37, 3], fp8graph.NVFP4BlockScaling(disable_stochastic_rounding=True))
    else:
        main(every="all" in sys.argv)
