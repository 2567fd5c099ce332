"""Gradients sent in FP8 between the ranks of FSDP2 or DDP. Opt-in: it changes the numbers of a training.

In place of a reduce-scatter, each rank quantizes what it has for each other rank (one scale for 128 numbers), sends it
with one all-to-all, and adds up in FP32 what it receives: each number is rounded once, sums are not. DDP then gathers
the sums, which are rounded once more. A rank sends 1.03 bytes for each number in place of 2 (bf16) or 4 (FP32), under
DDP twice that in place of twice 2 or 4.

    wire = send_gradients_in_fp8(model)   # after fully_shard or DistributedDataParallel
    ...
    wire.bytes_sent
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp8graph.errors import Fp8GraphError
from fp8graph.numerics.quantization import dequantize_data, quantize_layouts

_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK: Final = 128  # numbers that share a scale
_SCALE_BYTES: Final = 4

__all__ = ["GradientWire", "send_gradients_in_fp8"]


def send_gradients_in_fp8(model: nn.Module, *, dtype: torch.dtype = torch.float8_e4m3fn) -> GradientWire:
    """Send the gradients of ``model`` in FP8 from the next backward on.

    Args:
        model: modules in it are sharded by ``fully_shard``, or it is a ``DistributedDataParallel``. Under HSDP, the
            all-reduce between replicas stays in high precision.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        An object that counts what this rank sends.

    Raises:
        ValueError: for another dtype.
        Fp8GraphError: nothing in ``model`` is sharded or replicated.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, not {dtype}")
    made = GradientWire(dtype)
    if isinstance(model, DistributedDataParallel):
        # DDP takes a group as the state, and reads annotations: a lambda has none
        model.register_comm_hook(model.process_group, lambda group, bucket: made.hook(group, bucket))  # pyright: ignore
        return made
    sharded = [module for module in model.modules() if hasattr(module, "set_custom_reduce_scatter")]
    for module in sharded:
        module.set_custom_reduce_scatter(made)  # pyright: ignore[reportCallIssue]
    if not sharded:
        raise Fp8GraphError(
            f"{type(model).__name__} has no gradients to send: call fully_shard on its modules, or wrap it in "
            "DistributedDataParallel, before send_gradients_in_fp8."
        )
    return made


class GradientWire:
    """Reduces gradients for FSDP2 in place of its reduce-scatter, and for DDP in place of its all-reduce.

    Attributes:
        bytes_sent: by this rank, so far.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype: Final = dtype
        self.bytes_sent = 0
        self._stream: Any = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """FSDP2's reduce-scatter: ``input_tensor`` [ranks * numbers] of each rank to ``output_tensor`` [numbers].

        Raises:
            Fp8GraphError: the gradients are to be divided by another factor than the number of ranks.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise Fp8GraphError(
                f"gradients in FP8 are added up or averaged, not reduced with {op}: call set_gradient_divide_factor "
                "only with the number of ranks, or do not call send_gradients_in_fp8."
            )
        total = self._reduced(input_tensor, group)
        output_tensor.copy_(total / dist.get_world_size(group) if op == dist.ReduceOp.AVG else total)

    def hook(self, group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: the mean of a bucket over ``group``, on a stream of its own."""
        buffer: Tensor = bucket.buffer()
        if not buffer.is_cuda:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(self._averaged(buffer, group))
            return future
        self._stream = self._stream or torch.cuda.Stream(buffer.device)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            future = torch.futures.Future(devices=[buffer.device])
            future.set_result(self._averaged(buffer, group))  # who waits for it waits for the stream
        return future

    def _averaged(self, buffer: Tensor, group: Any) -> Tensor:
        ranks = dist.get_world_size(group)
        numbers = -(-buffer.numel() // ranks)
        padded = torch.nn.functional.pad(buffer, (0, ranks * numbers - buffer.numel()))
        mean = self._reduced(padded, group) / ranks
        message = to_bytes(mean.view(1, -1), self.dtype)
        every = message.new_empty((ranks, message.shape[1]))
        dist.all_gather_into_tensor(every, message, group=group)  # pyright: ignore[reportDeprecated]
        self.bytes_sent += (ranks - 1) * message.shape[1]
        buffer.copy_(from_bytes(every, numbers, self.dtype).flatten()[: buffer.numel()])
        return buffer

    def _reduced(self, x: Tensor, group: Any) -> Tensor:
        """Return the sum over ranks, FP32 [numbers], of this rank's part of ``x`` [ranks * numbers]."""
        ranks = dist.get_world_size(group)
        sent = to_bytes(x.view(ranks, -1), self.dtype)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self.bytes_sent += (ranks - 1) * sent.shape[1]
        return from_bytes(received, x.numel() // ranks, self.dtype).sum(0)


def to_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [messages, numbers], bf16, fp16 or FP32, as ``dtype`` (E4M3 or E5M2): uint8 [messages, bytes].

    A block is scaled to the largest number of ``dtype``. Inf and NaN become NaN.
    """
    messages, numbers = x.shape
    blocks = torch.nn.functional.pad(x, (0, -numbers % _BLOCK)).view(-1, _BLOCK)
    made = quantize_layouts(blocks, dtype, False, 0.0, [1, 1], [], scaling="row")  # [blocks, 128], [blocks, 1]
    parts = [part.reshape(messages, -1).view(torch.uint8) for part in made]
    return torch.cat(parts, 1)


def from_bytes(message: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
    """Return the inverse of :func:`to_bytes`: FP32 [messages, numbers]."""
    blocks = -(-numbers // _BLOCK)
    data, scale_inv = message.split([blocks * _BLOCK, blocks * _SCALE_BYTES], 1)
    values = data.contiguous().view(dtype).view(-1, _BLOCK)
    scales = scale_inv.contiguous().view(torch.float32).view(-1, 1)
    decoded = dequantize_data(values, scales, torch.float32, scaling="row")
    return decoded.view(len(message), -1)[:, :numbers]
