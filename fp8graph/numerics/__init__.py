"""All arithmetic, as plain eager functions and stated only here. The names in this file are public."""

from fp8graph.numerics.api import QuantizedTensor, cast_to_representable, dequantize, quantize, sqnr_db, statistics

__all__ = ["QuantizedTensor", "cast_to_representable", "dequantize", "quantize", "sqnr_db", "statistics"]
