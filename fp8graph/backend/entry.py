"""The functions that users call to compile a model and to find its backend."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, Final

import torch

from fp8graph.backend import copies
from fp8graph.backend.backend import Backend, PolicyLike
from fp8graph.backend.named import NamedBackend
from fp8graph.backend.program import programs_of
from fp8graph.backend.regions import Regions, regions_of
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
