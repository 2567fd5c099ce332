"""Defects that compat works around. When one of these tests fails, an entry there can go (or needs another look)."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen import cpp_flex_attention_template
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.kernel import mm_grouped
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import fp8graph
from fp8graph import hardware, offline
from fp8graph.compat import inductor
from fp8graph.ir import ops
from fp8graph.numerics import formats, group_blocks, hints, quantization, sqnr_db
from fp8graph.numerics.formats import amax_of
from fp8graph.offline import compile_kernel
from fp8graph.recipes import FP8_MAX, resolve_recipe
from generated import generate, quantize_after, quantize_after_backward, quantize_inputs, rms_norm, triton_kernels
from helpers import ALL, compiled_step, eager_backend, first_fast

AVX512 = torch.cpu._is_avx512_supported()  # asked of torch: what is tested may not decide whether it is


@pytest.mark.slow
@pytest.mark.skipif(not AVX512, reason="the defect is in AVX-512 code of GCC 12")
def test_plain_inductor_transposes_two_bf16_tensors_right_with_256_bit_vectors() -> None:
    """At full width GCC 12 gets this wrong (other compilers do not): no assertion on that, only on ours."""
    x, w = torch.randn(32, 64).bfloat16(), torch.randn(64, 64).bfloat16()

    def transposes(x: Tensor, w: Tensor) -> list[Tensor]:
        return [x.t().contiguous(), w.t().contiguous()]

    narrow = torch.compile(transposes, options=inductor.cpu_codegen_patches([x]))(x, w)
    assert all(torch.equal(a, b) for a, b in zip(narrow, transposes(x, w), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not AVX512, reason="the defect is in AVX-512 code of GCC 12")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plain_inductor_masks_and_divides_integers_right_without_avx512(dtype: torch.dtype) -> None:
    """With AVX-512 in 256-bit code GCC 12 gets the first wrong in int32; on torch 2.11 also the others, in both."""
    a, b, c = torch.arange(-20, 20, dtype=dtype), torch.arange(20, -20, -1, dtype=dtype), torch.arange(40, dtype=dtype)

    def masks(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        return [torch.where((a != b) & (c % 3 != 0), a, -a), (a + 6) // 7, (a + 6) // -7, c % 128, a % 7]

    right = torch.compile(masks, options=inductor.cpu_codegen_patches([a]))(a, b, c)
    assert all(torch.equal(x, y) for x, y in zip(right, masks(a, b, c), strict=True))


@pytest.mark.skipif(not AVX512, reason="only its vectors and instructions are left out")
def test_a_cpu_graph_has_neither_512_bit_vectors_nor_their_instructions() -> None:
    vectors, *instructions = inductor.cpu_codegen_patches([torch.ones(1)]).values()
    assert vectors == 256
    assert instructions in (["x86-64-v3"], ["off -mno-avx512f"])  # torch from 2.13 on, and before


@pytest.mark.slow
@inductor_config.patch(fx_graph_cache=False)
@functorch_config.patch(enable_autograd_cache=False)
def test_flex_attention_of_narrow_vectors_on_a_cpu_whose_kernels_want_packed_operands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU with AMX is one. The template asks it at run time, so that any CPU can be made to answer yes.

    When the last part fails, ``fix_flex_attention_packing`` can go.
    """
    inductor.fix_flex_attention_packing()
    asks, template = r"at::native::cpublas::could_pack\(at::k\w+\)", cpp_flex_attention_template.FLEX_ATTENTION_TEMPLATE
    amx, questions = re.subn(asks, "true", template)
    plain = amx.replace("at::vec::Vectorized<float>::size() == 16 && ", "")
    assert (questions, plain == amx) == (2, False)
    monkeypatch.setattr(cpp_flex_attention_template, "FLEX_ATTENTION_TEMPLATE", amx)
    q, k, v = torch.randn(3, 1, 2, 128, 16).bfloat16()
    options = {"cpp.simdlen": 256, **inductor.cpu_codegen_patches([q])}
    compiled = torch.compile(flex_attention, options=options)
    assert sqnr_db(F.scaled_dot_product_attention(q, k, v), compiled(q, k, v)) > 35
    torch._dynamo.reset()
    monkeypatch.setattr(cpp_flex_attention_template, "FLEX_ATTENTION_TEMPLATE", plain)
    with pytest.raises(RuntimeError, match="pack_vnni2"):
        torch.compile(flex_attention, options=options)(q, k, v)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_graph_for_a_gpu_that_runs_on_a_cpu_is_generated_right(target: str) -> None:
    """The graph gets the options of both: those of the GPU it is decided for, and those that keep C++ right."""
    x, device = torch.ones(1), hardware.from_target(target)
    patches = inductor.codegen_patches(device, [x])
    assert patches.items() >= inductor.cpu_codegen_patches([x]).items()
    assert patches.items() >= inductor.gpu_codegen_patches().items()
    assert inductor.codegen_patches(None, [x]) == inductor.cpu_codegen_patches([x])


@pytest.mark.slow
def test_a_bf16_linear_has_finite_gradients_through_inductor() -> None:
    """The bug as a user met it: NaN gradients from one linear, forward and backward compiled on CPU."""
    module, x = nn.Linear(64, 64, bias=False).bfloat16(), torch.randn(2, 16, 64).bfloat16().requires_grad_()
    expected = compiled_step(module, x, eager_backend())
    got = compiled_step(module, x, fp8graph.Backend(ALL))
    assert min(sqnr_db(e, g) for e, g in zip(expected, got, strict=True)) > 40


def test_patches_are_for_cpu_graphs_only() -> None:
    assert inductor.cpu_codegen_patches([torch.ones(1, device="meta")]) == {}


class _ViewAndDetached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        view = self.second(self.first(x)).transpose(-1, -2)
        return view.detach(), view


def test_plain_torch_detaches_a_view_from_the_wrong_tensor() -> None:
    """AOTAutograd's defect, without fp8graph: why the fuzzer draws no such programs. If this fails, it may again."""
    torch.manual_seed(0)
    model, x = _ViewAndDetached(), torch.randn(5, 5)
    try:
        detached, _ = torch.compile(model, backend="aot_eager")(x)
    except (AssertionError, RuntimeError):
        return
    assert not torch.equal(detached, model(x)[0])


def test_the_joint_graph_has_what_match_needs() -> None:
    """Module stacks in forward, sequence numbers that tie backward to it, ordered inputs."""
    from fp8graph.ir.nodes import aten, is_backward, nodes
    from helpers import MLP, NONE, view_of

    view = view_of(MLP(), torch.randn(4, 32), policy=NONE)
    matmuls = list(nodes(view.module.graph, (aten.mm.default,)))
    forward = {n.meta["seq_nr"] for n in matmuls if not is_backward(n)}
    backward = [n for n in matmuls if is_backward(n)]
    assert len(forward) == 3
    assert {n.meta["seq_nr"] for n in backward} == forward
    assert all(n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack") for n in matmuls)
    names = ("gate", "up", "down")
    found = [next((n for n in names if f"'{n}'" in source), source) for source in view.inputs]
    assert sorted(found) == ["L['x']", "down", "gate", "tangents_1", "up"]


def test_eager_casts_that_numerics_does_not_rely_on() -> None:
    """E5M2 never saturates by itself: the explicit clamp in numerics stays."""
    assert torch.tensor(1e9).to(torch.float8_e5m2).isinf()


def test_a_python_numerator_divides_in_two_roundings() -> None:
    """Scales are tensor / tensor, since a number as dividend is multiplied by a reciprocal."""
    amax = torch.rand(100_000) + 0.5
    one_rounding = torch.div(torch.full_like(amax, 448.0), amax)
    assert not torch.equal(448.0 / amax, one_rounding)
    assert torch.equal((448.0 / amax.double()).float(), one_rounding)


@pytest.mark.slow
@inductor_config.patch(fx_graph_cache=False)
@functorch_config.patch(enable_autograd_cache=False)
def test_inductor_still_drops_the_ragged_end_of_a_loop_over_tiles() -> None:
    """When this fails, ``fix_cpu_loop_split`` can go. 40 = 32 + 8: the last 8 columns are not written."""

    def scaled(x: Tensor, of_tiles: Tensor) -> Tensor:
        return x * of_tiles.repeat_interleave(32, 1)[:, :40]

    inductor.fix_cpu_loop_split()
    fixed: Any = CppScheduling.try_loop_split
    results: list[bool] = []
    for split in (fixed, fixed._fp8graph_original):
        torch._dynamo.reset()
        CppScheduling.try_loop_split = split
        # other numbers each time: what is not written may hold the numbers of the tensor that had that memory before
        x, of_tiles = torch.randn(30, 40), torch.rand(30, 2)
        try:
            results.append(torch.equal(torch.compile(scaled)(x, of_tiles), scaled(x, of_tiles)))
        finally:
            CppScheduling.try_loop_split = fixed
    assert results == [True, False]


@pytest.mark.slow
@pytest.mark.skipif(not "2.13" <= torch.__version__ < "2.15", reason="has no nested reductions, or compiles this one")
def test_inductor_still_fuses_a_store_to_places_with_a_norm_and_the_amaxes_of_its_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When this fails, ``fix_nested_scatter`` can go, or be for fewer versions. 32 numbers are a tile."""

    def norm_in_groups(x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms_norm(x, weight)
        of_tiles = normed.unflatten(1, (-1, 32)).abs().amax(-1).to(torch.uint8)
        return normed, group_blocks.ordered(of_tiles, ends)

    def compile_all() -> None:
        inputs = torch.empty(256, 1024).bfloat16(), torch.empty(1024).bfloat16(), torch.empty(2, dtype=torch.int32)
        for kernel in generate(norm_in_groups, inputs, "sm_100").kernels:
            compile_kernel(kernel.source or "", "sm_100", configuration="first")

    compile_all()
    for owner, method in inductor.nested_fusions():
        plain = getattr(owner, method)._fp8graph_original
        is_static = isinstance(inspect.getattr_static(owner, method), staticmethod)
        monkeypatch.setattr(owner, method, staticmethod(plain) if is_static else plain)
    monkeypatch.setattr(inductor, "fix_nested_scatter", lambda: None)
    with pytest.raises(Exception, match="AssertionError|Cannot broadcast|CompilationError"):
        compile_all()


def casts_of_two(rows: int, *, columnwise: bool = True) -> list[str]:
    """The kernels that write FP8 numbers, for two weights of ``rows`` x 2048 in both layouts, or rowwise alone."""
    quantize = quantize_after("nothing", "tensorwise", "weight", True, columnwise)
    weights = quantize_inputs(rows, 2048)[::2][:2]
    generated = generate(lambda a, b: [*quantize(a, a, a, a), *quantize(b, b, b, b)], weights).kernels
    return [kernel.source or "" for kernel in triton_kernels(generated) if "*fp8" in (kernel.source or "")]


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_large_casts_are_kernels_of_their_own_with_fixed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last part fails, Inductor joins large tiles otherwise, and ``fix_large_casts`` needs another look."""
    blocks = "config={'XBLOCK': 64, 'YBLOCK': 64, 'num_warps': 8, 'num_stages': 1}"
    assert [blocks in source for source in casts_of_two(2048)] == [True, True]
    small = casts_of_two(1024)
    assert len(casts_of_two(2048, columnwise=False)) == 2  # no tiles, and Inductor's blocks
    inductor.fix_large_casts()  # again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "gpu_codegen_patches", dict)  # plain Inductor
        assert not any(blocks in source for source in casts_of_two(2048))
    with inductor_config.patch(max_autotune=True):
        assert not any(blocks in source for source in casts_of_two(2048))
    monkeypatch.setattr(inductor, "LARGE", 2**40)
    for (joined,) in (small, casts_of_two(2048)):
        assert "'num_kernels': 2" in joined
        assert "TileHint.SQUARE" in joined


def kernel_that_casts(quantize: Any, size: tuple[int, int], target: str) -> str:
    """The one kernel that writes FP8 numbers."""
    kernels = triton_kernels(generate(quantize, quantize_inputs(*size), target).kernels)
    (source,) = (kernel.source for kernel in kernels if "*fp8" in kernel.source)
    return source


LOOP = quantize_after("nothing", "delayed", "input", True, True), (4096, 2048)
TILES = quantize_after("nothing", "tensorwise", "weight", True, True), (2048, 2048)


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@first_fast("target", ["sm_89", "sm_90", "sm_100", "sm_120"], also=["sm_90"])
def test_blocks_are_for_the_gpus_that_were_measured(target: str) -> None:
    """On others, Inductor tries some."""
    fixed = ["fixed_config(" in kernel_that_casts(*cast, target) for cast in (LOOP, TILES)]
    assert fixed == 2 * [target == "sm_90"]


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@first_fast(
    ("quantize", "size", "blocks"),
    [
        (quantize_after("rms_norm", "tensorwise", "input", True, True), (2048, 2048), (64, 64, 4)),
        (quantize_after("silu_mul", "tensorwise", "input", True, True), (2048, 2048), (128, 128, 16)),
        (quantize_after("silu_mul", "tensorwise", "input", True, True), (80, 65536), (64, 64, 8)),
        (quantize_after_backward("swiglu", "tensorwise"), (2048, 2048), (64, 64, 8)),
    ],
    ids=["norm", "SwiGLU", "too few rows", "SwiGLU's backward"],
    also=["SwiGLU's backward"],
)
def test_tiles_have_the_blocks_of_their_kind(
    quantize: Any, size: tuple[int, int], blocks: tuple[int, int, int]
) -> None:
    """The fastest on an H200, in benchmarks/results/blocks_h200.jsonl."""
    config = "config={{'XBLOCK': {}, 'YBLOCK': {}, 'num_warps': {}, 'num_stages': 1}}".format(*blocks)
    assert config in kernel_that_casts(quantize, size, "sm_90")


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_inductor_tries_no_blocks_as_those_of_loops_that_store_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, Inductor can choose them, and the loops of ``fix_large_casts`` can go."""
    blocks = "XBLOCK=32 R0_BLOCK=256 num_warps=32 num_stages=1"
    fixed = kernel_that_casts(*LOOP, "sm_90")
    monkeypatch.setattr(inductor, "MEASURED", ())
    plain = kernel_that_casts(*LOOP, "sm_90")
    assert [len(compile_kernel(source, "sm_90", configuration=blocks)) for source in (fixed, plain)] == [1, 0]


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@first_fast(
    ("quantize", "size", "blocks"),
    [
        (quantize_after("nothing", "delayed", "input", True, True), (4096, 2048), (32, 256, 32)),
        (quantize_after("nothing", "delayed", "input", True, True), (2048, 4096), (16, 512, 32)),
        (quantize_after("nothing", "delayed", "input", True, True), (1024, 8192), None),
        (quantize_after_backward("swiglu", "delayed"), (4096, 2048), (32, 128, 16)),
        (quantize_after("nothing", "rowwise", "weight", False, True), (1024, 16384), (64, 128, 16)),
    ],
    ids=["rows", "fewer rows", "too few", "twice as many results", "columns"],
)
def test_loops_that_store_transposed_have_fixed_blocks(
    quantize: Any, size: tuple[int, int], blocks: tuple[int, int, int] | None
) -> None:
    (source,) = (
        kernel.source
        for kernel in triton_kernels(generate(quantize, quantize_inputs(*size)).kernels)
        if "*fp8" in kernel.source
    )
    config = "'XBLOCK': {}, 'R0_BLOCK': {}, 'num_warps': {}, 'num_stages': 1".format(*blocks or (0, 0, 0))
    assert (config in source) == (blocks is not None)
    assert ("triton_heuristics.reduction(" in source) == (blocks is None)


def swiglu_gradients(gate: Tensor, up: Tensor, dh: Tensor) -> list[Tensor]:
    gradients = [torch.ops.aten.silu_backward(dh * up, gate), dh * nn.functional.silu(gate)]
    return [gradient.abs().amax() for gradient in gradients]


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@first_fast(
    ("function", "reads", "blocks"),
    [
        pytest.param(swiglu_gradients, 3, (2048, 8), id="its gradients"),
        pytest.param(lambda w: [w.abs().amax()], 1, (4096, 16), id="a weight"),
        pytest.param(lambda g, u: [(nn.functional.silu(g) * u).abs().amax()], 2, (4096, 16), id="SwiGLU"),
    ],
)
def test_amaxes_of_whole_tensors_load_16_bytes_at_a_time(function: Any, reads: int, blocks: tuple[int, int]) -> None:
    """Inductor's one configuration loads 8. When the last line fails, that of ``fix_large_casts`` can go."""

    def loads(target: str) -> list[tuple[str, int, int]]:
        inputs = [torch.empty(8192, 4096, dtype=torch.bfloat16) for _ in range(reads)]
        kernels = triton_kernels(generate(function, inputs, target).kernels)
        amaxes = [kernel.source or "" for kernel in kernels if kernel.bytes > 2**22]
        compiled = [compile_kernel(source, target, configuration="first")[0] for source in amaxes]
        return [(each.configuration, min(each.loads), each.spills) for each in compiled]

    configuration = f"XBLOCK=1 R0_BLOCK={blocks[0]} num_warps={blocks[1]} num_stages=1"
    assert loads("sm_90") == [(configuration, 16, 0)]
    assert {load for _, load, _ in loads("sm_100")} == {8}  # not measured


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_programs_that_share_a_row_keep_the_blocks_of_inductor() -> None:
    w = torch.empty(8192, 4096, dtype=torch.bfloat16)
    with inductor_config.patch({"triton.cooperative_reductions": True}):
        kernels = triton_kernels(generate(lambda w: [w.abs().amax()], [w]).kernels)
    assert not any("fixed_config(" in (kernel.source or "") for kernel in kernels)


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_a_gpu_of_another_vendor_keeps_its_blocks_and_the_clamp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warps have 64 threads, and its casts are not known to saturate."""
    properties = SimpleNamespace(create=lambda device: SimpleNamespace(cc="gfx950", warp_size=64))  # pyright: ignore
    monkeypatch.setattr(inductor, "DeviceProperties", properties)
    quantize = quantize_after("nothing", "delayed", "input", True, True)
    (source,) = (
        kernel.source
        for kernel in triton_kernels(generate(quantize, quantize_inputs(4096, 2048)).kernels)
        if "*fp8" in kernel.source
    )
    assert "triton_heuristics.reduction(" in source
    assert {"448.0", "-448.0"} <= set(re.findall(r"-?448\.0", source))


def test_a_reduction_without_a_loop_keeps_its_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 asks for one of rows of 4096 numbers, together with the sums of a norm's weight."""
    inductor.fix_large_casts()
    monkeypatch.setattr(inductor, "_blocks", lambda *_: {"XBLOCK": 32})  # pyright: ignore[reportUnknownLambdaType]
    node = SimpleNamespace(get_device=lambda: torch.device("cuda"))
    monkeypatch.setattr(inductor, "_capability", {node.get_device(): 90}.get)
    features = SimpleNamespace(is_reduction=lambda: True, scheduler_nodes=lambda: [node])
    choose: Any = InductorChoices().triton_kernel_kwargs
    with inductor_config.patch(combo_kernels_pointwise_only=True):
        assert "fixed_config" in choose(None, features, [{}], {})
        assert choose(None, features, [{}], asked := {"override_persistent_reduction": True}) == asked


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@first_fast("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "e4m3x2"), (torch.float8_e5m2, "e5m2x2")])
def test_a_gpu_casts_with_an_instruction_that_saturates(target: str, dtype: torch.dtype, name: str) -> None:
    """So the code has no clamp, and no comparison where inf becomes NaN."""

    def cast(x: Tensor) -> Tensor:
        return hints.saturating_cast(formats.overflow_as_nan(x), dtype)

    # by the bounds: torchao.float8 has Inductor write another maximum once it is imported
    older, kernel = (
        triton_kernels(generate(cast, [torch.ones(64, 64)], each).kernels)[0] for each in ("sm_80", target)
    )
    assert [str(FP8_MAX[dtype]) in each.source for each in (older, kernel)] == [True, False]
    (compiled,) = compile_kernel(kernel.source, target, configuration="first")
    casts = re.findall(r"\bcvt\.\w+\.?\w*\.e\dm\dx2\.f32", compiled.ptx)
    assert set(casts) == {f"cvt.rn.satfinite.{name}.f32"}
    assert not re.search(r"\b(setp|selp|min|max)\.", compiled.ptx)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plain_inductor_stores_an_amax_in_half_precision_once_only(dtype: torch.dtype) -> None:
    """Of columns, by vectors. When this fails, ``formats.widened_columns`` can go."""
    with pytest.raises(Exception, match="C\\+\\+ compile error"):
        torch.compile(lambda x: [x.abs().amax(0, keepdim=True), x.t().abs().amax(1, keepdim=True)])(
            torch.randn(64, 3).to(dtype)
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [False, True])
def test_two_amaxes_of_the_columns_of_one_tensor_through_inductor(dtype: torch.dtype, groups: bool) -> None:
    x = torch.randn(64, 3).to(dtype)

    def amaxes(x: Tensor) -> list[Tensor]:
        columns, dim = (x.reshape(4, 16, 3), 1) if groups else (x.t(), -1)
        return [amax_of(columns, dim), amax_of(columns, dim, keepdim=True)]

    assert all(torch.equal(a, b) for a, b in zip(torch.compile(amaxes)(x), amaxes(x), strict=True))


def test_inductor_warns_about_tf32_as_the_filter_expects() -> None:
    """pyproject.toml ignores this warning: tests on a GPU would fail by it. Only Inductor for a GPU gives it.

    Torch 2.14 logs it instead: without older ones the filter can go.
    """
    source = inspect.getsource(compile_fx._warn_tf32_disabled)
    assert ("warnings.warn" in source) == (torch.__version__ < "2.14")
    assert '"TensorFloat32 tensor cores' in source


def test_unused_nodes_are_erased_and_only_they_are_asked_for_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [fx.Graph(), fx.Graph()]
    for graph in graphs:
        x = graph.placeholder("x")
        for _ in range(3):
            x = graph.call_function(torch.ops.aten.sin.default, (x,))
        unused = graph.call_function(torch.ops.aten.cos.default, (x,))
        graph.call_function(torch.ops.aten.cos.default, (unused,))
        graph.call_function(torch.ops.aten.copy_.default, (x, x))
        graph.call_function(torch.ops.aten.rand.default, ([2],))
        graph.output(x)
    asked: list[fx.Node] = []
    is_impure = fx.Node.is_impure

    def noted(node: fx.Node, *arguments: Any) -> bool:
        asked.append(node)
        return is_impure(node, *arguments)

    monkeypatch.setattr(fx.Node, "is_impure", noted)
    inductor.erase_unused(graphs[0])
    assert len(asked) == 5  # the output, both cosines, the write and the draw
    graphs[1].eliminate_dead_code()
    assert str(graphs[0]) == str(graphs[1])
    assert [name in str(graphs[0]) for name in ("cos", "copy_", "rand")] == [False, True, True]


def test_a_kernel_that_inductor_would_tune_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its template for grouped GEMMs takes E8M0 scales of tiles for those of rows."""
    tuned = inspect.getsource(mm_grouped._tuned_grouped_mm_common)
    assert "use_triton_template(layout)" in tuned
    assert "e8m0" not in tuned
    seen: list[tuple[Any, ...]] = []
    kernel = torch.ops.aten._scaled_grouped_mm.default

    def lowered(*args: Any) -> None:
        seen.append((args, inductor_config.max_autotune, inductor_config.max_autotune_gemm))

    monkeypatch.setitem(inductor.lowerings, kernel, lowered)
    with inductor_config.patch(max_autotune=True, max_autotune_gemm=True):
        inductor.lowerings[torch.ops.fp8graph_kernels.grouped_mm_of_blocks.default](1, 2, 3, 4, 5)
    assert seen == [((1, 2, 3, 4, 5, None, None, torch.bfloat16), False, False)]


@pytest.mark.slow
@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_a_norm_in_front_of_experts_compiles() -> None:
    """Scales that are stored to computed places, behind the reduction of a row: in one kernel they do not compile."""
    quantizer = resolve_recipe("mxfp8").quantizer("input")  # pyright: ignore[reportOptionalMemberAccess]
    settings = {"rowwise_order": "128x4", **quantization.quantizer_kwargs(quantizer)}

    def function(x: Tensor, weight: Tensor, offs: Tensor) -> list[Tensor]:
        layouts = [1, 32], list[int]()
        args = (rms_norm(x, weight), *quantization.quantizer_args(quantizer), *layouts)
        return list(ops.quantize(*args, offs=offs, **settings))

    inputs = torch.ones(50, 96).bfloat16(), torch.ones(96).bfloat16(), torch.tensor([50], dtype=torch.int32)
    for kernel in triton_kernels(generate(function, inputs, "sm_100").kernels):
        assert compile_kernel(kernel.source, "sm_100", configuration="first")
