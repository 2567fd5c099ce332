"""fp8graph: FP8 training and inference as a backend of torch.compile.

    model = torch.compile(model, backend="fp8graph")

See the README for a tour and ``fp8graph.passes`` for how it works.
"""

import torch._dynamo

from fp8graph import models as models
from fp8graph import numerics as numerics
from fp8graph.backend import Backend as Backend
from fp8graph.backend import backend_of as backend_of
from fp8graph.backend import compile as compile
from fp8graph.backend import named_backend as _named_backend
from fp8graph.backend import refresh_weights as refresh_weights
from fp8graph.errors import Fp8CoverageError as Fp8CoverageError
from fp8graph.errors import Fp8GraphError as Fp8GraphError
from fp8graph.errors import PolicyError as PolicyError
from fp8graph.errors import StateError as StateError
from fp8graph.errors import UnsupportedRecipeError as UnsupportedRecipeError
from fp8graph.recipes import DelayedScaling as DelayedScaling
from fp8graph.recipes import Float8BlockScaling as Float8BlockScaling
from fp8graph.recipes import Float8CurrentScaling as Float8CurrentScaling
from fp8graph.recipes import Float8RowwiseScaling as Float8RowwiseScaling
from fp8graph.recipes import Format as Format
from fp8graph.recipes import MXFP8BlockScaling as MXFP8BlockScaling
from fp8graph.recipes import NVFP4BlockScaling as NVFP4BlockScaling
from fp8graph.recipes import register_recipe as register_recipe
from fp8graph.recipes.autocast import autocast as autocast
from fp8graph.recipes.policy import Policy as Policy
from fp8graph.recipes.rules import INHERIT as INHERIT
from fp8graph.recipes.rules import Rule as Rule
from fp8graph.records import GemmRecord as GemmRecord
from fp8graph.report import GraphView as GraphView
from fp8graph.report import Report as Report
from fp8graph.tools.explain import explain as explain
from fp8graph.version import __version__ as __version__

# Installed, torch finds the backend by its entry point; in a bare checkout there is none.
if "fp8graph" not in torch._dynamo.list_backends(exclude_tags=()):
    torch._dynamo.register_backend(_named_backend, name="fp8graph")
