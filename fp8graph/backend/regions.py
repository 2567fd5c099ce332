"""Compile the blocks of a model one by one: code for each kind of block, not for each layer.

A model of 32 layers compiled as a whole takes 32 times as long as one layer; compiled layer by layer, Dynamo runs the
same compiled code for all layers that look alike. The modules around the blocks that multiply by matrices (a head,
a projection) are compiled piece by piece; the code in between runs in eager.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from torch import nn

from fp8graph.errors import ConfigError

_log = logging.getLogger("fp8graph")
Regions = Literal["auto"] | Sequence[str]


def regions_of(model: nn.Module, regions: Regions) -> list[nn.Module]:
    """The modules of ``model`` to compile one by one, in order; ``[model]`` if nothing repeats.

    Args:
        regions: "auto" for the outermost blocks of which a container holds several of the same class, or the names
            of the blocks' classes.

    Raises:
        ConfigError: (a ``ValueError``) for anything else, or a class that no module of the model has.
    """
    if isinstance(regions, str):
        if regions != "auto":
            raise ConfigError(f"regions must be 'auto' or a list of class names, not {regions!r}.")
        blocks = list(_repeated(model))
        if not blocks:
            _log.warning("regions='auto': no block of %s repeats; it is compiled as a whole.", type(model).__name__)
            return [model]
    else:
        if not isinstance(regions, Sequence) or not all(isinstance(name, str) for name in regions):
            raise ConfigError(f"regions must be 'auto' or a list of class names, not {regions!r:.100}.")
        classes = sorted({type(module).__name__ for module in model.modules()})
        for name in regions:
            if name not in classes:
                raise ConfigError(f"regions: no module is a {name!r}. Classes: {', '.join(classes)}.")
        blocks = [module for module in model.modules() if type(module).__name__ in regions]
    within = {id(inner) for block in blocks for inner in block.modules()}
    outermost = [block for block in blocks if not any(block in [*other.modules()][1:] for other in blocks)]
    return [*outermost, *_rest(model, within)]


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that share a container with another module of their class."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            members = [member for member in child.children() if _multiplies(member)]
            classes = Counter(map(type, members))
            for member in members:
                if classes[type(member)] > 1:
                    yield member
                else:
                    yield from _repeated(member)
        else:
            yield from _repeated(child)


def _rest(module: nn.Module, within: set[int]) -> Iterator[nn.Module]:
    """The largest modules around the blocks (whose ids are ``within``) that multiply by a matrix."""
    for child in module.children():
        if id(child) in within:
            continue
        if any(id(inner) in within for inner in child.modules()):
            yield from _rest(child, within)
        elif _multiplies(child):
            yield child


def _multiplies(module: nn.Module) -> bool:
    """Whether some parameter under ``module`` is a matrix that is not looked up (an embedding's)."""
    return any(
        parameter.ndim > 1
        for inner in module.modules()
        if not isinstance(inner, nn.Embedding | nn.EmbeddingBag)
        for parameter in inner.parameters(recurse=False)
    )
