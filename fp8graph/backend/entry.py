"""The functions that users call to compile a model, as a whole or block by block, and to find its backend.

A model of 32 layers compiled as a whole takes 32 times as long as one layer; compiled layer by layer (``regions``),
Dynamo runs the same compiled code for all layers that look the same. The modules around the blocks that multiply by
matrices (a head, a projection) are compiled piece by piece; the code in between runs in eager.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import nn

from fp8graph.backend import copies
from fp8graph.backend.backend import Backend, PolicyLike
from fp8graph.backend.named import NamedBackend
from fp8graph.backend.program import programs_of
from fp8graph.compat import wrappers
from fp8graph.errors import ConfigError, expect
from fp8graph.ir.settings import Settings, choices
from fp8graph.libraries import adopt
from fp8graph.recipes import RecipeLike

_AGAIN: Final = (
    "%s was compiled with fp8graph before. Its new backend takes the place of the old one, whose policy, report and "
    "scaling state it does not have. To keep the scales, take backend_of(model).state_dict() before, and load it after."
)
_log = logging.getLogger("fp8graph")


def backend_of(compiled: Any) -> Backend:
    """The :class:`Backend` behind a compiled module or function, including those compiled by name.

    Each model compiled by name has its own; functions compiled by name with equal options share one. A model is found
    by its parameters, too, once compiled code has been called with them: a model of which ``torch.compile`` made
    another module, or which a compiled function calls.

    Raises:
        ConfigError: (a ``ValueError``) if ``compiled`` was not compiled with fp8graph, if it holds several models
            that were called one by one, or if code of several backends calls it.
    """
    if (found := find_backend(compiled)) is None:
        raise ConfigError(
            f"{type(compiled).__name__} was not compiled with the fp8graph backend, or the compiled code that calls it "
            "has not run yet."
        )
    return found


def find_backend(compiled: Any) -> Backend | None:
    """:func:`backend_of`; None if it was not compiled with fp8graph."""
    pieces = compiled.modules() if isinstance(compiled, torch.nn.Module) else [compiled]  # compiled block by block
    found = next(filter(None, (wrappers.fp8graph_backends(wrappers.orig_backend(piece)) for piece in pieces)), None)
    if found is None:
        return _that_calls(compiled) if isinstance(compiled, torch.nn.Module) else None
    return found if isinstance(found, Backend) else found.of(compiled)


def _that_calls(model: torch.nn.Module) -> Backend | None:
    """The backend of code that was called with parameters of ``model``; those of fp8graph's own tools do not count."""
    backends = dict.fromkeys(program.backend for program in programs_of(model.parameters()))
    found = [backend for backend in backends if type(backend) is Backend]
    if len(found) > 1:
        raise ConfigError(
            f"{type(model).__name__} is called by code of {len(found)} fp8graph backends: pass the module that "
            "torch.compile returned for one of them."
        )
    return found[0] if found else None


def refresh_weights(backend: Backend | Any) -> None:
    """:meth:`Backend.refresh_weights`; of the backend behind it, if a compiled model is given."""
    expect("refresh_weights", "backend", backend, object if callable(backend) else (), "a Backend, or what it compiled")
    (backend if isinstance(backend, Backend) else backend_of(backend)).refresh_weights()


def compile(  # noqa: A001  (the public name is torch's)
    model: torch.nn.Module,
    policy: PolicyLike | None = None,
    *,
    recipe: RecipeLike = None,
    observe: Mapping[str, Any] | None = None,
    guard: Mapping[str, Any] | None = None,
    regions: Regions | None = None,
    backend: Backend | None = None,
    **kwargs: Any,
) -> torch.nn.Module:
    """``model.compile(backend=...)`` in place, with the model's parameter names bound. Returns the model.

    Compiling in place also covers ``model.generate()``, which calls the model, not the wrapper that
    ``torch.compile(model)`` returns. ``fp8graph.backend_of(model)`` returns the backend.

    Args:
        policy, recipe, observe, guard: see :class:`Backend`.
        regions: "auto" compiles the model's repeated blocks one by one, and so each kind of block only once, however
            many layers there are; a list of class names says which blocks. None compiles the model as a whole. Modules
            around the blocks are compiled if they multiply by matrices; the code in between runs in eager. Layers share
            code unless Dynamo finds a difference: a key-value cache is one (pass ``use_cache=False`` in training).
        backend: a Backend to compile with, in place of all its arguments. Several models share it if each was bound
            before, by a name of its own: ``backend.bind(model, name=...)``.
        kwargs: the other arguments of :class:`Backend` (``strict``, ``target``, ``save``, ...), and those of
            ``torch.compile``: ``fullgraph``, ``dynamic``, ``mode``, ``options`` (of this backend, as by name).

    Raises:
        ConfigError, UnsupportedRecipeError: (``ValueError``) for arguments that cannot be used.
        TypeError: for an argument that does not exist, or something that is not a model.
    """
    given: object = model
    if not isinstance(given, torch.nn.Module):
        raise TypeError(
            f"fp8graph.compile takes a model, an nn.Module, not {given!r}. "
            'For a function: torch.compile(function, backend="fp8graph").'
        )
    torchs = [name for name in inspect.signature(torch.compile).parameters if name not in ("model", "backend")]
    settings = Settings.taken_from(kwargs)
    if unknown := sorted(kwargs.keys() - {*torchs}):
        known = ("policy", "recipe", "observe", "guard", "regions", "backend", *Settings.names(), *torchs)
        raise TypeError(f"fp8graph.compile has no argument {unknown[0]!r}{choices('Arguments', unknown[0], known)}")
    expect("fp8graph.compile", "options", kwargs.get("options") or {}, Mapping, "a dict of options, or None")
    for name in ("dynamic", "fullgraph"):
        expect("fp8graph.compile", name, kwargs.get(name), (bool, type(None)), "True, False or None")
    own = {"policy": policy, "recipe": recipe, "observe": observe, "guard": guard}
    options = {**own, **settings, **(kwargs.pop("options", None) or {})}
    if (inductor := options.pop("inductor_options", None)) is not None:
        options["inductor"] = inductor
    if (mode := kwargs.pop("mode", None)) is not None:
        options["mode"] = mode
    if backend is None:
        backend = NamedBackend().make(None, options)
    elif not isinstance(backend, Backend):
        raise TypeError(f"fp8graph.compile: backend must be a fp8graph.Backend, not {backend!r}.")
    elif given := [name for name, value in options.items() if value is not None]:
        raise ConfigError(f"compile(backend=...) has its own {', '.join(given)}: give one or the other.")
    if adopt(model) not in backend.names:
        backend.bind(model)
    backend.check_layers()
    if copies.is_compiled(model):
        _log.warning(_AGAIN, type(model).__name__)
    compiled = [model] if regions is None else regions_of(model, regions)
    for module in compiled:
        copies.compile_in_place(module, backend, kwargs, named=module is model)
    if model not in compiled:  # bound in its copies, too
        copies.compile_in_place(model, backend, None)
    return model


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
