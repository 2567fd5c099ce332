"""fp8graph: FP8 training and inference as a backend of torch.compile.

    fp8graph.compile(model)  # in place, under the names that its layers have
    model = torch.compile(model, backend="fp8graph")  # or as torch has it

See the README for a tour and ``fp8graph.passes`` for how it works.
"""

import importlib
import importlib.util
import sys
import typing

from fp8graph import late as _late
from fp8graph.version import __version__ as __version__
from fp8graph.words import did_you_mean as _did_you_mean
from fp8graph.words import extras as _extras

if typing.TYPE_CHECKING:
    from fp8graph.face import *  # noqa: F403
    from fp8graph.face import __all__ as __all__


def __getattr__(name: str) -> typing.Any:
    """Everything, at the first name that is asked for: ``fp8graph --help`` shall not import torch, for seconds."""
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _load()
    try:
        return globals()[name]
    except KeyError:
        close = _did_you_mean(name, importlib.import_module(f"{__name__}.face").__all__)
        hint = f" Its counterpart: {_PEERS[name]}" if name in _PEERS else close
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint and '.'}{hint}") from None


def __dir__() -> list[str]:
    _load()
    return sorted(globals())


# what people who come from Transformer Engine and torchao type
_PEERS: typing.Final = {
    "fp8_autocast": "fp8graph.autocast",
    "fp8_model_init": "fp8graph.quantize_weights",
    "Linear": "torch.nn.Linear, and fp8graph.compile(model)",
    "LayerNormLinear": "torch.nn modules, and fp8graph.compile(model)",
    "Float8Linear": "torch.nn.Linear, and fp8graph.compile(model)",
    "convert_to_float8_training": "fp8graph.compile(model)",
    "Float8LinearConfig": "fp8graph.Policy",
    "quantize_": "fp8graph.quantize_weights",
}


def _load() -> None:
    face = importlib.import_module(f"{__name__}.face")
    globals().update({name: getattr(face, name) for name in face.__all__}, __all__=face.__all__)


_late.policy_of_checkpoint.load = lambda: importlib.import_module(f"{__name__}.tools.checkpoint_policy").policy_of


# A program that has torch gets everything at once. So does a bare checkout: torch finds its backend only once it is
# registered.
if "torch" in sys.modules or not _extras.is_installed():
    _load()
