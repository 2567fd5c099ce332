"""The checkpoints that other tests load: what each library writes today, names, dtypes and config"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fp8_checkpoints import CONFIG, FORMATS, LINEARS, load, model
from helpers import in_one_test


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each folder is written once"""
    written: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in written:
            path = tmp_path_factory.mktemp(name)
            FORMATS[name].write(path)
            written[name] = path
        return written[name]

    return of


def _holds(whole: Any, part: Any) -> None:
    if isinstance(part, Mapping):
        for key, value in part.items():
            assert key in whole, key
            _holds(whole[key], value)
    else:
        assert whole == part


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


@pytest.mark.parametrize("name", FORMATS)
def test_each_linear_has_the_tensors_of_its_format(name: str, folder: Callable[[str], Path]):
    tensors, format = _tensors(folder(name)), FORMATS[name]
    found = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    for layer in range(CONFIG.num_hidden_layers):
        for linear, (n, k) in LINEARS.items():
            prefix = f"model.layers.{layer}.{linear}."
            expected = {prefix + suffix: (dtype, shape(n, k)) for suffix, (dtype, shape) in format.tensors.items()}
            assert {key: value for key, value in found.items() if key.startswith(prefix)} == expected
    others = {key for key in found if not any(f".{linear}." in key for linear in LINEARS)}
    assert {found[key][0] for key in others} == {torch.bfloat16}
    assert others == {key for key in model().state_dict() if not any(f".{linear}." in key for linear in LINEARS)}


@in_one_test("name", FORMATS)
def test_the_config_names_the_format(name: str, folder: Callable[[str], Path]):
    config = json.loads((folder(name) / "config.json").read_text())
    _holds(config["quantization_config"], FORMATS[name].config)
    for file, expected in FORMATS[name].files.items():
        _holds(json.loads((folder(name) / file).read_text()), expected)


@in_one_test("name", [name for name, format in FORMATS.items() if format.loads])
def test_its_library_loads_the_bytes_as_they_are(name: str, folder: Callable[[str], Path]):
    loaded = load(folder(name)).model.layers[0].mlp.down_proj
    file = _tensors(folder(name))
    for suffix in FORMATS[name].tensors:
        expected = file[f"model.layers.0.mlp.down_proj.{suffix}"]
        owner, attribute = (loaded.weight, suffix.removeprefix("_weight_")) if suffix[0] == "_" else (loaded, suffix)
        found = getattr(owner, attribute).detach()
        assert found.dtype == expected.dtype
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), suffix


@pytest.mark.parametrize("name", ["modelopt-fp8", "modelopt-fp8-channel"])
def test_transformers_loads_modelopts_codes_without_their_scales(name: str, folder: Callable[[str], Path]):
    weight = load(folder(name)).model.layers[0].mlp.down_proj.weight
    assert (weight.dtype, weight.abs().max().item()) == (torch.bfloat16, 448)
