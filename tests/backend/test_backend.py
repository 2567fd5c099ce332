"""The ways to use the backend: by name, by options, as an object; training and inference; every calling style."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph.numerics import sqnr_db
from helpers import ALL, MLP, NONE, compiled_step, eager_backend, first_fast, same_bits, step
from tiny_models import llama_config


def llama(**overrides: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(**overrides)).bfloat16()


def ids(batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(0, 256, (batch, length))


@first_fast(
    "how",
    [
        pytest.param({"backend": "fp8graph", "options": {"compiler": "eager"}}, id="name"),
        pytest.param({"backend": "fp8graph", "options": {"compiler": "eager"}, "fullgraph": True}, id="fullgraph"),
        pytest.param({"backend": "fp8graph", "options": {"compiler": "eager"}, "dynamic": True}, id="dynamic"),
        pytest.param({"backend": fp8graph.Backend(compiler="eager")}, id="object"),
    ],
)
def test_training_however_it_is_asked_for(how: dict[str, Any]) -> None:
    model, x = MLP(), torch.randn(4, 8, 32, requires_grad=True)
    expected = step(model, x, parameters=model.parameters())
    compiled = torch.compile(model, **how)
    got = step(compiled, x, parameters=model.parameters())
    assert [sqnr_db(e, g) > 17 for e, g in zip(expected, got, strict=True)] == [True] * 5
    report = fp8graph.backend_of(compiled).report
    assert {gemm.recipe for gemm in report.gemms[-9:]} == {"tensorwise"}


def test_a_function_is_compiled_too() -> None:
    linear = nn.Linear(32, 32)
    backend = eager_backend()
    torch.compile(lambda x: linear(x).relu(), backend=backend)(torch.randn(4, 32))
    assert len(backend.report.gemms) == 2  # fprop and wgrad: the input needs no gradient


def test_inference_modes_rewrite_fprop_only() -> None:
    model, x = MLP(), torch.randn(4, 32)
    for mode in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        backend = eager_backend()
        with mode():
            out = torch.compile(model, backend=backend)(x)
        assert sqnr_db(model(x), out) > 24
        assert [(gemm.gemm, gemm.recipe) for gemm in backend.report.gemms] == [("fprop", "tensorwise")] * 3


@pytest.mark.slow
@pytest.mark.parametrize("style", ["model.compile", "model.forward"])
def test_generate_runs_compiled(style: str) -> None:
    model = llama(layers=1).eval()
    backend = eager_backend(None)
    if style == "model.compile":
        model.compile(backend=backend)
    else:
        model.forward = torch.compile(model.forward, backend=backend)
    prompt = ids(1, 5)
    out = model.generate(prompt, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(prompt))
    assert out.shape == (1, 9)
    assert {g.recipe for g in backend.report.gemms if g.fqn.endswith("up_proj")} == {"tensorwise"}
    assert fp8graph.backend_of(model) is backend


def test_dynamic_sequence_length_compiles_twice_at_most() -> None:
    model = MLP()
    backend = eager_backend()
    compiled = torch.compile(model, backend=backend)
    for length in (16, 17, 5, 48, 31, 2):
        x = torch.randn(2, length, 32, requires_grad=True)
        expected = step(model, x, parameters=model.parameters())
        got = step(compiled, x, parameters=model.parameters())
        assert all(sqnr_db(e, g) > 17 for e, g in zip(expected, got, strict=True)), length
    assert len(backend.report.graphs) == 2
    assert len(backend.report.gemms) == 18
    assert all(gemm.recipe == "tensorwise" for gemm in backend.report.gemms)


def test_graph_breaks_rewrite_each_piece_under_its_full_name() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([MLP(), MLP()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    model, x = Broken(), torch.randn(4, 32, requires_grad=True)
    backend = eager_backend()
    backend.bind(model)
    expected = step(model, x, parameters=model.parameters())
    got = compiled_step(model, x, backend)
    assert all(sqnr_db(e, g) > 14 for e, g in zip(expected, got, strict=True))
    names = {f"layers.{i}.{name}" for i in range(2) for name in ("gate", "up", "down")}
    assert {gemm.fqn for gemm in backend.report.gemms} == names
    assert all(gemm.recipe for gemm in backend.report.gemms)


def test_layers_compiled_one_by_one_share_a_graph_and_keep_their_names() -> None:
    model = nn.Sequential(MLP(), MLP(), MLP())
    policy = fp8graph.Policy([fp8graph.Rule("1.*", None), fp8graph.Rule("2.down", "tensorwise", wgrad=None)])
    backend = eager_backend(policy)
    backend.bind(model)
    for layer in model:
        layer.compile(backend=backend)
    x = torch.randn(4, 32, requires_grad=True)
    got = step(model, x, parameters=model.parameters())
    recipes = {(g.fqn, g.gemm): g.recipe for g in backend.report.gemms}
    assert len(recipes) == 27
    assert {name for (name, _), recipe in recipes.items() if recipe is None} == {
        "1.gate", "1.up", "1.down", "2.down",
    }  # fmt: skip
    assert recipes["2.down", "wgrad"] is None
    assert recipes["2.down", "dgrad"] == recipes["0.down", "wgrad"] == "tensorwise"
    for layer in model:
        layer._compiled_call_impl = None
    whole = torch.compile(lambda x: model(x), backend=eager_backend(policy))
    assert same_bits(step(whole, x, parameters=model.parameters()), got)


def test_two_models_in_one_step_function_are_distinguished() -> None:
    student, teacher = MLP(), MLP()

    def loss(x: Tensor) -> Tensor:
        return (student(x) - teacher(x)).pow(2).mean()

    backend = eager_backend(fp8graph.Policy([fp8graph.Rule("teacher.*", None)]))
    torch.compile(loss, backend=backend)(torch.randn(4, 32))
    fp8 = {gemm.fqn for gemm in backend.report.gemms if gemm.recipe}
    assert fp8 == {"student.gate", "student.up", "student.down"}


def test_two_models_with_one_backend_are_distinguished_by_name() -> None:
    student, teacher, x = MLP(), MLP(), torch.randn(16, 32)
    policy = fp8graph.Policy([fp8graph.Rule("teacher.down", None)], default="delayed", min_speedup=0)
    backend = eager_backend(policy)
    compiled = [torch.compile(model, backend=backend) for model in (student, teacher)]
    for model in compiled:
        model(x).sum().backward()
    with pytest.raises(fp8graph.StateError, match=re.escape("two layers are called 'gate.input'")) as error:
        backend.state_dict()
    assert "backend.bind(model, name=...)" in str(error.value)
    backend.bind(student)
    backend.bind(teacher, name="teacher")
    for model in compiled:
        model(x).sum().backward()
    layers = {name.partition("|")[0].rpartition(".")[0] for name in backend.state_dict() if "|" in name}
    assert layers == {"gate", "up", "down", "teacher.gate", "teacher.up", "teacher.down"}
    fp8 = {gemm.fqn for gemm in backend.report.gemms if gemm.recipe}
    assert {"down", "teacher.gate"} < fp8
    assert "teacher.down" not in fp8


def test_layers_bound_after_their_first_step_have_their_full_names_at_once() -> None:
    model = nn.Sequential(*(MLP(32, 64) for _ in range(3)))
    backend = eager_backend(fp8graph.Policy(default="delayed", min_speedup=0), cache_weights="update")
    for layer in model:
        layer.compile(backend=backend)
    model(torch.randn(16, 32)).sum().backward()
    backend.bind(model)
    found = {name.partition("|")[0] for name in backend.state_dict() if "|" in name}
    linears, operands = ("gate", "up", "down"), ("input", "weight", "grad_output")
    assert found == {f"{i}.{linear}.{operand}" for i in range(3) for linear in linears for operand in operands}


@first_fast("dtype", [torch.float32, torch.bfloat16, torch.float16])
@first_fast("bias", [False, True])
def test_dtypes_and_bias(dtype: torch.dtype, bias: bool) -> None:
    model, x = MLP(bias=bias).to(dtype), torch.randn(4, 8, 32, dtype=dtype, requires_grad=True)
    expected = step(model, x, parameters=model.parameters())
    got = compiled_step(model, x, eager_backend())
    assert [g.dtype for g in got] == [e.dtype for e in expected]
    assert all(sqnr_db(e, g) > 16 for e, g in zip(expected, got, strict=True))


def test_master_weights_under_torch_autocast() -> None:
    model, x = MLP(), torch.randn(4, 8, 32, requires_grad=True)
    backend = eager_backend()
    with torch.autocast("cpu", torch.bfloat16):
        got = compiled_step(model, x, backend)
    assert [p.grad.dtype for p in model.parameters() if p.grad is not None] == [torch.float32] * 3
    assert {gemm.dtypes[2] for gemm in backend.report.gemms} == {"bf16"}
    assert all(gemm.recipe for gemm in backend.report.gemms)
    expected = step(model, x, parameters=model.parameters())
    assert all(sqnr_db(e, g) > 16 for e, g in zip(expected, got, strict=True))


@first_fast("shape", [(1, 32), (3, 32), (1, 1, 32), (2, 7, 32)])
@first_fast("inner", [64, 40, 7])
def test_odd_sizes_are_padded_not_refused(shape: tuple[int, ...], inner: int) -> None:
    model, x = MLP(inner=inner), torch.randn(shape, requires_grad=True)
    backend = eager_backend()
    expected = step(model, x, parameters=model.parameters())
    got = compiled_step(model, x, backend)
    assert all(gemm.recipe for gemm in backend.report.gemms)
    assert [g.shape for g in got] == [e.shape for e in expected]
    assert all(sqnr_db(e, g) > 15 for e, g in zip(expected, got, strict=True))
    padded = {g.gemm for g in backend.report.gemms if g.fqn == "up" and "padded" in g.reason}
    assert ("fprop" in padded) == (inner % 16 != 0)
    assert "wgrad" in padded  # the number of tokens is its k


def test_frozen_weights_and_inputs_without_gradient_have_fewer_gemms() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].requires_grad_(False)
    backend = eager_backend()
    compiled_step(model, torch.randn(4, 32), backend)
    assert [(g.fqn, g.gemm) for g in backend.report.gemms] == [("0", "fprop"), ("1", "fprop"), ("1", "wgrad")]


def test_set_policy_recompiles_and_the_old_policy_comes_back_without() -> None:
    model, x = MLP(), torch.randn(4, 32, requires_grad=True)
    backend = eager_backend(ALL)
    compiled = torch.compile(model, backend=backend)
    fp8 = step(compiled, x, parameters=model.parameters())
    backend.set_policy(NONE)
    high = step(compiled, x, parameters=model.parameters())
    expected = step(model, x, parameters=model.parameters())
    assert all(sqnr_db(e, h) > 100 > sqnr_db(e, f) for e, h, f in zip(expected, high, fp8, strict=True))
    assert len(backend.report.graphs) == 2
    backend.set_policy(ALL)
    assert same_bits(fp8, step(compiled, x, parameters=model.parameters()))
    assert len(backend.report.graphs) == 2


@pytest.mark.slow
def test_a_policy_change_keeps_dynamic_shapes() -> None:
    model = MLP()
    backend = eager_backend(ALL)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    compiled(torch.randn(2, 8, 32))
    backend.set_policy(fp8graph.Policy([fp8graph.Rule("up", None)]))
    for length in (8, 9, 31):
        compiled(torch.randn(2, length, 32))
    assert len(backend.report.graphs) == 2
    assert all(isinstance(g.m, str) for g in backend.report.gemms if g.gemm == "fprop")


def test_gradient_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(MLP):
        def forward(self, x: Tensor) -> Tensor:
            out = checkpoint(super().forward, x, use_reentrant=False)
            assert isinstance(out, Tensor)
            return out

    plain = MLP()
    saved = Checkpointed()
    saved.load_state_dict(plain.state_dict())
    x = torch.randn(4, 32, requires_grad=True)
    assert same_bits(compiled_step(plain, x, eager_backend()), compiled_step(saved, x, eager_backend()))


def test_state_dict_and_copies_of_the_model_are_untouched() -> None:
    model = MLP()
    names = list(model.state_dict())
    model.compile(backend=eager_backend())
    model(torch.randn(4, 32))
    assert list(model.state_dict()) == names
    ema = copy.deepcopy(model)  # torch drops the compiled code of a copy
    ema.compile(backend=fp8graph.backend_of(model))
    assert same_bits([ema(torch.ones(4, 32))], [model(torch.ones(4, 32))])


def test_a_subgraph_of_a_higher_order_op_is_in_the_report() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda h: self.inner(h), lambda h: h - 1, (self.before(x),))

    backend = eager_backend()
    model, x = Outer(), torch.randn(4, 32)
    with torch.no_grad():
        out = torch.compile(model, backend=backend, fullgraph=True)(x)
    assert sqnr_db(model(x), out) > 24
    records = {(g.op, g.recipe) for view in backend.report.graphs for g in view.gemms}
    assert ("linear", "tensorwise") in records
    assert backend.report.graphs[0].after.count("return ") == backend.report.graphs[0].before.count("return ")


@pytest.mark.slow
def test_many_modules_of_torch_are_compiled_each() -> None:
    """Their calls have one code, which Dynamo compiles eight times at most."""
    x = torch.randn(16, 32)
    models = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(12)]
    for model in models:
        fp8graph.compile(model, ALL, compiler="eager")
        model(x)
        assert [gemm.recipe for gemm in fp8graph.backend_of(model).report.gemms] == ["tensorwise"] * 2


class Disabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        run: Any = torch.compiler.disable(lambda: self.inner(x))
        return run()


ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, batch_first=True), 1).eval()
COMPILES_NOTHING = {
    "disabled": (Disabled(), "Dynamo made no graph."),
    "no matmul": (nn.LayerNorm(32), r"1 graph\(s\) without a matmul."),
    "fused op": (ENCODER, r"layers.0: aten._transformer_encoder_layer_fwd multiplies by weights inside"),
}


@pytest.mark.parametrize("name", COMPILES_NOTHING)
def test_nothing_compiled_is_said_once_and_strict_raises(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model, text = COMPILES_NOTHING[name]
    fp8graph.compile(model, ALL, compiler="eager")
    x = torch.randn(1, 16, 32)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "fp8graph"):
        for _ in range(3):
            model(x)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "fp8graph"]
    assert re.match(f"{type(model).__name__} was called, and no GEMM of it was compiled", said)
    assert re.search(text, said)
    torch._dynamo.reset()
    fp8graph.compile(model, ALL, compiler="eager", strict=True)
    with torch.no_grad(), pytest.raises(fp8graph.Fp8CoverageError, match=text):
        model(x)


def test_a_call_inside_other_compiled_code_is_not_asked_what_it_compiled(caplog: pytest.LogCaptureFixture) -> None:
    model = MLP()
    fp8graph.compile(model, ALL, compiler="eager")
    step = torch.compile(lambda x: model(x).sum(), backend=eager_backend(), fullgraph=True)
    with caplog.at_level(logging.WARNING, "fp8graph"):
        step(torch.randn(16, 32))
    assert not [record for record in caplog.records if record.name == "fp8graph"]
    assert fp8graph.backend_of(model) is not fp8graph.backend_of(step)


@pytest.mark.parametrize("switch", ["stance", "config", "recurrent"])
def test_a_switch_that_keeps_dynamo_from_compiling_is_named(switch: str, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    off = {
        "stance": lambda: torch.compiler.set_stance("force_eager"),
        "config": lambda: cast(Any, torch._dynamo).config.patch(disable=True),
        "recurrent": contextlib.nullcontext,
    }[switch]
    model: Any = nn.GRU(32, 32) if switch == "recurrent" else MLP()
    fp8graph.compile(model, ALL, compiler="eager")
    with off():
        model(torch.randn(16, 32))
    names = {
        "stance": 'torch.compiler.set_stance("force_eager") is in force',
        "config": "torch.compile is off (TORCHDYNAMO_DISABLE=1, or torch._dynamo.config.disable)",
        "recurrent": "Dynamo traces nn.RNN, nn.GRU and nn.LSTM only if torch._dynamo.config.allow_rnn is True",
    }
    assert names[switch] in caplog.text


def test_an_export_says_that_it_is_in_high_precision(caplog: pytest.LogCaptureFixture) -> None:
    model, x = MLP(), torch.randn(16, 32)
    fp8graph.compile(model, ALL, compiler="eager")
    model(x)
    with caplog.at_level(logging.WARNING, "fp8graph"):
        exported = torch.export.export(model, (x,))
    assert "MLP is exported as it was written, in high precision" in caplog.text
    assert "scaled_mm" not in str(exported.graph)
    caplog.clear()
    torch.export.export(model, (x,), strict=True)  # Dynamo traces it inside a module of its own
    assert "is exported" not in caplog.text


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_of_a_compiled_model_says_that_it_is_in_high_precision(caplog: pytest.LogCaptureFixture) -> None:
    model, x = MLP(), torch.randn(16, 32)
    fp8graph.compile(model, ALL, compiler="eager")
    outer = nn.Sequential(model)
    for module in (model, outer):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fp8graph"):
            scripted = torch.jit.script(module)
        assert "MLP is exported as it was written, in high precision: torch.jit.script leaves" in caplog.text
        assert torch.equal(scripted(x), MLP.forward(model, x))
    with pytest.raises(RuntimeError, match="trace a dynamo-optimized function"):
        torch.jit.trace(model, x)
    with pytest.raises(ValueError, match="Unknown type annotation"):  # the wrapper of torch.compile
        torch.jit.script(torch.compile(MLP(), backend="fp8graph"))


@pytest.mark.parametrize("strict", [False, True])
def test_a_compiled_model_that_another_backend_compiles_again_says_so(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    model = fp8graph.compile(MLP(), ALL, compiler="eager", strict=strict)
    torch.compile(model, backend=eager_backend())(torch.randn(16, 32))
    assert not re.search("again|exported", caplog.text)  # in FP8
    again = torch.compile(model, backend="aot_eager")
    if strict:
        with pytest.raises(
            Exception, match=r"strict mode: MLP is compiled again, by torch.compile\(backend=aot_eager\)"
        ):
            again(torch.randn(16, 32))
        return
    again(torch.randn(16, 32))
    assert "MLP is compiled again, by torch.compile(backend=aot_eager), and runs in high precision there" in caplog.text
