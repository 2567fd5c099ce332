"""Who trains: bf16, fp8graph's recipes, torchao, Transformer Engine; all compile the decoder blocks one by one.

The head stays in bf16 for all of them, but where a name says otherwise.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from fp8graph import hardware
from fp8graph.backend.backend import Backend
from fp8graph.backend.entry import backend_of, compile, regions_of
from fp8graph.recipes import Float8CurrentScaling, resolve_recipe
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import Rule

TORCHAO: Final = "torchao"
ENGINE: Final = "Transformer Engine"
# nothing of an earlier contender, so that seconds to compile are those of code that nobody has made before
COLD: Final[Mapping[str, Any]] = {"force_disable_caches": True}

Compile = Callable[[nn.Module, str], Backend | None]  # a model, in place, with "inductor" or "eager"


def bf16(model: nn.Module, compiler: str) -> None:
    """Compile each block by Inductor."""
    for block in regions_of(model, "auto"):
        if compiler == "inductor":
            block.compile(backend="inductor", options=dict(COLD))
        else:
            block.compile(backend="aot_eager")


def fp8(recipe: Any, rules: Sequence[Rule] = (), **settings: Any) -> Compile:
    """fp8graph with its defaults but ``rules`` and ``settings``; else heads and routers stay in bf16."""

    def compiled(model: nn.Module, compiler: Any) -> Backend:
        policy = Policy(list(rules), default=recipe, extends="default")
        options = dict(COLD) if compiler == "inductor" else None
        return backend_of(
            compile(model, policy, regions="auto", compiler=compiler, inductor_options=options, **settings)
        )

    return compiled


def converted_by_torchao(
    model: nn.Module, recipe: str, module_filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> nn.Module:
    """Let torchao swap the linears; without a GPU it emulates their GEMMs."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]

    config: Any = Float8LinearConfig.from_recipe_name(recipe)
    if not torch.accelerator.is_available():
        config = dataclasses.replace(config, emulate=True)
    return convert_to_float8_training(model, config=config, module_filter_fn=module_filter_fn)


def _is_no_head(_module: nn.Module, name: str) -> bool:
    return name.rpartition(".")[2] != "lm_head"


def torchao(recipe: str) -> Compile:
    """torchao's modules in place of the same linears, compiled by Inductor."""

    def compiled(model: nn.Module, compiler: str) -> None:
        converted_by_torchao(model, recipe, _is_no_head)
        bf16(model, compiler)

    return compiled


def engine(recipe: str) -> Compile:
    """Transformer Engine's ``Linear`` in place of the same linears, under its autocast, the rest by Inductor.

    Its other modules (norm and linear in one) would need another model.
    """

    def compiled(model: nn.Module, compiler: str) -> None:
        import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
        from transformer_engine.common import recipe as recipes  # pyright: ignore[reportMissingImports]

        linears = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and _is_no_head(m, n)]
        for name, linear in linears:
            other = te.Linear(
                linear.in_features, linear.out_features, bias=linear.bias is not None,
                params_dtype=linear.weight.dtype, device=linear.weight.device,
            )  # fmt: skip
            other.load_state_dict(linear.state_dict(), strict=False)  # its own extra state stays as it is
            model.set_submodule(name, other)
        chosen = getattr(recipes, recipe)()
        bf16(model, compiler)
        forward = model.forward

        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            # fp8_autocast: the name before release 2.9
            region = (
                te.autocast(enabled=True, recipe=chosen)
                if hasattr(te, "autocast")
                else te.fp8_autocast(fp8_recipe=chosen)
            )
            with region:
                return forward(*args, **kwargs)

        model.forward = under_autocast

    return compiled


CONTENDERS: Final[Mapping[str, Compile]] = {
    "bf16": bf16,
    "tensorwise": fp8("tensorwise"),
    "delayed": fp8("delayed"),
    "torchao tensorwise": torchao("tensorwise"),
    "tensorwise, save memory": fp8("tensorwise", save="memory"),
    # two choices that change numbers, and are nobody's default
    "tensorwise, head in FP8": fp8("tensorwise", [Rule("lm_head", "tensorwise")]),
    "tensorwise, fast accumulation": fp8(Float8CurrentScaling(use_fast_accum=(True, True, True))),
    "rowwise": fp8("rowwise"),
    "blockwise": fp8("blockwise"),
    "mxfp8": fp8("mxfp8"),
    "torchao rowwise": torchao("rowwise"),
    "Transformer Engine tensorwise": engine("Float8CurrentScaling"),
    "Transformer Engine delayed": engine("DelayedScaling"),
}


def why_not(name: str, device: torch.device) -> str:
    """Return why a contender cannot run here, "" if it can."""
    for prefix, package in ((TORCHAO, "torchao"), (ENGINE, "transformer_engine")):
        if name.startswith(prefix):
            return "" if importlib.util.find_spec(package) else f"{package} is not installed"
    recipe: Any = None if name == "bf16" else resolve_recipe(name.partition(",")[0])
    here = hardware.of_device(device)
    if recipe is None or not here.is_gpu:
        return ""
    support = hardware.support_of(here, recipe)
    return "" if support else str(support)
