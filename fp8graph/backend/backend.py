"""The backend that ``torch.compile`` calls, as an object."""

from __future__ import annotations

import inspect
import os
import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import fx

from fp8graph import hardware
from fp8graph.backend.codegen import compile_dialect, run_eagerly
from fp8graph.backend.inductor_passes import Stopwatch, source_hash
from fp8graph.backend.program import Program
from fp8graph.compat import dynamo
from fp8graph.errors import Fp8CoverageError, PolicyError
from fp8graph.models import general_policy, policy_of
from fp8graph.recipes import GEMMS, Recipe, RecipeLike, resolve_recipe
from fp8graph.recipes.autocast import DISABLED, POLICY, amax_group
from fp8graph.recipes.policy import Policy
from fp8graph.records import GemmRecord
from fp8graph.report import Report
from fp8graph.runtime.call import Epoch
from fp8graph.runtime.checkpoint import ScalingState
from fp8graph.runtime.names import Names
from fp8graph.runtime.rank_agreement import agree
from fp8graph.runtime.scaling_state import State
from fp8graph.runtime.weight_cache import Weights

PolicyLike = Policy | Mapping[str, Any] | str | os.PathLike[str]
_COMPILERS: Final = ("inductor", "eager")


class Backend:
    """An FP8 backend for ``torch.compile(model, backend=Backend(...))``.

    Args:
        policy: a :class:`Policy`, its dict form, or the path of a policy file. Default: FP8 for every linear
            except heads and MoE routers, found by their usual names and by what the model's family
            (``fp8graph.models.FAMILIES``, told from the modules' classes) says.
        recipe: the recipe of that default policy ("mxfp8" where the target or this machine's GPU multiplies it, else
            "tensorwise"); or, beside ``policy``, in place of its default.
        strict: raise :class:`Fp8CoverageError` when a GEMM that a user's rule names is not in FP8 (while
            compiling), when Dynamo's recompile limit is met (new shapes would run in eager), and when a rule matched
            nothing or a frame fell back to eager (at the next call).
        compiler: "inductor" generates code; "eager" runs the rewritten graph node by node, for debugging and
            fast tests.
        inductor_options: options of Inductor, as for ``torch.compile(options=...)``.
        target: the hardware to decide for, "cpu" or like "sm_90"; default: that of the tensors.
        cache_weights: keep FP8 copies of the weights, and quantize a weight once per update (see
            ``runtime/weight_cache.py``; after writing to ``.data``: :func:`refresh_weights`). They take one byte per
            element and layout: up to the memory of bf16 weights in training, half of it in inference.
        save: "speed" keeps FP8 columnwise copies of activations for backward; "memory" lets backward quantize again
            from what is kept anyway.
        save_activations_in_fp8: with "memory": keep the inputs of activation functions (SwiGLU, GELU) in FP8 too.
            Backward then sees them rounded; forward does not.
        group: multiply once where linears of one module share their input (q, k and v; gate and up). Under recipes with
            one scale a tensor their weights, and their gradients, then share it.

    Raises:
        PolicyError, UnsupportedRecipeError: (``ValueError``) for arguments that cannot be used.
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        recipe: RecipeLike = None,
        strict: bool = False,
        compiler: Literal["inductor", "eager"] = "inductor",
        inductor_options: Mapping[str, Any] | None = None,
        target: str | None = None,
        cache_weights: bool = True,
        save: Literal["speed", "memory"] = "speed",
        save_activations_in_fp8: bool = False,
        group: bool = True,
    ) -> None:
        if compiler not in _COMPILERS:
            raise PolicyError(f"compiler must be one of {', '.join(_COMPILERS)}, not {compiler!r}.")
        if save not in ("speed", "memory"):
            raise PolicyError(f"save must be 'speed' or 'memory', not {save!r}.")
        if save_activations_in_fp8 and save != "memory":
            raise PolicyError('save_activations_in_fp8 trades speed for memory: it needs save="memory".')
        flags = {
            "strict": strict,
            "cache_weights": cache_weights,
            "save_activations_in_fp8": save_activations_in_fp8,
            "group": group,
        }
        for name, value in flags.items():
            if type(value) is not bool:
                raise PolicyError(f"{name} must be True or False, not {value!r}.")
        self.strict: Final = strict
        self.compiler: Final = compiler
        self.inductor_options: Final = _checked_inductor_options(inductor_options)
        self.target: Final = target
        self.hardware: Final = hardware.from_target(target) if target is not None else None
        self.epoch: Final = Epoch()
        self.names: Final = Names(self.epoch)
        self.state: Final = State(self.epoch)
        self.cache_weights: Final = cache_weights
        self.save: Final = save
        self.save_activations_in_fp8: Final = save_activations_in_fp8
        self.group: Final = group
        self.weights: Final = Weights(self.epoch)
        self.stopwatch: Final = Stopwatch()
        self._programs: list[Program] = []
        self._created = time.time_ns() // 1000  # microseconds
        self._frames: set[str] = set()  # Dynamo's ids of the frames compiled here
        self._agreed: set[str] = set()  # for what the policy was compared with that of other ranks
        self._eager_frames: list[str] = []  # that met the recompile limit
        self._watch_recompile_limit()
        self.set_policy(policy, recipe=recipe)

    @property
    def inner_compile(self) -> Callable[..., Any] | None:
        """What compile_fx calls for each graph after the passes; None: Inductor."""
        return run_eagerly if self.compiler == "eager" else None

    def compile_weights(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """A function that quantizes weights. A CPU runs the reference: it has no launches to save."""
        on_cpu = all(x.device.type == "cpu" for x in inputs)
        return module if on_cpu or self.compiler == "eager" else compile_dialect(module, inputs, self)

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile one Dynamo graph."""
        frame = dynamo.current_frame_id()
        if frame:
            self._frames.add(frame)
        self._agree()
        program = Program(self, module, example_inputs)
        self._programs.append(program)
        return program

    def _agree(self) -> None:
        """Compare what decides with the other ranks, once for training and once for inference.

        Not again for another policy: ranks need not compile again at the same step of a schedule.
        """
        kind = "training" if torch.is_grad_enabled() else "inference"  # which one rank may do alone
        if kind in self._agreed:
            return
        self._agreed.add(kind)
        lines = [f"rule {index} {rule!r}" for index, rule in enumerate(self.policy.rules)]
        settings = ("target", "cache_weights", "group", "save", "save_activations_in_fp8")
        lines += [f"default {self.policy.default!r}", f"min_speedup {self.policy.min_speedup}"]
        lines += [f"{name} {getattr(self, name)}" for name in settings]
        lines += [f"torch {torch.__version__}", f"fp8graph {source_hash()[:12]}"]
        text = re.sub(" at 0x[0-9a-f]+", "", "\n".join(lines))  # a function lies elsewhere on each rank
        agree(text, amax_group(), kind)

    def set_policy(self, policy: PolicyLike | None, *, recipe: RecipeLike = None) -> None:
        """Use another policy from the next call on. Graphs that it changes are compiled again then.

        Cheap for a policy that decides as the last one did: ``backend.set_policy(policy.at_step(step))`` may stand in
        a training loop. A policy with a schedule is taken as it is at step 0.
        """
        self._families: dict[tuple[str, ...], tuple[Policy, str]] = {}
        self._chosen = policy is not None
        if policy is None:
            default = hardware.default_recipe(self.hardware or hardware.of_machine())
            self.policy = general_policy(default)
        else:
            self.policy = Policy.coerce(policy)
        if recipe is not None:
            resolve_recipe(recipe)
            self.policy = Policy(self.policy.rules, default=recipe, min_speedup=self.policy.min_speedup)
        if self.policy.scheduled:
            self.policy = self.policy.at_step(0)
        self._families[()] = self.policy, self.policy.identity()
        self.epoch.advance()

    def policy_of(self, families: tuple[str, ...]) -> tuple[Policy, str]:
        """The policy for a graph of models of ``families`` (theirs, unless the user chose one), and its identity."""
        if self._chosen:
            families = ()
        if families not in self._families:
            policy = policy_of(families, self.policy.default)
            self._families[families] = policy, policy.identity()
        return self._families[families]

    def bind(self, model: torch.nn.Module) -> None:
        """Learn the full names of ``model``'s parameters, by identity.

        Dynamo names modules relative to the frame that it compiles. Bind the model when layers are compiled one
        by one, when a step function is compiled, or when the forward has graph breaks, so that policies and
        reports see full FQNs.
        """
        self.names.bind(model)

    def state_dict(self) -> ScalingState:
        """The scaling state: for each tensor of each layer under a recipe with a state its scale and amax history.

        Plain tensors under plain strings, empty but for a version where no recipe has a state. ``torch.save`` writes
        it as a dict (loads with ``weights_only=True``), safetensors takes ``dict(state)``, and
        ``torch.distributed.checkpoint`` takes the Backend itself: ``dcp.save({"model": ..., "fp8graph": backend})``,
        then ``dcp.load`` of the same into another one, before its first call or later, on any number of ranks. That
        refuses a state that differs from rank to rank (``reduce_amax=False``, an ``amax_reduction_group`` of some).

        Raises:
            StateError: two layers have one name (see :meth:`bind`).
        """
        return self.state.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any] | ScalingState) -> None:
        """Bring back what :meth:`state_dict` gave, before the first step or later. All or nothing.

        Entries of layers that were not compiled yet wait for them; those that nothing asked for are in
        ``str(backend.report)``.

        Raises:
            StateError: another version, truncated, a scale that is not finite and positive, a layer that was compiled
                already and is missing. The message says which; the old state is then intact.
        """
        self.state.load_state_dict(state_dict)
        self.weights.refresh()  # their scales are others now

    @property
    def pass_seconds(self) -> float:
        """Time in fp8graph's own passes so far."""
        return self.stopwatch.seconds

    @property
    def report(self) -> Report:
        """What was compiled so far, including graphs that came from a warm compile cache."""
        views = [view for program in self._programs for view in program.views]
        return Report(
            graphs=views,
            policy=self.policy,
            eager_frames=self._fallen_back(),
            skipped_frames=dynamo.skipped_frames(self._created),
            reductions=self.state.reductions(),
            unused_state=self.state.unused,
            pass_seconds=self.pass_seconds,
            weights=len(self.weights),
            weight_bytes=self.weights.bytes,
        )

    def check_strictly(self, *, everything: bool) -> None:
        """Strict mode, at a call: raise for code that fell back to eager, and for ``everything`` in the report."""
        if everything or self._fallen_back():
            self.report.check()

    def _fallen_back(self) -> list[str]:
        """Code that Dynamo runs in eager, each frame once."""
        return list(dict.fromkeys([*self._eager_frames, *dynamo.failed_frames(self._frames, self._created)]))

    def _watch_recompile_limit(self) -> None:
        reference = weakref.ref(self)

        def at_limit(found: Any, text: str) -> None:
            backend = reference()
            if backend is None or dynamo.fp8graph_backend(found) is not backend:
                return
            if backend.strict:
                raise Fp8CoverageError(
                    f"strict mode: {text}. TORCH_LOGS=recompiles shows what changes from call to call; compile with "
                    "dynamic=True if it is a size, or raise torch._dynamo.config.recompile_limit."
                )
            backend._eager_frames.append(text)

        dynamo.on_recompile_limit(self, at_limit)

    def check_records(self, records: Sequence[GemmRecord]) -> None:
        """Strict mode: raise for GEMMs of one graph that a rule or region asks for and that are not in FP8."""
        missing = [r for r in records if r.required and r.recipe is None and not r.by_profitability]
        if missing:
            lines = "\n  ".join(f"{r.name} {r.gemm}: {r.reason}" for r in missing)
            raise Fp8CoverageError(
                f"strict mode: {len(missing)} GEMMs that a rule asks for cannot run in FP8:\n  {lines}\n"
                "Give these layers recipe None, or compile without strict."
            )

    def may_rewrite(self, region: str | Recipe | None, inner_regions: set[Any]) -> bool:
        """Whether any GEMM could get a recipe: if not, Inductor's options stay exactly the user's."""
        recipes = [resolve_recipe(self.policy.default)]
        recipes += [rule.recipe_for(gemm) for rule in self.policy.rules for gemm in GEMMS]
        quiet = (None, DISABLED, POLICY)
        return any(r is not None for r in recipes) or any(r not in quiet for r in (region, *inner_regions))

    def backend_for(self, _options: Mapping[str, Any]) -> Backend:
        """Itself: what is compiled by name asks for the backend of its options."""
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Backend:
        """A copied model (EMA) is the same model to its backend: compiled code and report are shared."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Backend], tuple[dict[str, Any], ScalingState]]:
        """A pickled model takes the settings and the scaling state along; it is compiled again where it is loaded."""
        settings = {name: getattr(self, name) for name in inspect.signature(Backend).parameters if name != "recipe"}
        if not self._chosen:  # the default policy is made again: there may be another GPU, and the family adds to it
            settings |= {"policy": None, "recipe": self.policy.default}
        return _restored, (settings, self.state_dict())


def _restored(settings: dict[str, Any], state: Mapping[str, Any]) -> Backend:
    backend = Backend(**settings)
    backend.load_state_dict(state)
    return backend


def _checked_inductor_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    checked = dict(options or {})
    known = torch._inductor.list_options()
    if unknown := sorted(k for k in checked if k.replace("-", "_") not in known):
        raise PolicyError(f"Inductor has no option {unknown[0]!r} (see torch._inductor.list_options()).")
    return {key.replace("-", "_"): value for key, value in checked.items()}
