"""fuse_stored_linears: q, k and v, gate and up of FP8 checkpoints are one GEMM each, and their weights one tensor."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8_checkpoints
import fp8graph
from fp8_checkpoints import LINEARS
from fp8graph import Policy
from fp8graph.passes.hoist_weights.side_by_side import side_by_side
from helpers import brief, counted_passes, dialect_counts, eager_backend, first_fast, same_bits, view_of
from stored_weights import Stored, stored

K = 512
JOINED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
DEFAULT = Policy(extends="default")
TARGETS = {"row": "sm_90", "block": "sm_90", "mxfp8": "sm_100"}  # devices that multiply the kind


class Projections(nn.Module):
    """q, k and v of three sizes, whose results no view hands on."""

    def __init__(self, kind: str = "row", sizes: tuple[int, ...] = (512, 128, 256), **settings: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (stored(kind, n, K, **settings) for n in sizes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x).relu(), self.k(x).relu(), self.v(x).relu()
        return q[:, : k.shape[1]] + k * v[:, : k.shape[1]]


def x(rows: int = 16) -> Tensor:
    return torch.randn(rows, K, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))


def run(module: nn.Module, *args: Any, times: int = 1, **settings: Any) -> tuple[Tensor, fp8graph.Backend]:
    """The result of the last of some calls without gradients."""
    torch._dynamo.reset()
    backend = eager_backend(DEFAULT, cache_weights=True, **settings)
    compiled = torch.compile(module, backend=backend)
    with torch.no_grad():
        results = [compiled(*args or (x(),)) for _ in range(times)]
    return results[-1], backend


def gemms(backend: fp8graph.Backend, graph: int = -1) -> int:
    return dialect_counts(backend.report.graphs[graph].after)["scaled_mm"]


def reasons(backend: fp8graph.Backend) -> set[str]:
    return {each.reason for each in backend.report.refusals if each.what == "one GEMM"}


def test_before_and_after() -> None:
    with torch.no_grad():
        view = view_of(Projections("block"), x(), policy=DEFAULT, target="sm_90", cache_weights=True)
    after = brief(view.stages["fuse_stored_linears"])
    assert dialect_counts(view.stages["fuse_linears"])["scaled_mm"] == 3
    assert dialect_counts(after)["scaled_mm"] == 1
    assert "e4m3[896, 512] = fp8graph.join(parts=[" in after
    assert "f32[7, 4] = fp8graph.join(parts=[" in after
    assert [line.split(" = ")[1] for line in after.splitlines() if "aten.slice.Tensor(fprop" in line] == [
        "aten.slice.Tensor(fprop, 1, 640, 896)",
        "aten.slice.Tensor(fprop, 1, 512, 640)",
        "aten.slice.Tensor(fprop, 1, 0, 512)",
    ]
    assert dialect_counts(view.after)["join"] == 0  # the graph takes what is joined
    assert ["one GEMM with k, v" in gemm.reason for gemm in view.gemms if gemm.fqn == "q"] == [True]


@pytest.mark.parametrize("kind", TARGETS)
def test_no_number_changes(kind: str) -> None:
    apart, _ = run(Projections(kind), target=TARGETS[kind], fuse_linears=False)
    joined, backend = run(Projections(kind), target=TARGETS[kind])
    assert gemms(backend) == 1
    assert same_bits([apart], [joined])


@first_fast(
    "name", ["compressed-tensors-fp8-dynamic", "hf-float", "modelopt-fp8-channel", "hf-tensor"], also=["hf-float"]
)
def test_a_layer_of_a_checkpoint_has_four_gemms(name: str, tmp_path: Path) -> None:
    fp8_checkpoints.FORMATS[name].write(tmp_path)
    served = fp8graph.load_checkpoint(fp8_checkpoints.model(), tmp_path).eval()
    before = memory(served)
    layers = fp8_checkpoints.CONFIG.num_hidden_layers
    counts: list[int] = []
    for fuse in (False, True):
        torch._dynamo.reset()
        backend = eager_backend(DEFAULT, fuse_linears=fuse, cache_weights=True, target="sm_90")
        compiled = torch.compile(served, backend=backend)
        with torch.no_grad():
            compiled(input_ids=torch.arange(256).reshape(2, 128), use_cache=False)
        counts.append(gemms(backend))
    assert counts == [7 * layers, 4 * layers]
    joined, padded = (sum(LINEARS[each][0] for each in names) for names in (JOINED, (*JOINED, "self_attn.o_proj")))
    if name == "hf-float":  # k is padded to 512: a copy, whether joined or not
        assert backend.weights.bytes == layers * (padded * 512 + joined // 128 * 4 * 4)
    else:
        assert backend.weights.bytes == 0
        assert memory(served) == before


def scales_of(part: Stored) -> Tensor:
    return cast(Tensor, part.scale_inv)


def memory(module: nn.Module) -> int:
    """The bytes of all memory that a module's tensors are in."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tensors)}.values())


def in_one_memory(module: Projections) -> bool:
    return len({part.weight.untyped_storage().data_ptr() for part in (module.q, module.k, module.v)}) == 1


def test_weights_become_parts_of_one_tensor_and_every_write_is_seen() -> None:
    module = Projections()
    parameters, size = [*module.parameters()], memory(module)
    first, backend = run(module, times=2)
    assert in_one_memory(module)
    assert memory(module) == size
    assert backend.weights.bytes == backend.weights.quantized == 0  # nothing was copied beside them
    assert (backend.report.weights, backend.report.weight_bytes) == (0, 0)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    compiled = torch.compile(module, backend=backend)
    module.v.weight.data.view(torch.uint8).numpy()[:] = 0  # leaves no trace
    scales_of(module.q).data.mul_(2)
    apart, _ = run(copy.deepcopy(module), fuse_linears=False)
    with torch.no_grad():
        assert same_bits([compiled(x())], [apart])
    assert not torch.equal(first, apart)


def test_a_model_that_moved_is_joined_again() -> None:
    module = Projections()
    torch._dynamo.reset()
    backend = eager_backend(DEFAULT, cache_weights=True)
    compiled = torch.compile(module, backend=backend)
    with torch.no_grad():
        compiled(x())
        for parameter in module.parameters():  # as module.to() does
            parameter.data = parameter.data.clone()
        module.k.weight.data.view(torch.uint8).zero_()
        joined = compiled(x())
    assert in_one_memory(module)
    assert len(backend.report.graphs) == 1
    assert same_bits([joined], [run(module, fuse_linears=False)[0]])


def test_every_graph_of_a_model_that_moved_reads_what_it_is_now() -> None:
    """Prefill joined the weights; after the move, a graph that is new is called first, and then the old one."""
    module = Projections()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=eager_backend(DEFAULT, cache_weights=True), dynamic=False)
    with torch.no_grad():
        compiled(x())
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        module.k.weight.data.view(torch.uint8).zero_()
        results = [compiled(x(rows)) for rows in (32, 16)]
    assert same_bits(results, [run(module, x(rows), fuse_linears=False)[0] for rows in (32, 16)])


@pytest.mark.parametrize("made", [False, True], ids=["called", "made, too"])
def test_a_model_in_inference_mode_is_joined_or_copied(made: bool) -> None:
    """Tensors that were made there have no versions, and are left where they are."""
    with torch.inference_mode():
        module = Projections() if made else None
    module = module or Projections()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=eager_backend(DEFAULT, cache_weights=True))
    with torch.inference_mode():
        result = compiled(x())
    assert in_one_memory(module) == (not made)
    assert module.q.weight.is_inference() == made
    expected = run(module, fuse_linears=False)[0]
    assert torch.equal(result.clone().float(), expected.float())


def test_a_part_of_one_row_may_have_any_stride() -> None:
    whole = torch.arange(8.0).reshape(2, 4)
    first = whole[:1].as_strided((1, 4), (1, 1))
    joined = side_by_side([first, whole[1:]])
    assert joined is not None
    assert torch.equal(joined, whole)


@pytest.mark.parametrize("holder", ["another tensor", "numpy"])
def test_memory_that_others_hold_is_not_left(holder: str) -> None:
    """They write there. The joined weight then is a copy, and is made again when the numbers change."""
    module = Projections()
    weight = module.v.weight
    if holder == "numpy":
        array = weight.detach().view(torch.uint8).numpy().copy()
        weight.data = torch.from_numpy(array).view(weight.dtype)
        theirs = torch.from_numpy(array)
    else:
        theirs = weight.data.view(torch.uint8)
    _, backend = run(module)
    assert not in_one_memory(module)
    assert backend.weights.bytes == sum(x.nbytes for x in (module.q.weight, module.k.weight, weight))
    assert backend.report.weights == 3  # the scales are none
    theirs.zero_()
    with torch.no_grad():
        joined = torch.compile(module, backend=backend)(x())
    assert same_bits([joined], [run(module, fuse_linears=False)[0]])


def test_memory_of_several_processes_is_not_left() -> None:
    module = Projections()
    place = module.v.weight.share_memory_().data_ptr()
    _, backend = run(module)
    assert module.v.weight.data_ptr() == place
    assert backend.weights.bytes > module.v.weight.nbytes


def test_other_groups_of_the_same_weights_move_nothing_again() -> None:
    """A graph that joins k and v alone reads a part of the joined tensor; one that joins q and v, which have k between
    them, a copy."""

    class Some(nn.Module):
        def __init__(self, module: Projections, *names: str) -> None:
            super().__init__()
            self.some = nn.ModuleList([cast(nn.Module, getattr(module, name)) for name in names])

        def forward(self, x: Tensor) -> Tensor:
            first, other = (each(x).relu() for each in self.some)
            return first[:, :128] + other[:, :128]

    module = Projections()
    _, backend = run(module)
    memories = [part.weight.data_ptr() for part in (module.q, module.k, module.v)]
    for names, copied in ((("k", "v"), 0), (("q", "v"), 768 * (K + 4))):
        for _ in range(2):
            with torch.no_grad():
                torch.compile(Some(module, *names), backend=backend)(x())
        assert gemms(backend) == 1
        assert backend.weights.bytes == copied  # data, and a scale per row
    assert memories == [part.weight.data_ptr() for part in (module.q, module.k, module.v)]


def test_scales_in_buffers_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted_passes(monkeypatch)
    module = Projections("block", buffers=True)
    for part in (module.q, module.k, module.v):
        part.scale_inv = scales_of(part).clone()
    joined, backend = run(module, target="sm_90", times=2)
    assert len(runs) == 1  # the inputs are foreseen
    assert gemms(backend) == 1
    module.q.scale_inv = scales_of(module.q) * 2  # another tensor
    scales_of(module.k).data.mul_(4)
    with torch.no_grad():
        again = torch.compile(module, backend=backend)(x())
    apart, _ = run(module, target="sm_90", fuse_linears=False)
    assert same_bits([again], [apart])
    assert not torch.equal(joined, apart)


def test_graphs_share_the_joined_weights_and_none_is_compiled_again() -> None:
    """Prefill and decode: the second graph is traced when the weights are parts of one tensor."""
    module = Projections()
    torch._dynamo.reset()
    backend = eager_backend(DEFAULT, cache_weights=True, strict=True)
    compiled = torch.compile(module, backend=backend, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=False):
        for _ in range(2):
            compiled(x(32))
            compiled(x(1))
    assert len(backend.report.graphs) == 2
    assert [gemms(backend, graph) for graph in (0, 1)] == [1, 1]
    assert backend.weights.bytes == 0


def test_files_hold_each_weight_once(tmp_path: Path) -> None:
    module = Projections()
    run(module)
    torch.save(module.state_dict(), tmp_path / "torch.pt")
    save_file(module.state_dict(), tmp_path / "numbers.safetensors")
    assert (tmp_path / "torch.pt").stat().st_size < memory(module) + 8192
    for state in (torch.load(tmp_path / "torch.pt"), load_file(tmp_path / "numbers.safetensors")):
        assert all(
            same_bits([state[name].view(torch.uint8)], [x.view(torch.uint8)]) for name, x in module.state_dict().items()
        )


class _Biased(Projections):
    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.to(x.dtype)
        k = nn.functional.linear(x, self.k.high_precision(x.dtype), bias).relu()
        return self.q(x).relu()[:, :128] + k * self.v(x).relu()[:, :128]

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(128))


class _OnTheLeft(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.high_precision(x.dtype) @ x.t() for part in (self.q, self.k, self.v))
        return q.relu()[:128] + k.relu() * v.relu()[:128]


class _Results(Projections):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.q(x), self.k(x)


class _Computed(Projections):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return sum(_scaled(part, factor)(x).relu()[:, :128] for part in (self.q, self.k, self.v))  # pyright: ignore


def _scaled(part: Stored, factor: Tensor) -> Any:
    def forward(x: Tensor) -> Tensor:
        weight = torch.ops.fp8graph.stored_weight(part.weight, scales_of(part) * factor, x.dtype, **part.settings)
        return nn.functional.linear(x, weight)

    return forward


REFUSALS: dict[str, tuple[Any, str]] = {
    "one scale": (
        lambda: Projections("tensor"),
        "its weight has one scale, and a joined weight",
    ),
    "two levels": (lambda: Projections("nvfp4"), "its weight has a global scale of its own"),
    "tiles that are cut": (lambda: Projections("block", (192, 192, 192)), "is not a multiple of 128"),
    "static scales": (lambda: Projections(input_scale_inv=0.02), "differs from q in how its input is quantized"),
    "some biases": (_Biased, "it differs from q in having a bias"),
    "on the left": (_OnTheLeft, "its weight is on the left"),
    "results of the graph": (_Results, "slices of one result would be copied"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_linears_that_are_not_joined(case: str) -> None:
    make, reason = REFUSALS[case]
    module = make()
    target = "sm_100" if case == "two levels" else "sm_90"
    _, backend = run(module, target=target)
    assert any(reason in each for each in reasons(backend)), reasons(backend)
    assert gemms(backend) == {"results of the graph": 2, "some biases": 2}.get(case, 3)


def test_scales_that_are_computed_with_each_call_are_not_joined() -> None:
    _, backend = run(_Computed(), x(), torch.tensor(2.0))
    assert gemms(backend) == 3
    assert reasons(backend) == {
        "its weight or scales are neither parameters nor buffers, and may change with each call"
    }


@pytest.mark.parametrize(("settings", "reason"), [({"cache_weights": False}, "nothing is kept between calls")])
def test_settings_that_keep_no_weights(settings: dict[str, Any], reason: str) -> None:
    torch._dynamo.reset()
    backend = eager_backend(DEFAULT, **settings)
    with torch.no_grad():
        torch.compile(Projections(), backend=backend)(x())
    assert gemms(backend) == 3
    assert [reason in each for each in reasons(backend)] == [True]


def test_a_graph_with_a_backward_multiplies_each_weight() -> None:
    torch._dynamo.reset()
    backend = eager_backend(DEFAULT, cache_weights="update")
    torch.compile(Projections(), backend=backend)(x().requires_grad_()).sum().backward()
    assert gemms(backend) == 6
    assert reasons(backend) == {"the graph has a backward, whose dgrad reads a transposed copy of each weight"}
