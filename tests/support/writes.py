"""A hundred ways to write a weight, as data: each changes the numbers of one ``nn.Linear``, with or without a trace."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, cast

import numpy
import torch
from torch import Tensor, nn

Way = Callable[[nn.Linear], Any]


def _same(p: Tensor) -> Tensor:
    """Other numbers of the shape of ``p``: of the size of a weight, and different in each call."""
    return torch.randn_like(p) * 0.2


def _mask(p: Tensor) -> Tensor:
    return torch.rand(p.shape) < 0.5


def _rows(p: Tensor) -> Tensor:
    return torch.randperm(p.shape[0])


def _set(tensor: Any, where: Any, value: Any) -> None:
    tensor[where] = value


# of a tensor of the weight's memory, in place
_IN_PLACE: Final[dict[str, Callable[[Tensor], Any]]] = {
    "copy_": lambda w: w.copy_(_same(w)),
    "mul_": lambda w: w.mul_(1.5),
    "mul_ by -1": lambda w: w.mul_(-1),
    "add_": lambda w: w.add_(_same(w)),
    "sub_": lambda w: w.sub_(_same(w)),
    "div_": lambda w: w.div_(1.25),
    "neg_": lambda w: w.neg_(),
    "fill_": lambda w: w.fill_(0.25),
    "zero_": lambda w: w.zero_(),
    "normal_": lambda w: w.normal_(std=0.2),
    "uniform_": lambda w: w.uniform_(-0.3, 0.3),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
    "abs_": lambda w: w.normal_().abs_(),
    "tanh_": lambda w: w.normal_().tanh_(),
    "sigmoid_": lambda w: w.normal_().sigmoid_(),
    "round_": lambda w: w.normal_().round_(),
    "addcmul_": lambda w: w.addcmul_(_same(w), _same(w)),
    "addcdiv_": lambda w: w.addcdiv_(_same(w), _same(w).abs() + 1),
    "addmm_": lambda w: w.addmm_(torch.randn(w.shape[0], 4), torch.randn(4, w.shape[1]) * 0.1),
    "lerp_": lambda w: w.lerp_(_same(w), 0.5),
    "index_copy_": lambda w: w.index_copy_(0, torch.tensor([1, 3]), _same(w)[:2]),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([0]), 0.3),
    "index_add_": lambda w: w.index_add_(0, torch.tensor([2]), _same(w)[:1]),
    "index_put_": lambda w: w.index_put_((torch.tensor([1]), torch.tensor([2])), torch.tensor(2.0)),
    "masked_fill_": lambda w: w.masked_fill_(_mask(w), 0.1),
    "masked_scatter_": lambda w: w.masked_scatter_(_mask(w), _same(w)),
    "scatter_": lambda w: w.scatter_(1, torch.tensor([[5], [7]]), 1.5),
    "renorm_": lambda w: w.normal_().renorm_(2, 0, 0.5),
    "rows in another order": lambda w: w.copy_(w[_rows(w)].clone()),
    "two rows exchanged": lambda w: _set(w, [0, 1], w[[1, 0]].clone()),
    "columns rolled": lambda w: w.copy_(w.roll(1, 1)),
    "one element": lambda w: _set(w, (3, 5), w[3, 5] + 3.0),
    "the last element": lambda w: _set(w, (-1, -1), w[-1, -1] + 3.0),
    "a slice": lambda w: _set(w, (slice(None), slice(0, 2)), 0.4),
    "a view": lambda w: w.view(-1)[5:9].add_(1.0),
    "the transpose": lambda w: w.t()[0].mul_(3.0),
    "as_strided": lambda w: w.as_strided((2, 2), (1, 2)).add_(1.0),
    "a bit": lambda w: w.view(torch.int32)[0, 0].bitwise_xor_(1 << 22),
    "an out= argument": lambda w: torch.mul(w, 1.5, out=w),
    "_foreach_add_": lambda w: torch._foreach_add_([w], [_same(w)]),
    "_foreach_mul_": lambda w: torch._foreach_mul_([w], 0.7),
    "_foreach_copy_": lambda w: torch._foreach_copy_([w], [_same(w)]),
    "_foreach_lerp_": lambda w: torch._foreach_lerp_([w], [_same(w)], 0.5),
    "init": lambda w: nn.init.xavier_uniform_(w, gain=1.7),
}


def _numpy(linear: nn.Linear) -> Any:
    return linear.weight.detach().numpy()


def _optimized(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Way:
    def step(linear: nn.Linear) -> None:
        optimizer = make([linear.weight])

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = linear(torch.randn(4, linear.in_features)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # pyright: ignore
        linear.weight.grad = None

    return step


def _fused(name: str, states: int, more: dict[str, Any]) -> Way:
    def step(linear: nn.Linear) -> None:
        w = linear.weight
        lists = [[torch.zeros_like(w)] for _ in range(states)]
        with torch.no_grad():
            getattr(torch, name)([w], [torch.ones_like(w)], *lists, **more)

    return step


_ADAM: Final[dict[str, Any]] = {
    "max_exp_avg_sqs": [], "state_steps": [torch.tensor(1.0)], "lr": 0.1, "beta1": 0.9, "beta2": 0.99,
    "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False,
}  # fmt: skip
_SGD: Final[dict[str, Any]] = {
    "weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False,
    "is_first_step": True,
}  # fmt: skip


def _new_parameter(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(_same(linear.weight))


def _new_data(linear: nn.Linear) -> None:
    linear.weight.data = _same(linear.weight)


def _by_hand(linear: nn.Linear) -> None:
    loss = linear(torch.randn(4, linear.in_features)).square().sum()
    (gradient,) = torch.autograd.grad(loss, [linear.weight])
    linear.weight.data -= 0.1 * gradient


def _hidden(linear: nn.Linear) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(linear.weight):
        linear.weight.mul_(1.5)


def _in_inference_mode(linear: nn.Linear) -> None:
    with torch.inference_mode():
        linear.weight.data.mul_(1.5)


def _memmove(linear: nn.Linear) -> None:
    new = _same(linear.weight).contiguous()
    ctypes.memmove(linear.weight.data_ptr(), new.data_ptr(), new.nbytes)


def _through_memory(linear: nn.Linear) -> None:
    kept = (ctypes.c_char * linear.weight.nbytes).from_address(linear.weight.data_ptr())
    torch.frombuffer(kept, dtype=torch.float32).mul_(0.5)


def _shared(linear: nn.Linear) -> None:
    linear.share_memory()
    linear.weight.data.mul_(1.5)


def _doubled(module: nn.Module) -> None:
    module.get_parameter("weight").data.mul_(2.0)


def _averaged(linear: nn.Linear) -> None:
    average = torch.optim.swa_utils.AveragedModel(linear)
    average.module.get_parameter("weight").data.mul_(1.5)
    for own, other in zip(linear.parameters(), average.module.parameters(), strict=True):
        own.data.copy_(other.data)


WAYS: Final[dict[str, Way]] = {
    **{f"{name} through .data": lambda m, f=f: f(m.weight.data) for name, f in _IN_PLACE.items()},
    **{f"{name} of the detached": lambda m, f=f: f(m.weight.detach()) for name, f in _IN_PLACE.items()},
    "numpy, *=": lambda m: numpy.multiply(_numpy(m), 1.5, out=_numpy(m)),
    "numpy, copyto": lambda m: numpy.copyto(_numpy(m), _same(m.weight).numpy()),
    "numpy, an element": lambda m: _set(_numpy(m), (1, 1), 3.0),
    "numpy, sort": lambda m: _numpy(m).sort(axis=0),
    "dlpack": lambda m: torch.from_dlpack(m.weight.detach()).mul_(1.5),
    "storage, fill_": lambda m: cast(Any, m.weight.untyped_storage()).fill_(57),
    "storage, copy_": lambda m: m.weight.untyped_storage().copy_(_same(m.weight).untyped_storage()),
    "storage, an element": lambda m: _set(m.weight.untyped_storage(), 3, 64),
    "memmove": _memmove,
    "from_address": _through_memory,
    "a version that is kept": _hidden,
    "inference mode": _in_inference_mode,
    "shared memory": _shared,
    "a hand-written update": _by_hand,
    "apply": lambda m: m.apply(_doubled),
    "an average's numbers": _averaged,
    "_fused_adamw_": _fused("_fused_adamw_", 2, _ADAM),
    "_fused_adam_": _fused("_fused_adam_", 2, _ADAM),
    "_fused_sgd_": _fused("_fused_sgd_", 1, _SGD),
    "SGD": _optimized(lambda p: torch.optim.SGD(p, lr=0.05)),
    "SGD, fused": _optimized(lambda p: torch.optim.SGD(p, lr=0.05, fused=True)),
    "AdamW": _optimized(lambda p: torch.optim.AdamW(p, lr=0.05)),
    "AdamW, fused": _optimized(lambda p: torch.optim.AdamW(p, lr=0.05, fused=True)),
    "Adagrad": _optimized(lambda p: torch.optim.Adagrad(p, lr=0.05)),
    "LBFGS": _optimized(lambda p: torch.optim.LBFGS(p, lr=0.05, max_iter=2)),
    "load_state_dict": lambda m: m.load_state_dict({"weight": _same(m.weight)}),
    "load_state_dict, assigned": lambda m: m.load_state_dict({"weight": nn.Parameter(_same(m.weight))}, assign=True),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(_same(m.weight).reshape(-1), m.parameters()),
    "other data": _new_data,
    "set_": lambda m: torch.no_grad()(cast(Any, m.weight).set_)(_same(m.weight)),
    "another parameter": _new_parameter,
    "reset_parameters": lambda m: m.reset_parameters(),
}
