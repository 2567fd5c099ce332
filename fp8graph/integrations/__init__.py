"""The scaling state in the checkpoints of other libraries. Each library has a file here, and only that imports it.

Those files ask a backend for its state, and give it one, by the functions here alone: these refuse a state that other
ranks do not have, and say that one is missing.
"""

from __future__ import annotations

import base64
import io
import logging
import pickle
import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from fp8graph.backend.backend import Backend
from fp8graph.backend.entry import backend_of
from fp8graph.errors import StateError
from fp8graph.files import new_file
from fp8graph.runtime.state_dict import BackendState

__all__: list[str] = []  # ScalingStateCallback is in .transformers and .lightning

_log = logging.getLogger("fp8graph")
_CALLBACK: Final = "ScalingStateCallback"
_LARGEST = 1 << 28  # bytes of a state: 60,000 tensors with 1,024 amaxes each


def state_to_save(model: nn.Module, checkpoint: str) -> BackendState:
    """Return the state of the backend behind ``model``.

    Args:
        checkpoint: what it goes into, for the message.

    Raises:
        StateError: the ranks' states differ, and ``checkpoint`` holds that of one rank.
    """
    state = backend_of(model).state_dict()
    if state.not_shared:
        raise StateError(
            f"{checkpoint} holds the scaling state of one rank, but {state.not_shared}. Let each rank save its own, "
            "torch.save(backend.state_dict(), path_of_this_rank), or reduce amaxes over all ranks."
        )
    return state


def state_by_layer(backend: Backend, layers: Iterable[str]) -> dict[str, BackendState]:
    """Return the state for torch.distributed.checkpoint, which is refused there if the ranks' states differ."""
    return backend.state_dict().by_layer(layers)


def load_state(backend: Backend, state: Mapping[str, Any] | None, checkpoint: str, saved_with: str = _CALLBACK) -> None:
    """Load the state that ``checkpoint`` holds; None: it holds none (:func:`missing`)."""
    if state is None:
        missing(backend, checkpoint, saved_with)
    else:
        backend.load_state_dict(state)


@contextmanager
def loading(
    backend: Backend, state: Mapping[str, Any] | None, checkpoint: str, saved_with: str = _CALLBACK
) -> Generator[None]:
    """Load the state as :func:`load_state`, before a host loads the rest. If that fails, the old state is put back."""
    before = None if state is None else backend.state_dict()
    load_state(backend, state, checkpoint, saved_with)
    try:
        yield
    except BaseException:
        if before is not None:
            backend.load_state_dict(before)
        raise


def missing(backend: Backend, checkpoint: str, saved_with: str = _CALLBACK) -> None:
    """Say that ``checkpoint`` has no scaling state.

    Args:
        backend: that was to load it.
        checkpoint: its name.
        saved_with: the object that puts the state into checkpoints.

    Raises:
        StateError: in strict mode.
    """
    text = (
        f"{checkpoint} has no scaling state of fp8graph: it was saved without {saved_with}. Delayed scales "
        "start anew, and so does a schedule of the policy: the run will differ from one that was not interrupted."
    )
    if backend.settings.strict:
        raise StateError(f"strict mode: {text} Resume without strict to accept that.")
    _log.warning(text)


def to_text(state: BackendState) -> str:
    """Return the state for a JSON file, with a checksum (zlib's)."""
    file = io.BytesIO()
    torch.save(state, file)
    return base64.b64encode(zlib.compress(file.getvalue())).decode("ascii")


def from_text(text: object, checkpoint: str) -> dict[str, torch.Tensor]:
    """Return the inverse of :func:`to_text`.

    Raises:
        StateError: ``text`` is damaged.
    """
    try:
        packed, inflating = base64.b64decode(text, validate=True), zlib.decompressobj()  # pyright: ignore
        data = inflating.decompress(packed, _LARGEST)
        if not inflating.eof:
            raise ValueError(f"it is cut off, or larger than {_LARGEST >> 20} MiB")
        return torch.load(io.BytesIO(data), weights_only=True)
    except (TypeError, ValueError, zlib.error, RuntimeError, pickle.UnpicklingError) as error:
        raise StateError(
            f"the scaling state of fp8graph in {checkpoint} is damaged ({type(error).__name__}: {error}). Resume from "
            "another checkpoint, or train without ScalingStateCallback to let delayed scales start anew."
        ) from error


def write_state(state: BackendState, file: Path) -> None:
    """Write the state as a file of its own, whole or not at all."""
    with new_file(file, str(file)) as opened:
        torch.save(dict(state), cast(Any, opened))


def read_state(file: Path) -> dict[str, Any] | None:
    """Return the inverse of :func:`write_state`; None if there is no such file.

    Raises:
        StateError: the file is damaged.
    """
    if not file.exists():
        return None
    try:
        return torch.load(file, weights_only=True)
    except (OSError, ValueError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise StateError(
            f"the scaling state of fp8graph in {file} is damaged ({type(error).__name__}: {str(error):.200}). Resume "
            "from another checkpoint, or move this file away to let delayed scales start anew."
        ) from error
