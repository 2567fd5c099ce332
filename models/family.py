"""The contents of a family file: the layers in high precision and why, a tiny model, and the counts to expect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

# Why linears stay in high precision. The patterns are globs on the whole FQN.
HEAD: Final = "the output is the loss's input: no later layer averages its errors out"
ROUTER: Final = "experts are chosen by comparing logits: a small error is another expert"
EMBEDDER: Final = "every block reads its output, and it multiplies next to nothing: one row per image, or few features"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The counts that the rewritten training graph must have."""

    sites: int = 0  #: matmuls of the program, including those left in high precision
    fp8_gemms: int = 0  #: fprop, dgrad and wgrad of each site in FP8
    multiplied: int = 0  #: GEMMs that are left of these after fusion
    quantized_tensors: int = 0  #: quantize nodes after sharing and fusion, including weights: one amax each
    casts: int = 0  #: FP8 copies that they write: rowwise and columnwise

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    def __mul__(self, times: int) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) * times for f in dataclasses.fields(self)})


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models of Hugging Face transformers or another library."""

    name: str  #: name of its folder in transformers.models; elsewhere <library>_<architecture>
    keep: Mapping[str, str]  #: pattern -> why it stays in high precision; in addition to the general policy's
    tiny: Callable[[int], Any]  #: number of layers -> a model of its class with random weights, on the CPU
    inputs: Callable[[Any], dict[str, Any]]  #: the tiny model -> arguments of one training step
    layer: Counts  #: counts per further layer
    rest: Counts  #: counts of the rest; negative if the first layers have less than a further one
    graphs: int = 1  #: number of graphs that Dynamo makes
    generates: bool = True
    model: str = ""  #: elsewhere: full name of the model's class; a block alone has its own names, and no exceptions

    @property
    def library(self) -> str:
        return self.model.partition(".")[0] or "transformers"

    def counts(self, layers: int) -> Counts:
        return self.layer * layers + self.rest


SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


def causal_lm(prefix: str, *, config: str = "", **settings: Any) -> Callable[[int], Any]:
    """Builds ``<prefix>ForCausalLM`` from ``<prefix>Config``, grouped-query attention included."""

    def tiny(layers: int) -> Any:
        import transformers

        sizes = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": layers, **settings}
        configuration = getattr(transformers, config or f"{prefix}Config")(**sizes)
        return getattr(transformers, f"{prefix}ForCausalLM")(configuration)

    return tiny


def tokens(_model: Any) -> dict[str, Any]:
    """Two sequences that are their own labels."""
    import torch

    ids = torch.randint(3, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def noise(*shape: int) -> Any:
    """Random numbers, the same in each run."""
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def pixels(_model: Any) -> dict[str, Any]:
    import torch

    return {"pixel_values": noise(2, 3, 32, 32), "labels": torch.tensor([1, 2])}
