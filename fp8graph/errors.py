"""The errors that users can get. Each says where it happened, what was found and what to do.

They derive from torch's ``ShortenTraceback`` so that Dynamo hands them to the user as themselves
instead of wrapping them in ``BackendCompilerFailed`` (tests/test_errors.py keeps this fact).
"""

from __future__ import annotations

from torch._dynamo.exc import ShortenTraceback  # noqa: TID251  # compat stands above errors

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Fp8CoverageError",
    "Fp8GraphError",
    "PolicyError",
    "StateError",
    "UnsupportedRecipeError",
]


class Fp8GraphError(ShortenTraceback):
    """Base of every error that fp8graph raises."""

    def __init__(self, message: str) -> None:
        # first_useful_frame=None: "show the traceback as it is" to torch.
        super().__init__(message, first_useful_frame=None)

    def __reduce__(self) -> tuple[type[Fp8GraphError], tuple[str]]:
        return type(self), (str(self),)


class ConfigError(Fp8GraphError, ValueError):
    """An argument, option, target, mesh or file that cannot be used as given."""


class PolicyError(ConfigError):
    """A policy, rule or policy file that cannot be used as written, or on which ranks do not agree."""


class UnsupportedRecipeError(ConfigError):
    """A recipe that does not exist, or whose fields ask for something that no hardware supports."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be read or written as asked: a damaged file, tensors that do not fit, a format that
    is not known."""


class Fp8CoverageError(Fp8GraphError):
    """A GEMM that the user asked for in FP8 does not run in FP8 (``report.check()``, strict mode)."""


class StateError(Fp8GraphError):
    """Scaling state that does not fit: names, shapes, versions or values."""
