"""Dynamo's names of values: the root variable, and the path under it."""

from __future__ import annotations

from fp8graph.ir.naming import split_source
from helpers import in_one_test


def test_module_paths_of_all_kinds() -> None:
    assert split_source("L['self'].model.layers.0.mlp") == ("self", "model.layers.0.mlp")
    assert split_source("L['self']") == ("self", "")
    assert split_source("L['fn'].__self__.layers.0") == ("fn", "layers.0")
    assert split_source("L['fn'].__self__._modules['0']._parameters['w']") == ("fn", "0.w")
    assert split_source("L['model']._modules['layers']._modules['0']._parameters['w']") == ("model", "layers.0.w")
    assert split_source("L['self'].__dict__['_modules']['a'].b.__dict__['_parameters']['w']") == ("self", "a.b.w")
    assert split_source("G['net'].head") == ("net", "head")
    assert split_source("L['args'][0]._modules['b']._parameters['w']") == ("args.0", "b.w")
    assert split_source("L['args'][0]") == ("args.0", "")
    assert split_source("L['kwargs']['model'].b.0") == ("kwargs.model", "b.0")
    assert split_source("L['models'][1]['left'].b") == ("models.1.left", "b")
    assert split_source("getattr(L['m'].m.layers, '0')") == ("m", "m.layers.0")
    assert split_source("getattr(getattr(G['net'].layers, '1'), 'a-b').up") == ("net", "layers.1.a-b.up")
    assert split_source("model.layers.0") == ("", "model.layers.0")


def test_a_replaced_forward_is_left_out() -> None:
    """A closure that calls the method it took the place of, once or twice, in the model or compiled alone."""
    inner = "forward.__closure__[0].cell_contents.__self__"
    assert split_source(f"L['self']._modules['a'].{inner}._modules['b']._parameters['w']") == ("self", "a.b.w")
    twice = "L['call'].__closure__[0].cell_contents.__closure__[1].cell_contents.__self__.up"
    assert split_source(twice) == ("call", "up")
    assert split_source("L['self'].forward.head") == ("self", "forward.head")


@in_one_test(
    "name",
    ["x'y", 'x"y', "x'\"y", "a['t']b", 'a["t"]b', "a[0]b", "a b", "q$r", "a[", "a]", "b\\s", "n\0m", "u\u2028v", "é"],
)
def test_names_are_read_as_python_writes_them(name: str) -> None:
    """Dynamo writes ``repr`` of a name, and in module stacks leaves the quotes out where that seems unambiguous."""
    stack = f"._modules[{name!r}]" if set(name) & set("'\"]") else f".{repr(name)[1:-1]}"
    assert split_source(f"L['self']._modules['layers']._modules[{name!r}]._parameters['w']") == (
        "self",
        f"layers.{name}.w",
    )
    assert split_source(f"L['self'].layers{stack}.up") == ("self", f"layers.{name}.up")
    assert split_source(f"getattr(L['self'].layers, {name!r}).up") == ("self", f"layers.{name}.up")
    assert split_source(f"L['models'][{name!r}].up") == (f"models.{name}", "up")
    assert split_source(f"layers.{name}") == ("", f"layers.{name}")
