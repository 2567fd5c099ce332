"""The functions that users call to compile a model, as a whole or block by block, and to find its backend.

A model of 32 layers compiled as a whole takes 32 times as long as one layer; compiled layer by layer (``regions``),
Dynamo runs the same compiled code for all layers that look the same. The modules around the blocks that multiply by
matrices (a head, a projection) are compiled piece by piece; the code in between runs in eager.

Modules that are compiled have a mark, so that their copies are compiled, too: torch drops the compiled code of a module
that is copied or pickled (``Module.__getstate__``) without a word. A copy for an average of weights, or a model that
``torch.save`` wrote, ran in bf16.
"""

from __future__ import annotations

import copy
import enum
import inspect
import logging
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, Final, Literal, Unpack

import torch
from torch import nn

from fp8graph.backend import coverage
from fp8graph.backend.backend import Backend, PolicyLike
from fp8graph.backend.compiled_graph import graphs_of
from fp8graph.compat import dynamo, wrappers
from fp8graph.compat.anchors import anchor
from fp8graph.errors import ConfigError, expect
from fp8graph.ir.settings import Settings, SettingsArguments, arguments_of, choices, show_arguments
from fp8graph.libraries import adopt
from fp8graph.recipes import RecipeLike
from fp8graph.runtime.staleness import optimizer_steps

_ATTRIBUTE: Final = "_fp8graph_compiled"
_EXPORTED: Final = "%s is exported as it was written, in high precision: %s leaves compiled code out."
_WITHIN: Final = (
    "%s is compiled again, by torch.compile(backend=%s), and runs in high precision there: the outer compilation "
    "decides. Leave it out: fp8graph.compile has compiled the model in place."
)
_TRANSFORMED: Final = (
    "%s is called by a transform of torch.func (vmap, grad, ...). torch does not compile there: the call runs in "
    "eager, in high precision. To transform it in FP8, compile the function that calls the transform."
)
_AGAIN: Final = (
    "%s was compiled with fp8graph before. Its new backend takes the place of the old one, whose policy, report and "
    "scaling state it does not have. To keep the scales, take backend_of(model).state_dict() before, and load it after."
)
_NOT_CALLED: Final = (
    "%s was compiled by fp8graph.compile, %s.step() has updated it, and no graph of it has run: it is trained in high "
    "precision. Its own call is compiled, model(...), and not model.forward(...) or another method, nor the modules in "
    "it: compile the module that is called. Where another torch.compile is around the call, that one decides."
)
_LONG: Final = (
    '%s is compiled as a whole, %d %s one after the other, which takes long. fp8graph.compile(model, regions="auto") '
    "compiles one for all, if calls keep no key-value cache (use_cache=False). The code around the blocks then runs in "
    "eager: a loss takes more memory, and each block time of the host. regions=None chooses the whole graph, and says "
    "nothing."
)
_log = logging.getLogger("fp8graph")


class Undecided(enum.Enum):
    """The type of :data:`UNDECIDED`: an argument that was left out, where None is a choice."""

    UNDECIDED = "undecided"

    def __repr__(self) -> str:
        return "UNDECIDED"


UNDECIDED: Final = Undecided.UNDECIDED


def backend_of(compiled: Any) -> Backend:
    """Return the :class:`Backend` behind a compiled module or function, including those compiled by name.

    Each model compiled by name has its own; functions compiled by name with equal options share one. A model is found
    by its parameters, too, once compiled code has been called with them: a model of which ``torch.compile`` made
    another module, or which a compiled function calls.

    Raises:
        ConfigError: (a ``ValueError``) if ``compiled`` was not compiled with fp8graph, if it holds several models
            that were called one by one, or if code of several backends calls it.
    """
    if (backend := find_backend(compiled)) is None:
        raise ConfigError(
            f"{type(compiled).__name__} was not compiled with the fp8graph backend, or the compiled code that calls it "
            "has not run yet."
        )
    return backend


def find_backend(compiled: Any) -> Backend | None:
    """:func:`backend_of`; None if it was not compiled with fp8graph."""
    pieces = compiled.modules() if isinstance(compiled, nn.Module) else [compiled]  # compiled block by block
    backends = next(filter(None, (wrappers.fp8graph_backends(wrappers.orig_backend(piece)) for piece in pieces)), None)
    if backends is None:
        return _that_calls(compiled) if isinstance(compiled, nn.Module) else None
    return backends if isinstance(backends, Backend) else backends.of(compiled)


def _that_calls(model: nn.Module) -> Backend | None:
    """Return the backend of code that was called with parameters of ``model``; fp8graph's own tools do not count."""
    callers = dict.fromkeys(graph.backend for graph in graphs_of(model.parameters()))
    backends = [backend for backend in callers if type(backend) is Backend]
    if len(backends) > 1:
        raise ConfigError(
            f"{type(model).__name__} is called by code of {len(backends)} fp8graph backends: pass the module that "
            "torch.compile returned for one of them."
        )
    return backends[0] if backends else None


def refresh_weights(backend: Backend | Any) -> None:
    """:meth:`Backend.refresh_weights`; of the backend behind it, if a compiled model is given."""
    expect("refresh_weights", "backend", backend, object if callable(backend) else (), "a Backend, or what it compiled")
    try:
        holder = backend if isinstance(backend, Backend) else backend_of(backend)
    except ConfigError as error:
        raise ConfigError(f"refresh_weights(backend=...): {error} It takes a Backend, or what it compiled.") from None
    holder.refresh_weights()


class CompileArguments(SettingsArguments, total=False):
    """The other keyword arguments of :func:`compile`: those of ``torch.compile`` in any version that has them."""

    fullgraph: bool
    dynamic: bool | None
    mode: str | None
    options: Mapping[str, Any] | None
    name: str | None
    disable: bool
    recompile_limit: int | None
    isolate_recompiles: bool
    shapes_spec: Any
    dynamic_shapes: Any


def compile(  # noqa: A001  (the public name is torch's)
    model: nn.Module,
    policy: PolicyLike | None = None,
    *,
    recipe: RecipeLike = None,
    observe: Mapping[str, Any] | None = None,
    guard: Mapping[str, Any] | None = None,
    regions: Regions | Literal[Undecided.UNDECIDED] | None = UNDECIDED,
    backend: Backend | None = None,
    **kwargs: Unpack[CompileArguments],
) -> nn.Module:
    """``model.compile(backend=...)`` in place, with the model's parameter names bound. Returns the model.

    Compiling in place also covers ``model.generate()``, which calls the model, not the wrapper that
    ``torch.compile(model)`` returns. ``fp8graph.backend_of(model)`` returns the backend.

    Args:
        policy, recipe, observe, guard: see :class:`Backend`.
        regions: "auto" compiles the model's repeated blocks one by one, and so each kind of block only once, however
            many layers there are; a list of class names says which blocks. None compiles the model as a whole, and so
            does leaving it out; a warning then says, before the first call with gradients, if blocks repeat. Modules
            around the blocks are compiled if they multiply by matrices; the code in between runs in eager. Layers share
            code unless Dynamo finds a difference: a key-value cache is one (pass ``use_cache=False`` in training).
        backend: a Backend to compile with, in place of all its arguments. Several models share it if each was bound
            before, by a name of its own: ``backend.bind(model, name=...)``.
        kwargs: the other arguments of :class:`Backend` (``strict``, ``target``, ``save``, ...), and those of
            ``torch.compile``: ``fullgraph``, ``dynamic``, ``mode``, ``options`` (of this backend, as by name).

    Raises:
        ConfigError, UnsupportedRecipeError: (``ValueError``) for arguments that cannot be used, or a module without a
            forward, such as an nn.ModuleList.
        TypeError: for an argument that does not exist, or something that is not a model.
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(
            f"fp8graph.compile takes a model, an nn.Module, not {given!r}. "
            'For a function: torch.compile(function, backend="fp8graph").'
        )
    torchs = [name for name in inspect.signature(torch.compile).parameters if name not in ("model", "backend")]
    others: dict[str, Any] = {**kwargs}
    settings = Settings.taken_from(others)
    if unknown := sorted(others.keys() - {*torchs}):
        names = ("policy", "recipe", "observe", "guard", "regions", "backend", *Settings.names(), *torchs)
        raise TypeError(f"fp8graph.compile has no argument {unknown[0]!r}{choices('Arguments', unknown[0], names)}")
    expect("fp8graph.compile", "options", others.get("options") or {}, Mapping, "a dict of options, or None")
    for name in ("dynamic", "fullgraph"):
        expect("fp8graph.compile", name, others.get(name), (bool, type(None)), "True, False or None")
    own = {"policy": policy, "recipe": recipe, "observe": observe, "guard": guard}
    beside = own | settings | {"mode": others.pop("mode", None)}
    options: dict[str, Any] = dict(others.pop("options", None) or {})
    for name, value in beside.items():
        option = "inductor" if name == "inductor_options" else name
        if value is not None and option in options:
            raise ConfigError(
                f"fp8graph.compile({name}={value!r:.100}, options={{...}}): the options have "
                f"{option} = {options[option]!r:.100}, too. Leave one of them out."
            )
        if value is not None or name in settings:
            options.setdefault(option, value)
    if backend is None:
        backend = Backend(**arguments_of(None, options))
    elif not isinstance(backend, Backend):
        raise TypeError(f"fp8graph.compile: backend must be a fp8graph.Backend, not {backend!r}.")
    elif given := [name for name, value in options.items() if value is not None]:
        raise ConfigError(f"compile(backend=...) has its own {', '.join(given)}: give one or the other.")
    if adopt(model) not in backend.names:
        backend.bind(model)
    backend.check_layers()
    if is_compiled(model):
        _log.warning(_AGAIN, type(model).__name__)
    compiled = [model] if regions is None or regions is UNDECIDED else regions_of(model, regions)
    if model in compiled and not _has_forward(model):
        raise ConfigError(
            f"fp8graph.compile: {type(model).__name__} has no forward: nothing calls it, so nothing of it would be "
            "compiled. Compile the model that holds it, or each of its modules."
        )
    codes: dict[object, CodeType] = {}
    for module in compiled:
        _compile_in_place(module, backend, others, named=module is model, codes=codes)
    if model not in compiled:  # bound in its copies, too
        _compile_in_place(model, backend, None)
    by_eager = backend.settings.compiler == "eager"
    if regions is UNDECIDED and not (by_eager or others.get("fullgraph") or backend.settings.cuda_graphs):
        wrappers.before_calls(model, _LongCompile(backend, model))
    return model


show_arguments(
    compile,
    CompileArguments,
    {name: parameter.default for name, parameter in inspect.signature(torch.compile).parameters.items()}
    | Settings.defaults(),
)


class _LongCompile:
    """Says how the compilation of a model of many blocks takes less long, before the first call with gradients.

    Not to those who chose: with ``regions``, ``fullgraph=True`` or CUDA graphs, which need the whole model.
    """

    def __init__(self, backend: Backend, model: nn.Module) -> None:
        self._backend, self._model = weakref.ref(backend), weakref.ref(model)

    def __call__(self) -> bool:
        backend, model = self._backend(), self._model()
        if backend is None or model is None:
            return True
        if not torch.is_grad_enabled():
            return False
        blocks = Counter(type(block).__name__ for block in _repeated(model) if any(True for _ in block.children()))
        name, count = next(iter(blocks.most_common(1)), ("", 0))
        if count >= MANY and "regions" not in backend.said:
            backend.said.add("regions")
            _log.warning(_LONG, type(model).__name__, count, name)
        return True


def _has_forward(model: nn.Module) -> bool:
    return type(model).forward is not nn.Module.forward or "forward" in model.__dict__


MANY: Final = 4  # blocks of one class
Regions = Literal["auto"] | Sequence[str]


def regions_of(model: nn.Module, regions: Regions) -> list[nn.Module]:
    """Return the modules of ``model`` to compile one by one, in order; ``[model]`` if nothing repeats.

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
    """Yield the outermost modules that share a container with another module of their class."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            members = list(_members(child))
            classes = Counter(map(type, members))
            for member in members:
                if classes[type(member)] > 1 and _has_forward(member):
                    yield member
                else:
                    yield from _repeated(member)
        else:
            yield from _repeated(child)


def _members(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in ``container`` that multiply by a matrix; of lists that are alike, those in the lists."""
    members = [child for child in container.children() if _multiplies(child)]
    classes = Counter(map(type, members))
    for member in members:
        if classes[type(member)] > 1 and not _has_forward(member):
            yield from filter(_multiplies, member.children())
        else:
            yield member


def _rest(module: nn.Module, within: set[int]) -> Iterator[nn.Module]:
    """Yield the largest modules around the blocks (whose ids are ``within``) that multiply by a matrix."""
    for child in module.children():
        if id(child) in within:
            continue
        if any(id(inner) in within for inner in child.modules()):
            yield from _rest(child, within)
        elif _multiplies(child):
            yield child


def _multiplies(module: nn.Module) -> bool:
    """Return whether some parameter under ``module`` is a matrix that is not looked up (an embedding's)."""
    return any(
        parameter.ndim > 1
        for inner in module.modules()
        if not isinstance(inner, nn.Embedding | nn.EmbeddingBag)
        for parameter in inner.parameters(recurse=False)
    )


def _compile_in_place(
    module: nn.Module,
    backend: Backend,
    arguments: Mapping[str, Any] | None,
    *,
    named: bool = True,
    codes: dict[object, CodeType] | None = None,
) -> None:
    """Compile ``module`` so that its copies are compiled, too.

    Args:
        arguments: of ``torch.compile``; None if only modules inside ``module`` are compiled.
        named: names of parameters are relative to ``module``, not to a model that it is a part of.
        codes: see :func:`fp8graph.compat.wrappers.compile_in_place`.
    """
    module.__dict__[_ATTRIBUTE] = Compiled.now(module, backend, arguments, named, codes)


def _check_within(backend: Backend, model: str) -> None:
    """While Dynamo traces ``model`` (a class) for another ``torch.compile`` call: warn if its backend is another.

    Raises:
        Fp8CoverageError: in strict mode.
    """
    backend.runs = True  # the outer code does
    outer = dynamo.backend_of_frame()
    if wrappers.fp8graph_backends(outer) is None:
        name = getattr(outer, "compiler_name", None) or getattr(outer, "__name__", outer)
        coverage.warn_or_raise(backend, _WITHIN % (model, name))


def _marks(model: nn.Module) -> list[Compiled]:
    """Return the marks of all modules of ``model``."""
    return [mark for module in model.modules() if (mark := module.__dict__.get(_ATTRIBUTE)) is not None]


def is_compiled(model: nn.Module) -> bool:
    """Return whether fp8graph compiled ``model``: in place, its blocks for it, or by name."""
    mark: Compiled | None = model.__dict__.get(_ATTRIBUTE)
    in_place = mark is not None and mark.holds()
    return in_place or wrappers.fp8graph_backends(wrappers.orig_backend(model)) is not None


def uncompiled_copy(model: nn.Module, tensor: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of ``model`` that nothing has compiled, with ``tensor(x)`` for each of its parameters and buffers
    x.
    """
    memo: dict[int, Any] = dict.fromkeys(map(id, _marks(model)))
    memo.update((id(x), tensor(x)) for x in (*model.parameters(), *model.buffers()))  # deepcopy takes what memo has
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        wrappers.undo_compile_in_place(module)
    return copied


class _NotCalled:
    """Says that a compiled model is trained and never called, until it is: the hook of :class:`OptimizerSteps`."""

    def __init__(self, backend: Backend, model: nn.Module) -> None:
        self._backend, self._model = weakref.ref(backend), weakref.ref(model)

    def __call__(self, optimizer: torch.optim.Optimizer) -> bool:
        backend, model = self._backend(), self._model()
        if backend is None or model is None or backend.runs:
            return True
        own = {id(anchor(parameter)) for parameter in model.parameters()}
        if not any(id(anchor(parameter)) in own for parameter in _updated(optimizer)):
            return False
        if not graphs_of(model.parameters()):  # of a function, compiled with another backend
            coverage.warn_or_raise_once(backend, _NOT_CALLED % (type(model).__name__, type(optimizer).__name__))
        return True


def _updated(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that a step changed: torch makes the state of an optimizer by a step with a rate of 0."""
    for group in optimizer.param_groups:
        if group.get("lr", 1) != 0:
            yield from (parameter for parameter in group["params"] if parameter.grad is not None)


class Compiled:
    """A mark in the ``__dict__`` of a module, which is copied with it.

    A copy gets a backend of its own, with the settings and the scaling state of the original, once for all modules
    that are copied together; so does what is loaded from a pickle.
    """

    def __init__(self, module: nn.Module, backend: Backend, arguments: Mapping[str, Any] | None, named: bool) -> None:
        self._module = weakref.ref(module)
        self._backend = backend
        self._arguments = arguments
        self._named = named

    @staticmethod
    def now(
        module: nn.Module,
        backend: Backend,
        arguments: Mapping[str, Any] | None,
        named: bool,
        codes: dict[object, CodeType] | None = None,
    ) -> Compiled:
        """Compile ``module`` (which may be an empty one, being copied) and return its mark."""
        if named:
            backend.names.bind_later(module)
            optimizer_steps().wait(_NotCalled(backend, module))
        if arguments is not None:
            name = type(module).__name__
            wrappers.compile_in_place(
                module,
                coverage.AfterFirstCall(backend, module, part=not named),
                lambda by: _log.warning(_EXPORTED, name, by),
                lambda: _check_within(backend, name),
                lambda: coverage.warn_or_raise_once(backend, _TRANSFORMED % name),
                codes,
                backend=backend,
                **arguments,
            )
        return Compiled(module, backend, arguments, named)

    def holds(self) -> bool:
        """Return whether the module is compiled as it was: it may have got another backend, or none."""
        compiles = wrappers.orig_backend(self._module())
        return self._arguments is None or wrappers.fp8graph_backends(compiles) is self._backend

    def __deepcopy__(self, memo: dict[Any, Any]) -> Compiled | None:
        copied = memo.get(id(self._module()))  # known by now, and still empty: its state is being copied
        if copied is None or not self.holds():
            return None
        key = Compiled, id(self._backend)
        if key not in memo:
            memo[key] = Backend(**self._backend.arguments())
            memo[key].load_state_dict(self._backend.state_dict())
        return Compiled.now(copied, memo[key], self._arguments, self._named)

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        if not self.holds():
            return type(None), ()
        try:
            pickle.dumps((self._backend, self._arguments))
        except Exception as error:  # of functions in a policy: any
            _log.warning(
                "%s is pickled without its compilation: %s. Call fp8graph.compile where it is loaded.",
                *(type(module).__name__, error),
            )
            return type(None), ()
        # A module's state is read after the module itself, so that the state may hold the module.
        return _unpickled, (), (module, self._backend, self._arguments, self._named)

    def __setstate__(self, state: tuple[nn.Module, Backend, Mapping[str, Any] | None, bool]) -> None:
        module = state[0]  # still empty
        self.__dict__.update(vars(Compiled.now(*state)))
        # in a pickle the forward of a layer in FP8 is that of its class: see libraries.adopt
        wrappers.before_calls(module, lambda: isinstance(adopt(module), nn.Module))


def _unpickled() -> Compiled:
    return object.__new__(Compiled)
