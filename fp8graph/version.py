"""The version of fp8graph."""

__version__ = "0.1.0"
