"""The models that are trained whole: their sizes, how they fit into a GPU, their FLOPs, and the text they train on."""

from __future__ import annotations

import platform
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph.errors import ConfigError

CAUSAL: Final = "causal_sdpa"


def register_causal_attention() -> str:
    """Make ``attn_implementation="causal_sdpa"`` known to transformers, as docs/performance.md tells users to.

    While Dynamo traces, transformers builds the causal mask as a whole [1, 1, s, s] tensor (its issue #48925), and with
    a mask attention takes no flash kernel and does twice the work. Here there is no mask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(CAUSAL, sdpa_attention_forward)
    AttentionMaskInterface.register(CAUSAL, _no_mask)
    return CAUSAL


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    return None


@dataclass(frozen=True)
class Mode:
    """The way in which a model is trained, decided once for all contenders by what fits."""

    optimizer: str
    checkpointed: bool  # each block runs again in backward

    def __str__(self) -> str:
        return f"{self.optimizer}{', blocks checkpointed' if self.checkpointed else ''}"


MODES: Final = (Mode("AdamW", False), Mode("AdamW", True), Mode("SGD", True))  # the first that fits


@dataclass(frozen=True)
class RecordedModel:
    """A causal language model of transformers, with random weights in bf16, and the tokens of a step."""

    name: str
    family: str  # transformers' model type
    sizes: Mapping[str, int | bool]  # of its config
    sequence: int
    sequences: int = 1

    @property
    def tokens(self) -> int:
        return self.sequence * self.sequences

    def config(self) -> Any:
        from transformers import AutoConfig

        settings: dict[str, Any] = {"attn_implementation": register_causal_attention(), "use_cache": False}
        settings |= {"max_position_embeddings": self.sequence, "bos_token_id": None, "eos_token_id": None}
        return AutoConfig.for_model(self.family, **self.sizes, pad_token_id=None, **settings)

    def build(self, device: torch.device) -> Any:
        from transformers import AutoModelForCausalLM

        from fp8graph.tools.hugging_face import in_bf16

        with in_bf16(device):
            return AutoModelForCausalLM.from_config(self.config()).train()

    def multiplied(self) -> int:
        """Return the parameters that a token is multiplied by: no input embedding; of experts those that it visits."""
        model, config = self.build(torch.device("meta")), self.config()
        embedding = None if config.tie_word_embeddings else model.get_input_embeddings().weight
        share = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
        return round(sum(p.numel() * (share if p.ndim == 3 else 1) for p in model.parameters() if p is not embedding))

    def flop_per_token(self) -> dict[str, float]:
        """Return the FLOP of a step for each token, in the two ways in which the field counts them.

        torchtitan (``utils.py``): 6 N + 12 L h s, with all of the scores; Megatron counts the half of them that a
        causal mask leaves: 6 N + 6 L h s. N: :meth:`multiplied`; L layers, h: heads times their size, s: tokens of a
        sequence.
        """
        config = self.config()
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        weights, scores = 6.0 * self.multiplied(), 6.0 * config.num_hidden_layers * width * self.sequence
        return {"titan": weights + 2 * scores, "megatron": weights + scores}

    def needs_mib(self, mode: Mode) -> float:
        """Estimate the memory of a step, an upper bound: bf16 weights, gradients and states; activations; logits.

        A layer keeps 13 h + 6 i bytes per token (h: hidden size, i: the inner sizes that a token visits), as counted of
        a Llama-3-8B layer in ``benchmarks/results/checkpointing.json``: 1,088 MiB of 8,192 tokens. Logits are there in
        bf16, in FP32, and as the gradients of both.
        """
        config = self.config()
        parameters = sum(p.numel() for p in self.build(torch.device("meta")).parameters())
        inner = config.intermediate_size * getattr(config, "num_experts_per_tok", 1)
        layer = self.tokens * (13 * config.hidden_size + 6 * inner)
        layers = config.num_hidden_layers
        kept = layer + layers * self.tokens * 2 * config.hidden_size if mode.checkpointed else layers * layer
        states = parameters * (8 if mode.optimizer == "AdamW" else 4)
        return (states + 1.1 * kept + 12 * self.tokens * config.vocab_size) / 2**20

    def mode(self, memory_mib: float) -> Mode | None:
        """Return the first of ``MODES`` that fits into 95 % of ``memory_mib``; None: the model does not fit."""
        return next((mode for mode in MODES if self.needs_mib(mode) <= 0.95 * memory_mib), None)


_LLAMA3: Final = {"vocab_size": 128_256, "num_key_value_heads": 8, "num_attention_heads": 32}
WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        RecordedModel(
            "llama-3-8b",
            "llama",
            _LLAMA3 | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336},
            sequence=8192,
        ),
        RecordedModel(
            "llama-3.2-1b",
            "llama",
            _LLAMA3
            | {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "tie_word_embeddings": True},
            sequence=8192,
        ),
        RecordedModel(  # 6.9 billion parameters, 64 experts, of which a token visits 8
            "olmoe-1b-7b",
            "olmoe",
            {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 1024, "vocab_size": 50304},
            sequence=4096,
            sequences=2,
        ),
    )
}
TINY: Final[Mapping[str, Mapping[str, int | bool]]] = {
    "llama": {
        "vocab_size": 512, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 448,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "olmoe": {
        "vocab_size": 512, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64,
        "num_attention_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


def tiny(workload: RecordedModel) -> RecordedModel:
    """Return a model of the same family that a CPU trains in seconds."""
    return RecordedModel(f"{workload.name}, tiny", workload.family, TINY[workload.family], sequence=32, sequences=2)


def text(vocabulary: int, numbers: int) -> tuple[Tensor, str]:
    """Return ``numbers`` tokens below ``vocabulary`` of real text, and a sentence that says which.

    The source code of Python's standard library, which every installation has: words, signs and spaces, numbered by how
    often they occur. Those beyond the vocabulary share its last number. The files come in an order drawn with seed 0.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    random.Random(0).shuffle(files)
    words = list(islice(_words(files), numbers))
    if len(words) < numbers:
        raise ConfigError(
            f"{library}: its files hold {len(words)} words, and the run needs {numbers}. Train for fewer steps."
        )
    counts = Counter(words)
    number_of = {word: index for index, (word, _) in enumerate(counts.most_common(vocabulary - 1))}
    said = f"source code of Python {platform.python_version()}'s standard library, {len(counts)} different words"
    return torch.tensor([number_of.get(word, vocabulary - 1) for word in words]), said


def _words(files: list[Path]) -> Iterator[str]:
    for file in files:
        yield from re.findall(r"\w+|[^\w\s]|\s+", file.read_text(encoding="utf-8", errors="ignore"))
