"""The passes, one per file. This list is the pipeline, and the only statement of its order.

A pass is a function ``(graph, compilation) -> None`` that takes a valid graph and leaves a valid one
(``fp8graph.ir.verify``). To add one: write ``passes/<name>.py`` with its docstring ``before -> after``, put it in
the list, and give it a text test in ``tests/passes/``.
"""

if __name__ != "fp8graph.passes":
    raise ImportError(f"import fp8graph.passes, not {__name__}")

from collections.abc import Callable

from torch import fx

from fp8graph.ir.compilation import Compilation
from fp8graph.passes.accumulate_wgrad import MainGrads, accumulate_wgrad
from fp8graph.passes.assign import assign
from fp8graph.passes.attention.find import find_attention
from fp8graph.passes.attention.quantize import quantize_attention
from fp8graph.passes.connect_scales import connect_scales
from fp8graph.passes.fold import fold
from fp8graph.passes.fuse_linears import fuse_linears
from fp8graph.passes.gather_in_fp8 import gather_in_fp8
from fp8graph.passes.hoist_weights import hoist_weights
from fp8graph.passes.lower import lower
from fp8graph.passes.match import match
from fp8graph.passes.note_weights import note_weights
from fp8graph.passes.observe import observe
from fp8graph.passes.prepare_fp4 import prepare_fp4
from fp8graph.passes.quantize import quantize
from fp8graph.passes.recognize import recognize
from fp8graph.passes.route_in_fp8 import route_in_fp8
from fp8graph.passes.save_for_backward import save_for_backward
from fp8graph.passes.score import score
from fp8graph.passes.share import share, share_tokens
from fp8graph.passes.smooth import smooth
from fp8graph.passes.unpack import unpack
from fp8graph.passes.write import write
from fp8graph.runtime.observation import Observation
from fp8graph.runtime.scaling_state import State
from fp8graph.runtime.sent_weights import SentWeights
from fp8graph.runtime.stores import Store
from fp8graph.runtime.weight_cache import Weights

Pass = Callable[[fx.Graph, Compilation], None]

# Runs on the joint forward + backward graph (or the forward graph of inference), before the partitioner.
JOINT_PIPELINE: tuple[Pass, ...] = (
    unpack,
    recognize,
    match,
    assign,
    find_attention,
    score,
    smooth,
    quantize,
    fold,
    share,
    route_in_fp8,
    share_tokens,
    gather_in_fp8,
    fuse_linears,
    prepare_fp4,
    observe,
    hoist_weights,
    note_weights,
    connect_scales,
    accumulate_wgrad,
    save_for_backward,
    quantize_attention,
)

# Runs on the forward graph and on the backward graph, after the partitioner: the dialect stays opaque to the
# min-cut, which therefore saves FP8 tensors as they are.
LOWERING: tuple[Callable[[fx.Graph], None], ...] = (lower,)

# Runs on a graph that quantizes weights and writes the results into their kept copies.
WEIGHT_LOWERING: tuple[Callable[[fx.Graph], None], ...] = (*LOWERING, write)

# Keep the tensors that graphs take because one of these passes wants them. A call asks them in this order.
STORES: tuple[type[Store], ...] = (SentWeights, State, Weights, MainGrads, Observation)

__all__ = ["JOINT_PIPELINE", "LOWERING", "STORES", "WEIGHT_LOWERING", "Pass"]
