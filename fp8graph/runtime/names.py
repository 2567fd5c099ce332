"""Names of parameters, by identity."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn

from fp8graph.compat import anchors, fakes, wrappers
from fp8graph.compat.fakes import FakeTensor
from fp8graph.ir.decisions import Stacks, stacks_of
from fp8graph.recipes import FP8_MAX
from fp8graph.runtime.parameters import ParameterTable
from fp8graph.runtime.staleness import Epoch

# modules whose parameters of several dims are looked up or convolved
_NO_LINEARS: Final = (nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d)


class Names:
    """Full names (FQNs) by parameter identity. It keeps no parameter alive.

    Args:
        epoch: it is advanced when parameters get other names.
    """

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._names = ParameterTable[str]()
        self._stacks = ParameterTable[Stacks]()  # of their models
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._in_graphs: set[str] | None = set()  # names of parameters; None: some graph's were not bound yet

    def __contains__(self, model: torch.nn.Module) -> bool:
        """Return whether ``model`` itself was bound."""
        return model in self._models

    def __bool__(self) -> bool:
        return bool(len(self._names) or self._models)

    def bind(self, model: torch.nn.Module, name: str = "") -> None:
        """Learn the names of ``model``'s parameters; they begin with ``name``, if that is not empty."""
        self._remember(model, name)
        self._learn(model, name)

    def bind_later(self, model: torch.nn.Module) -> None:
        """Bind a model that has no parameters yet, if it is not bound: its names are learned when one is asked for."""
        if model not in self:
            self._remember(model, "")

    def _remember(self, model: torch.nn.Module, name: str) -> None:
        self._models[model] = name
        self._epoch.advance()

    def _learn(self, model: torch.nn.Module, name: str) -> None:
        anchors.remember_modules(model)
        stacks = stacks_of(_matrices(model, name))
        for fqn, parameter in model.named_parameters(prefix=name):
            for tensor in (parameter, *fakes.wrapped_tensors(parameter)):
                self._names.set(tensor, wrappers.name_in_original(fqn))
                self._stacks.set(tensor, stacks)

    def get(self, parameter: torch.Tensor | anchors.Anchor) -> str:
        """Return the FQN, or "" for a tensor that was not bound.

        The parameters of a bound model may be replaced: FSDP2 puts gathered ones in their place while a layer runs.
        DDPOptimizer compiles with fake ones.
        """
        if isinstance(parameter, FakeTensor):
            real = self._real(parameter)
            return "" if real is None else self.get(real)
        if (name := self._names.of(parameter)) is None:
            for model, prefix in list(self._models.items()):
                self._learn(model, prefix)
            name = self._names.of(parameter)
        return self._names.set(parameter, "") if name is None else name  # do not search again

    def held(self) -> set[int]:
        """Return the ids of the anchors of the parameters that bound models have now."""
        parameters = (parameter for model in list(self._models) for parameter in model.parameters())
        return {
            id(anchors.anchor(x)) for parameter in parameters for x in (parameter, *fakes.wrapped_tensors(parameter))
        }

    def note_graph(self, names: Iterable[str], *, bound: bool) -> None:
        """Remember that a graph has parameters of these names; not ``bound``: its parameters had no names yet."""
        self._in_graphs = {*self._in_graphs, *names} if bound and self._in_graphs is not None else None

    def in_no_graph(self) -> dict[str, Any]:
        """``in_no_graph``: the layers of bound models whose matrices no graph has taken: not called yet, or in eager.

        ``fp8_in_no_graph``: those of them that hold FP8 numbers.
        """
        layers: dict[str, bool] = {}
        if self._in_graphs is None:
            return {}
        for model, name in list(self._models.items()):
            for prefix, module in model.named_modules(prefix=name):
                if not isinstance(module, _NO_LINEARS):
                    for own, parameter in module.named_parameters(recurse=False):
                        fqn = wrappers.name_in_original(f"{prefix}.{own}" if prefix else own)
                        if parameter.ndim in (2, 3) and not {fqn, self.get(parameter)} & self._in_graphs:
                            fp8 = any(x.dtype in FP8_MAX for x in (parameter, *fakes.wrapped_tensors(parameter)))
                            layers[fqn.rpartition(".")[0] or fqn] = fp8
        return {"in_no_graph": list(layers), "fp8_in_no_graph": [layer for layer, fp8 in layers.items() if fp8]}

    def stacks(self, parameters: Iterable[torch.Tensor]) -> Stacks:
        """Return the stacks of blocks of the bound models that ``parameters`` belong to."""
        real = (self._real(each) if isinstance(each, FakeTensor) else each for each in parameters)
        every = (self._stacks.of(each) or () for each in real if each is not None)
        return frozenset[Any]().union(*every)

    def _real(self, fake: FakeTensor) -> torch.Tensor | None:
        """Return the parameter of a bound model that ``fake`` stands for."""
        bound = (real for model in list(self._models) for real in model.parameters())
        return next((real for real in bound if fakes.is_fake_of(fake, real)), None)

    def modules(self) -> set[str]:
        """Return the names of all modules of bound models, and of matrices in them that are no module's ``weight``."""
        modules: set[str] = set()
        for model, name in list(self._models.items()):
            for prefix, module in model.named_modules(prefix=name):
                own = module.named_parameters(prefix=prefix, recurse=False)
                names = [fqn for fqn, x in own if x.ndim > 1 and fqn.rpartition(".")[2] != "weight"]
                modules.update(wrappers.name_in_original(f"{fqn}.")[:-1] for fqn in (prefix, *names))
        return modules


def _matrices(model: torch.nn.Module, name: str) -> Iterator[str]:
    """Yield the names of the parameters of a model that layers may multiply by."""
    for prefix, module in model.named_modules(prefix=name):
        if not isinstance(module, _NO_LINEARS):
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 1:
                    yield wrappers.name_in_original(f"{prefix}.{own}" if prefix else own)
