"""Every public name, as ``import fp8graph`` gives them."""

import fp8graph.models as models
import fp8graph.numerics as numerics
from fp8graph.backend import NAMED
from fp8graph.backend.backend import Backend
from fp8graph.backend.coverage import adopt_before_tracing
from fp8graph.backend.entry import backend_of, compile, refresh_weights
from fp8graph.compat.dynamo import before_tracing, register_backend
from fp8graph.errors import (
    CheckpointError,
    ConfigError,
    Fp8CoverageError,
    Fp8GraphError,
    PolicyError,
    StateError,
    UnsupportedRecipeError,
)
from fp8graph.extras.planning.tune import Tuned, tune
from fp8graph.hardware import supports
from fp8graph.libraries import adopt
from fp8graph.numerics import QuantizedTensor
from fp8graph.offline import KernelRecord
from fp8graph.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    register_recipe,
)
from fp8graph.recipes.autocast import autocast
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import INHERIT, Rule
from fp8graph.records import AttentionRecord, CollectiveRecord, GemmRecord, ProductRecord, RefusalRecord
from fp8graph.report import GraphView, Report
from fp8graph.tools.compare_layers import compare_layers
from fp8graph.tools.explain import explain
from fp8graph.tools.export import export, quantized_shards, quantized_state
from fp8graph.tools.findings import Finding
from fp8graph.tools.lint_model import Lint, lint
from fp8graph.tools.load import load_checkpoint, update_weights
from fp8graph.tools.package import package
from fp8graph.tools.quantize_weights import quantize_weights
from fp8graph.tools.rewrite import lower, rewrite
from fp8graph.tools.shards import TensorShard
from fp8graph.version import __version__

__all__ = [
    "INHERIT",
    "AttentionRecord",
    "Backend",
    "CheckpointError",
    "CollectiveRecord",
    "ConfigError",
    "DelayedScaling",
    "Finding",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "Fp8CoverageError",
    "Fp8GraphError",
    "GemmRecord",
    "GraphView",
    "KernelRecord",
    "Lint",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Policy",
    "PolicyError",
    "ProductRecord",
    "QuantizedTensor",
    "Recipe",
    "RefusalRecord",
    "Report",
    "Rule",
    "StateError",
    "TensorShard",
    "Tuned",
    "UnsupportedRecipeError",
    "__version__",
    "adopt",
    "autocast",
    "backend_of",
    "compare_layers",
    "compile",
    "explain",
    "export",
    "lint",
    "load_checkpoint",
    "lower",
    "models",
    "numerics",
    "package",
    "quantize_weights",
    "quantized_shards",
    "quantized_state",
    "refresh_weights",
    "register_recipe",
    "rewrite",
    "supports",
    "tune",
    "update_weights",
]

for name, named in NAMED.items():
    register_backend(named, name)
before_tracing(adopt_before_tracing)
