"""The size, the type and the steps of ``fp8graph demo`` on this machine, by times of its first steps.

Both runs, their compilation and what is shown of them shall end in ``SECONDS`` on any two cores. A machine differs from
others in three ways that are measured before anything depends on them: how fast it multiplies (``choose_size``), in
bf16 and in FP32, which is several times as fast where a CPU has no bf16 GEMM; how long it compiles
(``choose_compiler``); and how long a step then takes (``choose_steps``). Where it becomes slower in the training, there
are fewer steps (``choose_again``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

SECONDS: Final = 170.0  # of it all, since the command was started; three minutes, and some of them for slower moments
COMPILATION: Final = 80.0  # seconds for both runs, until the first one's are measured
LAST_PART: Final = 20.0  # seconds after the training: pictures, FP8 against the plain logits, the sample
MOST: Final = 150  # steps of each run
LEAST: Final = 40  # the losses of the last 20 are compared
FEWEST: Final = 10  # where it becomes slower; the losses of the last 5 are compared
SLOWER: Final = 3.0  # LAST_PART takes at most so many times as long
ENOUGH: Final = 60  # steps for which a size is chosen
FP8_STEP: Final = 2.0  # an FP8 step in plain ones, until it is measured: 1.3 to 2 on CPUs, where FP8 is decoded
FP8_COMPILATION: Final = 1.3  # the same of compilations
FASTER: Final = 1.5  # FP32 is taken if it is that much faster than bf16, in which models are trained
SEQUENCE: Final = 128  # bytes
BATCH: Final = 8  # sequences of a step


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama of two layers: grouped-query attention with heads of 64, SwiGLU, 256 tokens."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int

    @property
    def weights(self) -> int:
        """The number of weights that multiply each token, with those of the head."""
        qkvo = 2 * self.hidden_size * (self.hidden_size + 64 * self.num_key_value_heads)
        return 2 * (qkvo + 3 * self.hidden_size * self.intermediate_size) + 256 * self.hidden_size


SIZES: Final = (
    Size(hidden_size=384, intermediate_size=1024, num_attention_heads=6, num_key_value_heads=2),
    Size(hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2),
    Size(hidden_size=128, intermediate_size=352, num_attention_heads=2, num_key_value_heads=1),
)
Dtype = Literal["bf16", "FP32"]
Compiler = Literal["inductor", "eager"]


def choose_size(rates: Mapping[Dtype, float], seconds: float, steps: int | None = None) -> tuple[Size, Dtype]:
    """Choose the largest size whose steps fit into ``seconds``, or the smallest one, and its type.

    Args:
        rates: weights times tokens per second, forward and backward of the plain model.
        seconds: for compilation, training and what follows.
        steps: of each run; None: ``ENOUGH``.
    """
    dtype: Dtype = "FP32" if rates["FP32"] > FASTER * rates["bf16"] else "bf16"
    left = seconds - COMPILATION - LAST_PART
    for size in SIZES:
        step = size.weights * SEQUENCE * BATCH / rates[dtype]
        if (steps or ENOUGH) * step * (1 + FP8_STEP) <= left:
            return size, dtype
    return SIZES[-1], dtype


def choose_compiler(compilation: float, step: float, seconds: float) -> Compiler:
    """Choose whether code is generated for FP8, too, or its graph runs node by node, which starts at once.

    Args:
        compilation, step: the seconds of the plain run's.
        seconds: for the compilation of FP8, training and what follows.
    """
    left = seconds - LAST_PART - LEAST * step * (1 + FP8_STEP)
    return "inductor" if FP8_COMPILATION * compilation <= left else "eager"


def choose_steps(step: float, seconds: float) -> int:
    """Choose the steps of each run: as many as fit, from ``FEWEST`` to ``MOST``.

    Args:
        step: the seconds of one step of both.
        seconds: for training and what follows.
    """
    return max(FEWEST, min(MOST, int((seconds - LAST_PART) / step)))


def choose_again(steps: int, *, done: int, step: float, before: float, seconds: float) -> int:
    """Choose the steps of each run again, after ``done`` of ``steps``: fewer if they would take too long, or no more.

    Args:
        step, before: the seconds of one step of both, in the training and before it.
        seconds: for the rest of the training and what follows.
    """
    last_part = LAST_PART * min(SLOWER, max(1.0, step / before))
    return min(steps, max(FEWEST, done, done + int((seconds - last_part) / step)))
