"""FP8 checkpoints as files: what is in them, what it means, and how they are written. No models, no graphs.

    checkpoint = Checkpoint("folder")
    for layer, stored in checkpoint.layers.items():
        weight = checkpoint.weight(layer)  # its own bytes and scales

A format is one file here, and one entry in ``checkpoint.FORMATS``.
"""

from fp8graph.checkpoints.checkpoint import FORMATS, Checkpoint, write_checkpoint
from fp8graph.checkpoints.layer_format import WHOLE, Activation, LayerFormat, QuantizedWeight, Suffixes, dequantize
from fp8graph.checkpoints.shards import Shards
from fp8graph.checkpoints.writing import write_shards

__all__ = [
    "FORMATS",
    "WHOLE",
    "Activation",
    "Checkpoint",
    "LayerFormat",
    "QuantizedWeight",
    "Shards",
    "Suffixes",
    "dequantize",
    "write_checkpoint",
    "write_shards",
]
