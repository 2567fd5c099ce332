"""Helpers of several test files: small modules, one training step, graphs after a pass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph import Backend, Policy, numerics
from fp8graph.backend import inductor_passes
from fp8graph.backend.inductor_passes import run_eagerly
from fp8graph.compat.inductor import select_decomp_table
from fp8graph.ir.compilation import Compilation, GraphFacts
from fp8graph.ir.decisions import Decisions
from fp8graph.ir.edit import sign
from fp8graph.ir.naming import Parameter, graph_inputs
from fp8graph.ir.text import GraphText
from fp8graph.recipes import Recipe, resolve_recipe
from fp8graph.report import GraphView
from tiny_models import TINY

ALL = fp8graph.Policy(default="tensorwise", min_speedup=0)  # FP8 for everything that is legal, heads included
NONE = fp8graph.Policy(default=None)
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")  # one for each kind of scaling


def needs_library(family: str) -> list[pytest.MarkDecorator]:
    """Marks of a test that builds a model of ``family``."""
    library = TINY[family].library if family in TINY else "transformers"
    absent = importlib.util.find_spec(library) is None
    return [pytest.mark.skipif(absent, reason=f"{library} is not installed: it is no dependency")] if absent else []


def first_fast(
    names: str | Sequence[str],
    cases: Iterable[Any],
    ids: Any = None,
    others: pytest.MarkDecorator = pytest.mark.slow,
    also: Collection[str] = (),
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize``, of which the first case is fast and the others, which show more of it, are slow.

    ``also``: by their ids, further fast cases.
    """
    first, *more = cases
    named = ids[1:] if isinstance(ids, list) else [getattr(case, "id", case) for case in more]
    several = not isinstance(names, str)
    marked = [
        case if isinstance(name, str) and name in also else _marked(case, others, several=several)
        for case, name in zip(more, cast("list[Any]", named), strict=True)
    ]
    return pytest.mark.parametrize(names, [first, *marked], ids=ids)


def first_slow(names: str | Sequence[str], cases: Iterable[Any], ids: Any = None) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize``, of which the first case is slow and the others wait for a release."""
    first, *others = cases
    marked = [_marked(case, pytest.mark.release, several=not isinstance(names, str)) for case in others]
    slow = _marked(first, pytest.mark.slow, several=not isinstance(names, str))
    return pytest.mark.parametrize(names, [slow, *marked], ids=ids)


def in_one_test(
    names: str | Sequence[str], cases: Iterable[Any], ids: Callable[[Any], Any] | Iterable[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``pytest.mark.parametrize`` for cases that take no time: one test runs all, and reports each that fails.

    Several of these above a test run all combinations. Fixtures are made once.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    rows = list(_rows(arguments, cases, ids, several=len(arguments) > 1 or not isinstance(names, str)))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        one: Callable[..., None] = getattr(test, "one_case", test)
        inner: list[_Row] = getattr(test, "all_cases", [_Row([], {}, {})])
        all_cases = [_Row(a.ids + b.ids, a.values | b.values, a.shown | b.shown) for b in inner for a in rows]

        @functools.wraps(one)
        def run_all(subtests: pytest.Subtests, **fixtures: Any) -> None:
            __tracebackhide__ = True
            for case in all_cases:
                torch._dynamo.reset()
                torch.manual_seed(0)
                try:
                    one(**fixtures, **case.values)
                except BaseException:  # those by which pytest fails and skips are no Exception
                    with subtests.test("-".join(case.ids) or None, **case.shown):
                        raise

        fixtures = [each for name, each in inspect.signature(one).parameters.items() if name not in all_cases[0].values]
        first = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.Signature([first, *fixtures])
        vars(run_all).update(vars(test), one_case=one, all_cases=all_cases, __signature__=signature)
        return run_all

    return decorate


class _Row(NamedTuple):
    """A case: its ids, its arguments, and those that have no id."""

    ids: list[str]
    values: dict[str, Any]
    shown: dict[str, Any]


def _rows(arguments: list[str], cases: Iterable[Any], ids: Any, *, several: bool) -> Iterator[_Row]:
    """The cases of ``in_one_test``. Raises ValueError for one with a mark: pytest knows no marks within a test."""
    listed = None if ids is None or callable(ids) else [*ids]
    for index, case in enumerate(cases):
        param = case if isinstance(case, type(pytest.param())) else None
        if param is not None and param.marks:
            raise ValueError(f"A case with a mark is a test of its own: {case}")
        values = param.values if param is not None else case if several else (case,)
        chosen = [ids(value) for value in values] if callable(ids) else [listed[index]] if listed else []
        labels = [param.id] if param is not None and param.id else [label for label in chosen if label]
        named = dict(zip(arguments, values, strict=True))
        yield _Row([str(label) for label in labels], named, {} if labels else named)


def _marked(case: Any, mark: pytest.MarkDecorator, *, several: bool) -> Any:
    """A case of one value or ``several``, perhaps a ``pytest.param`` already, with one mark more."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, mark], id=case.id)
    return pytest.param(*(case if several else (case,)), marks=mark)


def rounding_to_nearest(recipe: str) -> Recipe:
    """The recipe by name, without random numbers: where a seed is not known."""
    found = resolve_recipe(recipe)
    assert found is not None
    if isinstance(found, fp8graph.NVFP4BlockScaling):
        return dataclasses.replace(found, disable_stochastic_rounding=True)
    return found


def mixtral(**changed: Any) -> Any:
    """A Mixtral of one layer with four experts, in FP32."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 512, "architectures": ["MixtralForCausalLM"],
    }  # fmt: skip
    return MixtralForCausalLM(MixtralConfig(**sizes | changed))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden: int = 32, inner: int = 64, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=bias)
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Two(nn.Module):
    """Two linears that read one input."""

    def __init__(self, up: int = 64, *, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, up, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.gate(x), self.up(x)], dim=-1)


class Checkpointed(nn.Module):
    """``module``, which runs again in backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.module, x, use_reentrant=False)


class Weight(nn.Module):
    """One weight, used by ``body(weight, *inputs)``."""

    def __init__(self, body: Any, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape))
        self.body = body

    def forward(self, *args: Tensor) -> Tensor:
        return self.body(self.w, *args)


def graph_inputs_for(graph: fx.Graph, args: Iterable[Any]) -> list[Any]:
    """``args`` with each tensor replaced by a new graph input that has its fake value."""
    mode, result = FakeTensorMode(), list[Any]()
    for argument in args:
        if isinstance(argument, Tensor):
            node = graph.placeholder(f"x{len(result)}")
            node.meta["val"] = mode.from_tensor(argument)
            argument = node
        result.append(argument)
    return result


def traced(function: Any, *shapes: tuple[int, ...]) -> fx.Graph:
    """``function`` of FP32 tensors of those shapes as an aten graph, with fake values."""
    return make_fx(function, select_decomp_table(), tracing_mode="fake")(*map(torch.empty, shapes)).graph


def joint(model: nn.Module, x: Tensor) -> fx.GraphModule:
    """Forward and backward in one graph, as torch exports them: parameters, ``x`` and the gradient of the result."""
    with contextlib.ExitStack() as stack:
        found = aot_export_joint_with_descriptors(stack, model, (x,), decompositions=select_decomp_table())
        return found.graph_module


def eager_backend(policy: Any = ALL, *, cache_weights: Any = False, **kwargs: Any) -> fp8graph.Backend:
    """Runs the rewritten graphs node by node. Weights are quantized in the graph, where tests look for it."""
    return fp8graph.Backend(policy, compiler="eager", cache_weights=cache_weights, **kwargs)


def step(model: Any, *args: Any, parameters: Iterable[Tensor] = (), **kwargs: Any) -> list[Tensor]:
    """``[output, *gradients of the inputs and parameters]`` of one forward and backward pass."""
    tensors = [a for a in args if isinstance(a, Tensor) and a.requires_grad] + list(parameters)
    for tensor in tensors:
        tensor.grad = None
    out = model(*args, **kwargs)
    weights = torch.linspace(-1.0, 1.0, out.numel(), device=out.device).reshape(out.shape)
    (out.float() * weights).sum().backward()
    return [out.detach(), *(t.grad.clone() for t in tensors if t.grad is not None)]


def compiled_step(module: nn.Module, x: Tensor, backend: Any, **kwargs: Any) -> list[Tensor]:
    return step(torch.compile(module, backend=backend, **kwargs), x, parameters=module.parameters())


def view_of(module: Any, *args: Any, policy: Any = ALL, **kwargs: Any) -> GraphView:
    """The single rewritten training graph of ``module(*args)``."""
    backend = eager_backend(policy, **kwargs)
    torch.compile(module, backend=backend, fullgraph=True)(*args)
    (view,) = backend.report.graphs
    return view


def graph_text(graph: fx.Graph) -> str:
    """See ``GraphText``."""
    return GraphText()(graph)


def brief(text: str) -> str:
    """A graph's text without the settings of a quantizer that are the same in most recipes."""
    return text.replace(", power_2_scale=False, amax_epsilon=0.0", "")


def stage(module: Any, *args: Any, after: str, **kwargs: Any) -> str:
    """The text of the graph after one pass."""
    return around(view_of(module, *args, **kwargs), after)[1]


def around(view: GraphView, name: str) -> tuple[str, str]:
    """The text of a graph before one pass and after it: the same, if the graph does not need it."""
    names = [each.name for each in inductor_passes.JOINT_PIPELINE]
    (*_, before) = view.before, *(view.stages[other] for other in names[: names.index(name)] if other in view.stages)
    return before, view.stages.get(name, before)


def passed(module: Any, *args: Any, last: str, policy: Any = ALL, **known: Any) -> tuple[fx.Graph, Compilation]:
    """The joint graph of ``module(*args)`` after the passes up to ``last``, run by hand, and what they found in it.

    ``known``: fields of :class:`GraphFacts`. Passes that want spare inputs leave the graph as it is: there are none.
    """
    pipeline = inductor_passes.JOINT_PIPELINE
    with pytest.MonkeyPatch.context() as patch:
        decided = [each.name for each in pipeline].index("assign")  # which only decides
        patch.setattr(inductor_passes, "JOINT_PIPELINE", pipeline[: decided + 1])
        view = view_of(module, *args, policy=NONE)
        graph = view.module.graph
    inputs = zip(graph_inputs(graph), view.inputs, strict=True)
    sources = {index: source for (_, index), source in inputs if index is not None}
    parameters = {i: Parameter(source=s, index=i) for i, s in sources.items() if "_parameters[" in s}
    facts: dict[str, Any] = {"sources": tuple(sources[i] for i in sorted(sources)), "parameters": parameters, **known}
    compilation = Compilation(facts=facts_of(policy, **facts))
    for each in pipeline:
        if each.needed(graph, compilation):
            each.run(graph, compilation)
            sign(graph, each.name)
        if each.name == last:
            return graph, compilation
    raise ValueError(f"no pass is called {last!r}")


def facts_of(policy: Policy, **fields: Any) -> GraphFacts:
    """The facts of a graph, of the fields of :class:`GraphFacts` and of :class:`Decisions`."""
    deciding = {name: fields.pop(name) for name in Decisions.__dataclass_fields__.keys() & fields.keys()}
    return GraphFacts(decisions=Decisions(policy=policy, **deciding), **fields)


def inputs_of(view: GraphView, module: nn.Module, x: Tensor) -> list[Tensor]:
    """The tensors that the inference graph ``view`` of ``module(x)`` takes from Dynamo, in its order."""
    parameters = {f"_parameters['{name}']": parameter for name, parameter in module.named_parameters()}
    sources = [name for name in view.inputs if name.startswith("L[")]
    return [next((p for end, p in parameters.items() if name.endswith(end)), x) for name in sources]


def dialect_counts(text: str) -> Counter[str]:
    """Dialect nodes by name, and ``casts``: the FP8 copies that the quantize nodes write.

    ``text``: of a graph, as a ``GraphView`` has it (its ``module`` would be traced once more).
    """
    counts = Counter(re.findall(r" = fp8graph\.(\w+)\(", text))
    counts["casts"] = len(re.findall(r" = fp8graph\.quantize\(.*\browwise=\[\d", text))
    counts["casts"] += len(re.findall(r" = fp8graph\.quantize\(.*\bcolumnwise=\[\d", text))
    return counts


def multiplied(recipe: Any, *operands: tuple[Tensor, Any, bool]) -> Tensor:
    """``a @ b.T`` of two dequantized operands, in float64. Each: tensor, operand, whether its columnwise layout."""
    values: list[Tensor] = []
    for tensor, operand, columnwise in operands:
        q = numerics.quantize(tensor, recipe, operand, "columnwise" if columnwise else "rowwise")
        decoded = numerics.dequantize(q).double()
        values.append(decoded.transpose(-2, -1) if columnwise else decoded)
    return values[0] @ values[1].T


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor: equal means equal bit for bit, NaN included."""
    return x.reshape(-1).view(torch.uint8)


def same_bits(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def distance(losses: Iterable[float], expected: Iterable[float]) -> float:
    """The largest relative difference of two runs' losses."""
    return max(abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True))


def counted_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets one entry each time the passes run over a graph."""
    runs: list[int] = []
    original = inductor_passes.JointPass.__call__

    def counted(self: inductor_passes.JointPass, graph: fx.Graph) -> None:
        runs.append(1)
        original(self, graph)

    monkeypatch.setattr(inductor_passes.JointPass, "__call__", counted)
    return runs


class Counting(Backend):
    """Runs graphs as they are; counts the passes and the graphs that code would be generated for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, compiler="eager", **kwargs)
        self.generated: list[dict[str, Any]] = []

    @property
    def inner_compile(self) -> Callable[..., Any]:
        def compile(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            self.generated.append({"inputs": inputs, **kwargs})
            return run_eagerly(module, inputs)

        return compile


def through_torch_save(model: Any) -> Any:
    """``value`` after ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def findings(model: nn.Module) -> dict[str, Any]:
    """The rows, the text of the report and the scaling state of a compiled model, for another process to read."""
    backend = fp8graph.backend_of(model)
    return {
        "gemms": sorted({(gemm.fqn, gemm.recipe) for gemm in backend.report.gemms}, key=str),
        "report": str(backend.report),
        "state": dict(backend.state_dict()),
    }
