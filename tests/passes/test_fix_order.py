"""Every token has the same bits whatever the batch, or the model is refused by layer."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch.nn import functional
from transformers import DynamicCache, StaticCache

from fp8graph import Backend, Float8BlockScaling, Policy, Rule
from fp8graph.compat.torch_build import CPP_ROUNDS_BETWEEN
from fp8graph.errors import ConfigError, Fp8CoverageError
from fp8graph.ir import collectives
from fp8graph.ir.compilation import Compilation
from fp8graph.passes.batch_invariance import fix_order
from helpers import MLP, NONE, facts_of, first_fast, first_slow, same_bits
from tiny_models import TINY, causal_lm, model_and_inputs

TOKENS, BATCH = 40, 6
RECIPES = ("rowwise", "blockwise", "mxfp8")
IDS = torch.randint(3, 256, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: causal_lm("Llama")(2),
    "mixture": lambda: causal_lm(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16
    )(1),
}


class Program:
    """A small model that is compiled, and its logits."""

    def __init__(self, name: str, recipe: str, device: str = "cpu", **settings: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.ids, self.model = IDS.to(device), MODELS[name]().bfloat16().to(device)
        settings = {"compiler": "eager", "batch_invariant": True, **settings}
        self.backend = Backend(recipe=recipe, **settings)
        self.run = torch.compile(self.model, backend=self.backend, dynamic=True)

    def logits(self, ids: Tensor, **more: Any) -> Tensor:
        return self.run(ids, **{"use_cache": False, **more}).logits

    def gradient(self, ids: Tensor, of_logits: Tensor) -> Tensor:
        """Of the embedded tokens."""
        embedded = self.model.get_input_embeddings()(ids).detach().requires_grad_()
        self.run(inputs_embeds=embedded, use_cache=False).logits.backward(of_logits)
        assert embedded.grad is not None
        return embedded.grad


def padded(ids: Tensor, left: int, right: int) -> dict[str, Tensor]:
    mask = functional.pad(torch.ones_like(ids), (left, right))
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    return {"input_ids": functional.pad(ids, (left, right)), "attention_mask": mask, "position_ids": positions}


def check(program: Program, *, all_ways: bool = True) -> None:
    """Some ways are compiled anew: sizes of 1 are constants, and so is the kind of mask and cache."""
    ids, device = program.ids, program.ids.device
    with dynamo_config.patch(recompile_limit=64), torch.no_grad(), device:
        whole = program.logits(ids)
        for rows in ([0], [5, 1, 2], [4, 2], [3])[: None if all_ways else 2]:
            assert torch.equal(program.logits(ids[rows]), whole[rows]), rows
        for tokens in (33, 1, 2, 7)[: None if all_ways else 1]:
            assert torch.equal(program.logits(ids[:, :tokens]), whole[:, :tokens]), tokens
        for left, right in ((5, 0), (0, 5))[: None if all_ways else 1]:
            around = padded(ids, left, right)
            logits = program.logits(around.pop("input_ids"), **around)
            assert torch.equal(logits[:, left : left + TOKENS], whole), (left, right)
        packed = program.logits(ids[:3].reshape(1, -1), position_ids=torch.arange(TOKENS).repeat(3)[None])
        assert torch.equal(packed.view(3, TOKENS, -1), whole[:3])
        config = program.model.config
        caches = StaticCache(config=config, max_cache_len=48), DynamicCache(config=config)
        for cache in caches[: None if all_ways else 1]:
            for tokens in (slice(0, 10), slice(10, 11), slice(11, 12), slice(12, 20)):
                logits = program.logits(ids[:2, tokens], past_key_values=cache, use_cache=True)
                assert torch.equal(logits, whole[:2, tokens]), tokens
    of_logits = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1)).to(whole)
    with dynamo_config.patch(recompile_limit=64):
        assert torch.equal(program.logits(ids).detach(), whole)  # the forward of training
        gradient = program.gradient(ids, of_logits)
        for rows in ([0], [5, 1, 2]):
            assert torch.equal(program.gradient(ids[rows], of_logits[rows]), gradient[rows])
    assert any(gemm.recipe for gemm in program.backend.report.gemms)
    assert not program.backend.report.eager_frames


@first_slow(("name", "recipe"), [(name, recipe) for name in MODELS for recipe in RECIPES])
def test_a_token_has_the_same_bits_in_any_batch(name: str, recipe: str) -> None:
    check(Program(name, recipe))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_token_has_the_same_bits_on_a_gpu(name: str, recipe: str, compiler: str) -> None:
    check(Program(name, recipe, "cuda", compiler=compiler))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """By which Inductor would divide the sum of a row, if there are few rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Normed(nn.Module):
    """A norm whose result is not rounded to FP8 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(16384), nn.Linear(16384, 32, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return y, self.linear(y)


needs_rounding = pytest.mark.skipif(not CPP_ROUNDS_BETWEEN, reason="generated C++ does not round before torch 2.13")


@needs_rounding
@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", MODELS)
def test_generated_code_gives_a_token_the_same_bits(name: str) -> None:
    check(Program(name, "rowwise", compiler="inductor"), all_ways=False)


@needs_rounding
@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_generated_code_adds_up_a_row_alike_in_any_batch() -> None:
    """The sums of a norm: of one row, by itself, Inductor would give each thread a part."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = Backend(recipe="rowwise", batch_invariant=True)
    compiled = torch.compile(Normed(), backend=backend, dynamic=False)
    x = torch.randn(16, 16384)
    with torch.no_grad():
        whole = compiled(x)
        alone = [compiled(row) for row in x.split(1)]
        assert same_bits(whole, map(torch.cat, zip(*alone, strict=True)))
        assert same_bits([y[[8, 0, 3]] for y in whole], compiled(x[[8, 0, 3]]))
    assert same_bits(whole, compiled(x.requires_grad_()))


def test_without_the_option_the_bits_depend_on_the_batch() -> None:
    """Else the tests above would show nothing. Tensorwise scales are enough."""
    torch._dynamo.reset()
    model = torch.compile(MLP(), backend=Backend(recipe="tensorwise", compiler="eager"))
    x = torch.randn(64, 32) * torch.arange(1.0, 65.0)[:, None]
    assert not torch.equal(model(x)[:16], model(x[:16]))


@first_fast("recipe", RECIPES)
def test_a_row_of_one_layer_has_the_same_bits_alone(recipe: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    policy = Policy([Rule("down", None)], default=recipe)
    model = torch.compile(MLP(), backend=Backend(policy, compiler="eager", batch_invariant=True), dynamic=True)
    x = torch.randn(70, 32, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    for rows in ([3], [69, 0, 33]):
        some = x.detach()[rows].requires_grad_()
        result = model(some)
        assert torch.equal(result, y[rows])
        result.square().sum().backward()
        assert x.grad is not None
        assert some.grad is not None
        assert torch.equal(some.grad, x.grad[rows])


class Attending(nn.Module):
    """One head, in a form that a test chooses."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(32, 96), attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.qkv(x).unflatten(-1, (3, 1, 32)).permute(2, 0, 3, 1, 4))


class Heads(nn.Module):
    """Attention whose gradients are viewed as rows of tokens, with nothing in between."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).view(*x.shape[:2], 2, 16).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)


def test_gradients_of_attention_lie_in_memory_as_torchs() -> None:
    gradients: list[Tensor] = []
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(2, 8, 32, requires_grad=True)
    for batch_invariant in (True, False):
        torch._dynamo.reset()
        backend = Backend(Policy(default=None), compiler="eager", batch_invariant=batch_invariant)
        (gradient,) = torch.autograd.grad(torch.compile(model, backend=backend)(x).sum(), [x])
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def gram(q: Tensor, k: Tensor, _v: Tensor) -> Tensor:
    return q.transpose(-2, -1) @ k


ATTENTION = Policy([Rule("*", "rowwise", op="attention")], default="rowwise")
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "tensorwise": (
        MLP,
        "tensorwise",
        r"hold for\n  gate: tensorwise scales input by all tokens of a batch; rowwise, blockwise and",
    ),
    "delayed": (MLP, "delayed", r"hold for\n  gate: delayed scales input by all tokens"),
    "nvfp4": (MLP, "nvfp4", r"hold for\n  gate: nvfp4 scales input by all tokens"),
    "one layer": (MLP, Policy([Rule("down", "tensorwise")], default="rowwise"), r"hold for\n  down: tensorwise"),
    "written out": (
        lambda: Attending(written_out),
        "rowwise",
        r'hold for\n  the model: attention is written out as matmuls: attn_implementation="sdpa"',
    ),
    "dropout": (lambda: Attending(dropping), "rowwise", r"hold for\n  the model: .* without attention dropout"),
    "in FP8": (
        lambda: Attending(functional.scaled_dot_product_attention),
        ATTENTION,
        r"hold for\n  the model: attention in FP8 has a scale",
    ),
    "activations": (
        lambda: Attending(gram),
        "rowwise",
        r"hold for\n  the model: a product of activations adds up tokens",
    ),
    "random numbers": (
        lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)),
        "rowwise",
        r"hold for\n  1: \S+ draws numbers by the place in the batch",
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.Linear(32, 32)),
        "rowwise",
        r"hold for\n  0: the order of sums in aten\.convolution is not fp8graph's",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_depends_on_the_batch_is_refused(name: str) -> None:
    make, policy, message = REFUSED[name]
    torch._dynamo.reset()
    backend = Backend(
        policy if isinstance(policy, Policy) else Policy(default=policy), compiler="eager", batch_invariant=True
    )
    with pytest.raises(ConfigError, match=f"(?s)^batch_invariant=True cannot {message}"):
        torch.compile(make(), backend=backend)(torch.randn(2, 8, 32))


SMALL_TILES = Float8BlockScaling(x_block=(1, 16), w_block=(16, 16), grad_block=(1, 16))
ON_GPUS: dict[str, tuple[Any, str]] = {
    "gfx942": ("rowwise", "on gfx942 the library chooses a GEMM's kernel by the number of rows"),
    "sm_80": ("rowwise", "on sm_80 the library chooses a GEMM's kernel by the number of rows"),
    "sm_90": (SMALL_TILES, "the GPU's products are of FP8 with a scale per row, or per 32"),
}


@pytest.mark.parametrize("target", ON_GPUS)
def test_a_gpu_without_kernels_is_refused(target: str) -> None:
    torch._dynamo.reset()
    recipe, why = ON_GPUS[target]
    policy = Policy(default=recipe, min_speedup=0)
    backend = Backend(policy, compiler="eager", target=target, batch_invariant=True)
    with pytest.raises(ConfigError, match=f"gate: {why}"):
        torch.compile(MLP(), backend=backend)(torch.randn(64, 32))


@pytest.mark.parametrize("kind", [collectives.ALL_REDUCE, collectives.REDUCE_SCATTER])
def test_sums_over_more_than_two_ranks_are_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tensor parallelism has them; an amax is the same in any order, and so is a sum of two numbers."""
    ranks = {"two": 2, "four": 4}
    monkeypatch.setattr(fix_order, "number_of_ranks", lambda group: ranks[group])
    for operation, group in itertools.product(("sum", "avg", "max"), ranks):
        graph = fx.Graph()
        more = (4,) if kind is collectives.REDUCE_SCATTER else ()
        graph.call_function(kind, (graph.placeholder("x"), operation, *more, group))
        refused = group == "four" and operation != "max"
        expected: Any = pytest.raises(ConfigError, match=r"hold for\n  the model: \S+ adds up what 4 ranks have")
        with expected if refused else contextlib.nullcontext():
            fix_order.refuse_batches(graph, Compilation(facts=facts_of(NONE)))


@pytest.mark.release
@pytest.mark.parametrize("target", [None, "sm_90"])
@pytest.mark.parametrize("name", TINY)
def test_each_family_is_compiled_or_refused_by_layer(name: str, target: str | None) -> None:
    """One step of training: nothing else may happen to it."""
    pytest.importorskip(TINY[name].library)
    model, inputs = model_and_inputs(name, 1)
    backend = Backend(recipe="rowwise", compiler="eager", batch_invariant=True, target=target)
    try:
        result = torch.compile(model, backend=backend)(**inputs)
    except ConfigError as refused:
        lines = str(refused).splitlines()
    else:
        lines = ["batch_invariant=True cannot hold for"]
        if (loss := getattr(result, "loss", None)) is not None:
            loss.backward()
    assert lines[0] == "batch_invariant=True cannot hold for"


def test_long_lists_of_refusals_are_cut() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(10)))
    with pytest.raises(ConfigError, match=r"\n  7: .*\n  \.\.\. and 2 more\n"):
        torch.compile(model, backend=Backend(recipe="tensorwise", compiler="eager", batch_invariant=True))(
            torch.randn(16, 32)
        )


def test_all_products_but_wgrad_are_ordered() -> None:
    torch._dynamo.reset()
    backend = Backend(Policy([Rule("down", None)], default="rowwise"), compiler="eager", batch_invariant=True)
    torch.compile(MLP(), backend=backend)(torch.randn(64, 32, requires_grad=True)).sum().backward()
    (view,) = backend.report.graphs
    after = view.after
    assert [after.count(f"fp8graph.{name}(") for name in ("scaled_mm", "ordered_scaled_mm", "ordered_mm")] == [2, 4, 2]
    assert after.count("aten.mm(") == 1  # wgrad of `down`


def test_a_frame_that_would_run_in_eager_is_an_error() -> None:
    """Dynamo's recompile limit: eager code has another order of sums."""
    torch._dynamo.reset()
    compiled = torch.compile(
        MLP(), backend=Backend(recipe="rowwise", compiler="eager", batch_invariant=True), dynamic=False
    )
    sizes = iter(range(2, 12))
    with pytest.raises(Fp8CoverageError, match="batch_invariant=True: .*recompile limit"):
        [compiled(torch.randn(rows, 32)) for rows in sizes]
    assert next(sizes) == 11  # the ninth raised


def test_options_of_inductor_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="small_tiles=True multiplies few rows in another order"):
        Backend(recipe="rowwise", batch_invariant=True, small_tiles=True)
    options = Backend(recipe="rowwise", batch_invariant=True).settings.inductor
    assert options == {"emulate_precision_casts": True, "cpp.threads": 1}
    with pytest.raises(ConfigError, match=r"needs Inductor's option cpp\.threads=1, not 4\."):
        Backend(recipe="rowwise", batch_invariant=True, inductor_options={"cpp.threads": 4})
