"""The arithmetic: plain eager functions, the only statement of it. Public: what is named here."""

from fp8graph.numerics.api import QuantizedTensor, cast_to_representable, dequantize, quantize, sqnr_db

__all__ = ["QuantizedTensor", "cast_to_representable", "dequantize", "quantize", "sqnr_db"]
