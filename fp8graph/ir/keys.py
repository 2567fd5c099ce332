"""All keys of ``node.meta`` that passes leave for each other.

``recipes/autocast.py`` has one more, for the regions of the user's code.
"""

from __future__ import annotations

from typing import Final

GATHERED_KEY: Final = "fp8graph_gathered"  # node.meta of an all-gather of a quantized tensor: Gathered
PURPOSE_KEY: Final = "fp8graph_purpose"  # node.meta of a collective that a pass added: its purpose
OPERAND_KEY: Final = "fp8graph_operand"  # node.meta of a quantize node: the operand's name
ROWS_KEY: Final = "fp8graph_rows"  # node.meta of a delayed quantize node: its StateRows
TAKEN_KEY: Final = "fp8graph_taken"  # node.meta of a spare input that a pass took
CACHED_KEY: Final = "fp8graph_cached"  # node.meta of a quantize node that runs outside the graph
NO_GRAD_KEY: Final = "fp8graph_no_grad"  # in node.meta["custom"]: the node runs without gradients
GEMM_KEY: Final = "fp8graph_gemm"  # node.meta: the GEMM that the node belongs to, (index of its site, its name)
PASS_KEY: Final = "fp8graph_pass"  # node.meta: the pass that made the node
DECIDED_KEY: Final = "fp8graph_decided"  # node.meta: the joint pipeline has seen the node
NAMES_KEY: Final = "fp8graph_names"  # node.meta after lowering: names of the nodes before it that the node computes
TEXT_KEY: Final = "fp8graph_text"  # module.meta of a partitioned graph: the joint graph's text after all passes
