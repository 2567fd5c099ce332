"""Which of Inductor's options the code that we ask for has, and what it may take for static."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import fx, nn
from torch._inductor.compile_fx import compile_fx

from fp8graph import Policy
from fp8graph.backend import inductor_passes
from fp8graph.backend.inductor_passes import run_eagerly
from fp8graph.ir.settings import Settings
from helpers import MLP, Counting, first_fast


@pytest.mark.parametrize("training", [True, False])
@first_fast("recipe", ["tensorwise", "delayed"])
def test_inputs_stay_where_they_are_for_cuda_graphs(recipe: str, training: bool) -> None:
    """CUDA graphs copy what is not static at each replay, and leave graphs alone that write into it."""
    model, x = MLP(), torch.randn(16, 32)
    static: list[list[int]] = []

    def plain(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def inner(graph: fx.GraphModule, _inputs: Sequence[Any], **kwargs: Any) -> Any:
            static.append(list(kwargs["static_input_idxs"]))
            return run_eagerly(graph, _inputs)

        return cast(Any, compile_fx)(module, list(inputs), inner_compile=inner)

    with torch.set_grad_enabled(training):
        torch.compile(model, backend=plain)(x)
        backend = Counting(Policy(default=recipe, min_speedup=0), cache_weights="update")
        torch.compile(model, backend=backend)(x)
    (forward,) = backend.generated
    ours = list(forward["static_input_idxs"])
    assert static[0]
    assert ours == [*static[0], *range(4, len(forward["inputs"]))]
    assert len(forward["inputs"]) > 4  # x, three weights; and copies, pages


def test_weight_quantization_disables_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph writes into tensors that stay: torch would skip CUDA graphs for it, and warn."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(inductor_passes, "compile_fx", lambda *_, config_patches, **__: asked.append(config_patches))
    settings = Settings(inductor_options={"triton.cudagraphs": True})
    inductor_passes.compile_dialect(fx.GraphModule(nn.Module(), fx.Graph()), [torch.ones(1)], settings)
    assert [patches["triton.cudagraphs"] for patches in asked] == [False]
