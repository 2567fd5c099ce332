"""Correct low-precision modules, as people write them by hand: a scale is applied once to a cast, once to a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def cast(x: Tensor, dtype: torch.dtype = E4M3, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """``x`` in FP8, and the scale that it is multiplied by: of all of it, or constant along ``dim``."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = LARGEST[dtype] / amax.float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scale


def power_of_2(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a scale that is rounded down to a power of two."""
    scale = torch.exp2(torch.floor(torch.log2(448.0 / x.abs().amax(1, keepdim=True).float().clamp(min=1e-12))))
    return (x.float() * scale).to(E4M3), scale


def product(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, scale_a=a_inv, scale_b=b_inv, out_dtype=torch.bfloat16)


class _Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        (xq, xs), (wq, ws) = cast(x), cast(w)
        return product(xq, wq.t(), xs.reciprocal(), ws.reciprocal())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (dy,), (x, w) = grad_outputs, ctx.saved_tensors
        (xq, xs), (wq, ws), (dq, ds) = cast(x), cast(w), cast(dy, E5M2)
        dx = product(dq, wq.t().contiguous().t(), 1 / ds, 1 / ws)
        dw = product(dq.t().contiguous(), xq.t().contiguous().t(), 1 / ds, 1 / xs)
        return dx, dw


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        (xq, xs), (wq, ws) = cast(x, dim=1), cast(w, dim=1)
        return product(xq, wq.t(), 1 / xs, (1 / ws).t())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (dy,), (x, w) = grad_outputs, ctx.saved_tensors
        (dq, ds), (wq, ws) = cast(dy, dim=1), cast(w, dim=0)
        dx = product(dq, wq.t().contiguous().t(), 1 / ds, 1 / ws)
        return dx, dy.t() @ x


def tensorwise(x: Tensor, w: Tensor) -> Tensor:
    """All three products in FP8, one scale for each tensor."""
    return _Tensorwise.apply(x, w)


def rowwise(x: Tensor, w: Tensor) -> Tensor:
    """One scale for each row of the operands; wgrad in high precision."""
    return _Rowwise.apply(x, w)


class Linear(nn.Module):
    """One weight, and a function of the input and the weight."""

    def __init__(self, function: Callable[..., Tensor], inputs: int = 64, outputs: int = 128) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs).bfloat16() * 0.02)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def decoded(x: Tensor, w: Tensor) -> Tensor:
    """Both operands are cast and decoded before the product, as in emulations."""
    (xq, xs), (wq, ws) = cast(x.detach(), dim=1), cast(w.detach(), dim=1)
    return (xq.float() / xs).bfloat16() @ (wq.float() / ws).bfloat16().t()


def multiplied_after(x: Tensor, w: Tensor) -> Tensor:
    """The product of the codes, multiplied by both scales."""
    (xq, xs), (wq, ws) = power_of_2(x.detach()), cast(w.detach())
    return ((xq.bfloat16() @ wq.bfloat16().t()).float() / xs / ws).bfloat16()


def in_tiles(x: Tensor, w: Tensor) -> Tensor:
    """Tiles of 1x32 of x and of 32x32 of w, one product for each of them along the contraction."""
    rows, columns = x.shape
    outputs = w.shape[0]
    x3 = x.detach().float().view(rows, columns // 32, 32)
    xs = x3.abs().amax(2, keepdim=True).clamp(min=1e-4) / 448
    xq = (x3 / xs).to(E4M3)
    w4 = w.detach().float().view(outputs // 32, 32, columns // 32, 32)
    ws = w4.abs().amax((1, 3), keepdim=True) / 448
    wq = (w4 / ws).to(E4M3).view(outputs, columns)
    y = x.new_zeros(rows, outputs, dtype=torch.float32)
    for i in range(columns // 32):
        part = xq[:, i].float() @ wq[:, i * 32 : i * 32 + 32].float().t()
        y = y + part * xs[:, i] * ws[:, 0, i].expand(-1, 32).reshape(1, -1)
    return y.bfloat16()


def fake_quantized(x: Tensor, w: Tensor) -> Tensor:
    """A straight-through estimator: FP8's rounding forward, none backward."""
    q, scale = cast(w.detach())
    rounded = w + (q.to(w.dtype) * (1 / scale).to(w.dtype) - w).detach()
    return functional.linear(x, rounded)


def e8m0(x: Tensor, w: Tensor) -> Tensor:
    """Scales with an exponent alone, found in the bits of the amax."""
    exponent = (x.detach().abs().amax(1, keepdim=True).float().view(torch.int32) >> 23) & 255
    xs = (exponent << 23).view(torch.float32) / 256
    xq = (x.detach().float() / xs).clamp(-448, 448).to(E4M3)
    wq, ws = cast(w.detach(), dim=1)
    return product(xq, wq.t(), xs, (1 / ws).t())


def mx(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` in E4M3, and a power of two for each 32 elements of a row, as bytes of E8M0."""
    parts = x.detach().float().view(x.shape[0], -1, 32)
    bits = parts.abs().amax(-1, keepdim=True).view(torch.int32)
    exponent = (((bits >> 23) & 255) - 8).clamp(1, 254)
    codes = (parts / (exponent << 23).view(torch.float32)).clamp(-448, 448).to(E4M3)
    return codes.view(x.shape), exponent.to(torch.uint8)[..., 0]


def in_rows_of_32(x: Tensor, w: Tensor) -> Tensor:
    """Both operands in MXFP8, decoded before the product."""
    parts = ((codes.float().view(codes.shape[0], -1, 32), e.float() - 127) for codes, e in (mx(x), mx(w)))
    a, b = ((codes * torch.exp2(e)[..., None]).flatten(1).to(x.dtype) for codes, e in parts)
    return a @ b.t()


def in_tiles_of_128x4(scale: Tensor) -> Tensor:
    """Bytes of E8M0 in the order in which GPUs read them."""
    down, along = -(-scale.shape[0] // 128), -(-scale.shape[1] // 4)
    scale = functional.pad(scale, (0, along * 4 - scale.shape[1], 0, down * 128 - scale.shape[0]))
    tiles = scale.view(down, 128, along, 4).permute(0, 2, 1, 3).reshape(-1, 4, 32, 4)
    return tiles.transpose(1, 2).reshape(-1).view(torch.float8_e8m0fnu)


def mx_product(x: Tensor, w: Tensor) -> Tensor:
    """Both operands in MXFP8, and a GEMM that reads their scales."""
    (xq, xe), (wq, we) = mx(x), mx(w)
    return product(xq, wq.t(), in_tiles_of_128x4(xe), in_tiles_of_128x4(we))


class Exponents(nn.Module):
    """A weight in MXFP8, whose scales are decoded by ``scales``."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, scales: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        codes, exponents = mx(torch.randn(128, 64) * 0.02)
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", exponents)
        self.scales = scales

    def forward(self, x: Tensor) -> Tensor:
        inv = self.scales(self.weight_scale)
        return functional.linear(x, (self.weight.float().view(128, 2, 32) * inv[..., None]).view(128, 64).to(x.dtype))


class KeyCache(nn.Module):
    """Keys in FP8, of which a step writes some."""

    keys: Tensor
    key_scale: Tensor

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(64, 64, dtype=E4M3))
        self.register_buffer("key_scale", torch.tensor(0.05))
        self.write = write

    def forward(self, q: Tensor, k: Tensor, position: Tensor) -> Tensor:
        self.write(self.keys, position, self.cast(k))
        return q @ (self.keys.float() * self.key_scale).to(q.dtype).t()

    def cast(self, k: Tensor) -> Tensor:
        return (k / self.key_scale).clamp(-448, 448).to(E4M3)


def of_both(x: Tensor, w: Tensor) -> Tensor:
    """One amax of both operands."""
    x, w = x.detach(), w.detach()
    scale = 448 / torch.cat([x.flatten().abs(), w.flatten().abs()]).amax().float()
    return product((x * scale).to(E4M3), (w * scale).to(E4M3).t(), 1 / scale, 1 / scale)


def of_max_and_min(x: Tensor, w: Tensor) -> Tensor:
    """Amaxes in other words."""
    x, w = x.detach(), w.detach()
    xs = 448 / torch.maximum(x.max(), -x.min()).float()
    ws = 448 / w.square().amax().sqrt().float()
    return product((x * xs).clamp(-448, 448).to(E4M3), (w * ws).clamp(-448, 448).to(E4M3).t(), 1 / xs, 1 / ws)


def of_the_mean(x: Tensor, w: Tensor) -> Tensor:
    """A scale from the mean magnitude, clipped."""
    xs = 40 / x.detach().abs().float().mean()
    xq = (x.detach() * xs).clamp(-448, 448).to(E4M3)
    wq, ws = cast(w.detach())
    return product(xq, wq.t(), 1 / xs, 1 / ws)


class Recent(nn.Module):
    """The largest amax of the last steps, this one included."""

    history: Tensor

    def __init__(self, inputs: int = 64, outputs: int = 128) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs).bfloat16() * 0.02)
        self.register_buffer("history", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        history = torch.cat([x.abs().amax().float().reshape(1), self.history[:-1]])
        self.history.copy_(history)
        scale = 448 / history.amax()
        wq, ws = cast(self.weight.detach())
        return product((x * scale).to(E4M3), wq.t(), 1 / scale, 1 / ws)


class Delayed(nn.Module):
    """Scales of the steps before, in buffers that each step updates."""

    amax_history: Tensor
    scale: Tensor
    scale_inv: Tensor

    def __init__(self, inputs: int = 64, outputs: int = 128) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs).bfloat16() * 0.02)
        self.register_buffer("amax_history", torch.ones(4))
        self.register_buffer("scale", torch.full((), 100.0))
        self.register_buffer("scale_inv", torch.full((), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        xq = (x * self.scale).clamp(-448, 448).to(E4M3)
        wq, ws = cast(self.weight.detach())
        y = product(xq, wq.t(), self.scale_inv, 1 / ws)
        with torch.no_grad():
            history = torch.cat([x.abs().amax().float().reshape(1), self.amax_history[:-1]])
            scale = 448 / history.amax()
            self.amax_history.copy_(history)
            self.scale.copy_(scale)
            self.scale_inv.copy_(1 / scale)
        return y


class History(nn.Module):
    """A scale that is computed in each step from the amaxes of the steps before, the largest or the last."""

    window: Tensor

    def __init__(self, of: Callable[[Tensor], Tensor], inverse: Callable[[Tensor], Tensor] = torch.reciprocal) -> None:
        super().__init__()
        self.of, self.inverse = of, inverse
        self.weight = nn.Parameter(torch.randn(128, 64).bfloat16() * 0.02)
        self.register_buffer("window", torch.full((4,), 8.0))

    def forward(self, x: Tensor) -> Tensor:
        scale = 448 / self.of(self.window)
        wq, ws = cast(self.weight.detach())
        y = product((x * scale).clamp(-448, 448).to(E4M3), wq.t(), self.inverse(scale), 1 / ws)
        with torch.no_grad():
            window = torch.roll(self.window, 1)
            window[0] = x.abs().amax()
            self.window.copy_(window)
        return y


class Stored(nn.Module):
    """FP8 bytes with one scale, one for each row or one for each block; the input's scale is of now or calibrated."""

    weight: Tensor
    weight_scale: Tensor
    weight_scale_inv: Tensor
    input_scale: Tensor | None

    def __init__(self, kind: str, *, static: bool = False, inputs: int = 64, outputs: int = 128) -> None:
        super().__init__()
        w = torch.randn(outputs, inputs) * 0.02
        self.kind = kind
        if kind == "block":
            blocks = w.view(outputs // 32, 32, inputs // 32, 32)
            inv = blocks.abs().amax((1, 3), keepdim=True) / 448
            self.register_buffer("weight", (blocks / inv).to(E4M3).view(outputs, inputs))
            self.register_buffer("weight_scale_inv", inv[:, 0, :, 0].clone())
        else:
            q, scale = cast(w, dim=1 if kind == "row" else None)
            self.register_buffer("weight", q)
            self.register_buffer("weight_scale", 1 / scale)
        self.register_buffer("input_scale", torch.tensor(0.02) if static else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "block":
            inv = self.weight_scale_inv.repeat_interleave(32, 0).repeat_interleave(32, 1)
            return functional.linear(x, (self.weight.float() * inv).to(x.dtype))
        if self.input_scale is not None:
            xq, inv = (x / self.input_scale).clamp(-448, 448).to(E4M3), self.input_scale
        else:
            xq, scale = cast(x, dim=1 if self.kind == "row" else None)
            inv = 1 / scale
        return product(xq, self.weight.t(), inv, self.weight_scale.t() if self.kind == "row" else self.weight_scale)


class OneScale(Stored):
    """The scales of input and weight are one number of the checkpoint, which is applied in the product."""

    alpha: Tensor

    def __init__(self) -> None:
        super().__init__("tensor", static=True)
        assert self.input_scale is not None
        self.register_buffer("alpha", self.input_scale * self.weight_scale)

    def forward(self, x: Tensor) -> Tensor:
        assert self.input_scale is not None
        xq = (x / self.input_scale).clamp(-448, 448).to(E4M3)
        return product(xq, self.weight.t(), self.alpha, torch.ones(()))


class Attention(nn.Module):
    """Scores of FP8 queries and keys, one scale for each head."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (qs, ks) = (448 / x.abs().amax((1, 2), keepdim=True).float() for x in (q, k))
        qq, kq = ((x * s).to(E4M3).bfloat16() for x, s in ((q, qs), (k, ks)))
        scores = (qq @ kq.transpose(1, 2)) / (qs * ks)
        return scores.softmax(-1).to(v.dtype) @ v


Inverse = Callable[[Tensor], Tensor]


def convolved(x: Tensor, w: Tensor, inverse: Inverse = torch.reciprocal, dim: int | None = None) -> Tensor:
    """A convolution of decoded numbers, which their scales divide afterwards."""
    (xq, xs), (wq, ws) = cast(x.detach(), dim=dim), cast(w.detach(), dim=dim)
    y = functional.conv1d(xq.to(x.dtype).t()[None], wq.to(x.dtype)[..., None])[0].t()
    return y * (inverse(xs) * inverse(ws).t())


def of_a_vector(x: Tensor, w: Tensor, inverse: Inverse = torch.reciprocal) -> Tensor:
    """A matrix of decoded numbers times a vector of such, which their scales divide afterwards."""
    (xq, xs), (wq, ws) = cast(x[0].detach()), cast(w.detach())
    return torch.mv(wq.to(x.dtype), xq.to(x.dtype)) * (inverse(xs) * inverse(ws))


class Attended(nn.Module):
    """Attention to decoded values, which their scale divides afterwards."""

    def __init__(self, inverse: Inverse = torch.reciprocal) -> None:
        super().__init__()
        self.inverse = inverse

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values, scale = cast(v)
        return functional.scaled_dot_product_attention(q, k, values.to(q.dtype)) * self.inverse(scale)


def _with(model: nn.Module, *, training: bool = True, shape: tuple[int, ...] = (32, 64)) -> Any:
    return lambda: (model, (torch.randn(shape).bfloat16(),), training)


def _attention() -> Any:
    return Attention(), tuple(torch.randn(4, 16, 32).bfloat16() for _ in range(3)), False


def keys_and_position() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16(), torch.arange(4)


def _cache(write: Callable[[Tensor, Tensor, Tensor], object]) -> Any:
    return lambda: (KeyCache(write), keys_and_position(), False)


def _stack() -> nn.Module:
    return nn.Sequential(
        Linear(tensorwise), nn.GELU(), Linear(rowwise, 128, 64), nn.ReLU(), nn.Linear(64, 64).bfloat16()
    )


PROGRAMS: Final[dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...], bool]]]] = {
    "tensorwise": _with(Linear(tensorwise)),
    "rowwise": _with(Linear(rowwise)),
    "square rowwise": _with(Linear(rowwise, 64, 64), shape=(64, 64)),
    "square decoded": _with(Linear(decoded, 64, 64), training=False, shape=(64, 64)),
    "square multiplied after": _with(Linear(multiplied_after, 64, 64), training=False, shape=(64, 64)),
    "stack": _with(_stack()),
    "decoded": _with(Linear(decoded), training=False),
    "multiplied after": _with(Linear(multiplied_after), training=False),
    "tiles": _with(Linear(in_tiles), training=False),
    "fake quantized": _with(Linear(fake_quantized)),
    "e8m0": _with(Linear(e8m0), training=False),
    "mx": _with(Linear(in_rows_of_32), training=False),
    "mx product": _with(Linear(mx_product), training=False),
    "mx product, whole tiles": _with(Linear(mx_product, 128), training=False, shape=(128, 128)),
    "exponents": _with(Exponents(lambda e: torch.exp2(e.float() - 127)), training=False),
    "exponents shifted": _with(Exponents(lambda e: (e.int() << 23).view(torch.float32)), training=False),
    "exponents viewed": _with(Exponents(lambda e: e.view(torch.float8_e8m0fnu).float()), training=False),
    "cache": _cache(lambda keys, position, new: keys.index_copy_(0, position, new)),
    "cache, indexed": _cache(lambda keys, position, new: keys.__setitem__(position, new)),
    "cache, sliced": _cache(lambda keys, position, new: keys[:4].copy_(new)),
    "both": _with(Linear(of_both), training=False),
    "max and min": _with(Linear(of_max_and_min), training=False),
    "mean": _with(Linear(of_the_mean), training=False),
    "recent": _with(Recent(), training=False),
    "delayed": _with(Delayed(), training=False),
    "largest of history": _with(History(lambda window: window.amax()), training=False),
    "last of history": _with(History(lambda window: window[0]), training=False),
    "stored": _with(Stored("tensor"), training=False),
    "stored static": _with(Stored("tensor", static=True), training=False),
    "stored, one scale": _with(OneScale(), training=False),
    "stored rows": _with(Stored("row"), training=False),
    "stored blocks": _with(Stored("block"), training=False),
    "two stored": _with(
        nn.Sequential(Stored("row"), nn.GELU(), Stored("tensor", static=True, inputs=128, outputs=64)), training=False
    ),
    "attention": _attention,
    "attended": lambda: (Attended(), tuple(torch.randn(1, 4, 16, 32).bfloat16() for _ in range(3)), False),
    "convolved": _with(Linear(convolved), training=False),
    "vector": _with(Linear(of_a_vector), training=False),
}
