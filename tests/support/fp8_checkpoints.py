"""Tiny checkpoints in FP8 and FP4, each written by the library that owns its format.

    FORMATS["hf-float"].write(folder)  # as the hub has it: config.json and model.safetensors
    load(folder)  # as its library loads it

The model is always the same Llama: 2 layers, hidden 256, random weights with outliers from a fixed seed. What a folder
must hold is data, in FORMATS. A library that is not installed skips the test that asks for it.
"""

import copy
import importlib
import json
import tempfile
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

E4M3, E8M0, U8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8
F32, BF16 = torch.float32, torch.bfloat16

CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=512,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],  # ModelOpt reads it
    dtype=torch.bfloat16,
)
# of one layer, [N, K]
LINEARS = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (512, 256),
    "mlp.up_proj": (512, 256),
    "mlp.down_proj": (256, 512),
}
IDS = torch.arange(32).reshape(2, 16)  # calibration


def model() -> LlamaForCausalLM:
    """In bf16, before any library has quantized it; every weight has a few outliers, which need scales of their own"""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        llama: Any = LlamaForCausalLM(copy.deepcopy(CONFIG))  # libraries write into it
        llama.to(torch.bfloat16)
        with torch.no_grad():
            for weight in llama.parameters():
                if weight.ndim == 2:
                    weight.view(-1)[torch.randint(weight.numel(), (8,))] *= 20
    return llama.eval()


@contextmanager
def any_device() -> Generator[None]:
    """Lifts two checks that keep a machine without a GPU from writing and loading FP8. Nothing is multiplied there."""
    with pytest.MonkeyPatch.context() as patch:
        # transformers refuses to quantize, and loads what is quantized as bf16
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        try:
            import torchao.quantization.quant_api as api  # pyright: ignore[reportMissingImports]
        except ImportError:
            pass
        else:
            patch.setattr(api, "_check_hardware_support", lambda _: None)
        yield


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model as its library loads it, frozen: FP8 parameters ask for gradients after from_pretrained.
    ModelOpt's folders are for engines: transformers loads their codes as bf16 numbers, without their scales."""
    with any_device():
        return LlamaForCausalLM.from_pretrained(folder, dtype=dtype).requires_grad_(False)


def decoded_by_its_library(name: str, tensors: Mapping[str, torch.Tensor], folder: Path) -> torch.Tensor:
    """The weight of one layer, from its tensors by their own names; ``name``: of a row of FORMATS."""
    if name.startswith("hf"):
        return Fp8Dequantize(None)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], torch.float32)
    if name.startswith("compressed"):
        quantization = importlib.import_module("compressed_tensors.quantization")
        compressors = importlib.import_module("compressed_tensors.compressors")
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        scheme = quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]
        compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
        return compressor.decompress(tensors, scheme)["weight"]
    qtensor = importlib.import_module("modelopt.torch.quantization.qtensor")
    data, scale = tensors["weight"], tensors["weight_scale"]
    if name == "modelopt-nvfp4":
        shape = torch.Size([data.shape[0], 2 * data.shape[1]])
        packed = qtensor.NVFP4QTensor(shape, torch.float32, data)
        return packed.dequantize(scale=scale, double_scale=tensors["weight_scale_2"], block_sizes={-1: 16})
    if name == "modelopt-mxfp8":
        return qtensor.MXFP8QTensor(data.shape, torch.float32, data).dequantize(scale=scale)
    blocks = {-1: 128, -2: 128} if name == "modelopt-fp8-block" else None
    scale = scale[:, 0, :, 0] if blocks else scale[:, None] if scale.ndim else scale
    return qtensor.FP8QTensor(data.shape, torch.float32, data).dequantize(scale=scale, block_sizes=blocks)


Shape = Callable[[int, int], tuple[int, ...]]  # of a linear's N and K


@dataclass(frozen=True, kw_only=True)
class Format:
    """The tensors that `write` stores for every linear, and the least that it puts into quantization_config."""

    write: Callable[[Path], None]
    tensors: Mapping[str, tuple[torch.dtype, Shape]]
    config: Mapping[str, Any]
    loads: bool = True  # by its own library, on a CPU
    files: Mapping[str, Any] = field(default_factory=dict[str, Any])  # other JSON files: at least this


# transformers


def _quantized_while_loading(folder: Path, config: Any) -> None:
    with tempfile.TemporaryDirectory() as source, any_device():
        model().save_pretrained(source)
        llama = LlamaForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16)
        llama.save_pretrained(folder)


def _hf(*, activation_scale: float | None = None, **options: Any) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        _quantized_while_loading(folder, FineGrainedFP8Config(**options))
        if activation_scale is not None:  # transformers does not calibrate: it writes memory as it was
            file = folder / "model.safetensors"
            tensors = load_file(file)
            one = torch.tensor(activation_scale)
            save_file({k: one.clone() if k.endswith(".activation_scale") else x for k, x in tensors.items()}, file)

    return written


# torchao


def _torchao(module: str, name: str, granularity: str | None = None) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        make = getattr(pytest.importorskip(module, reason="torchao is not installed: pip install torchao"), name)
        options: dict[str, Any] = {}
        if granularity:
            options["granularity"] = getattr(pytest.importorskip("torchao.quantization"), granularity)()
        _quantized_while_loading(folder, TorchAoConfig(make(**options)))

    return written


# compressed-tensors: it has no observers (llm-compressor has), so scales are calculated here, by its own function


def _compressed_tensors(preset: str) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        missing = "compressed-tensors is not installed: pip install compressed-tensors"
        quantization = pytest.importorskip("compressed_tensors.quantization", reason=missing)
        utils = pytest.importorskip("compressed_tensors.quantization.utils")
        compressors = pytest.importorskip("compressed_tensors.compressors")
        llama = model()
        amax = _amax_of_inputs(llama)
        scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
        config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
        quantization.apply_quantization_config(llama, config)
        for name, linear in llama.named_modules():
            if isinstance(linear, torch.nn.Linear) and hasattr(linear, "quantization_scheme"):
                _calibrate(linear, amax[name], utils)
        compressor = compressors.ModelCompressor.from_pretrained_model(llama)
        compressor.compress_model(llama)
        llama.save_pretrained(folder)
        compressor.update_config(folder)

    return written


@torch.no_grad()
def _calibrate(linear: Any, inputs: torch.Tensor, utils: Any) -> None:
    args, input_args = linear.quantization_scheme.weights, linear.quantization_scheme.input_activations
    (n, k), weight = linear.weight.shape, linear.weight.abs()
    total = weight.amax().reshape(1)
    if args.block_structure:
        rows, columns = args.block_structure
        amax = weight.reshape(n // rows, rows, k // columns, columns).amax((1, 3))
    elif args.group_size:
        amax = weight.reshape(n, k // args.group_size, args.group_size).amax(-1)
    else:
        amax = weight.amax(1, keepdim=True) if args.strategy == "channel" else total
    scale = None
    if hasattr(linear, "weight_global_scale"):
        scale = utils.generate_gparam(-total, total)
        linear.weight_global_scale.copy_(scale)
        linear.input_global_scale.copy_(utils.generate_gparam(-inputs, inputs))
    elif hasattr(linear, "input_scale"):
        linear.input_scale.copy_(utils.calculate_qparams(-inputs, inputs, input_args)[0])
    linear.weight_scale.copy_(utils.calculate_qparams(-amax, amax, args, global_scale=scale)[0])


@torch.no_grad()
def _amax_of_inputs(llama: Any) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}

    def look(name: str) -> Callable[[Any, tuple[torch.Tensor]], None]:
        return lambda _, args: seen.update({name: args[0].abs().amax().reshape(1)})

    linears = [(name, linear) for name, linear in llama.named_modules() if isinstance(linear, torch.nn.Linear)]
    hooks = [linear.register_forward_pre_hook(look(name)) for name, linear in linears]
    llama(input_ids=IDS)
    for hook in hooks:
        hook.remove()
    return seen


# ModelOpt


def _modelopt(config: str) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        missing = "ModelOpt is not installed: pip install nvidia-modelopt requests"
        mtq = pytest.importorskip("modelopt.torch.quantization", reason=missing)
        export = pytest.importorskip("modelopt.torch.export")
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch.tensor() of a tensor, in its own code
            quantized = mtq.quantize(model(), copy.deepcopy(getattr(mtq, config)), lambda llama: llama(input_ids=IDS))
            export.export_hf_checkpoint(quantized, export_dir=folder)

    return written


def _whole(n: int, k: int) -> tuple[int, ...]:
    return n, k


def _packed(n: int, k: int) -> tuple[int, ...]:
    return n, k // 2  # two codes per byte, the low half first


def _tiles(n: int, k: int) -> tuple[int, ...]:
    return n // 128, k // 128


def _columns(width: int) -> Shape:
    return lambda n, k: (n, k // width)


def _swizzled(width: int) -> Shape:  # [N, K/width] in tiles of 128 x 4, each kept as 32 rows of 16
    return lambda n, k: (n // 128 * 32, k // width // 4 * 16)


def _fixed(*shape: int) -> Shape:
    return lambda n, k: shape


def _hf_config(**changed: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "scale_fmt": "float",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": None,
    } | changed


def _ao_config(name: str, version: int = 1) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_version": version}}}


def _ct_config(format: str, weights: dict[str, Any], activations: dict[str, Any]) -> dict[str, Any]:
    group = {"format": format, "targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _modelopt_config(algorithm: str) -> dict[str, Any]:
    return {
        "config": {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "model.embed_tokens"]},
        "files": {
            "hf_quant_config.json": {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head", "model.embed_tokens"]},
            }
        },
        "loads": False,
    }


_AO, _AO_MX = "torchao.quantization", "torchao.prototype.mx_formats.inference_workflow"
_AO_DYNAMIC = "Float8DynamicActivationFloat8WeightConfig"

FORMATS: dict[str, Format] = {
    "hf-float": Format(
        write=_hf(),
        tensors={"weight": (E4M3, _whole), "weight_scale_inv": (F32, _tiles)},
        config=_hf_config(),
    ),
    "hf-ue8m0": Format(
        write=_hf(scale_fmt="ue8m0"),
        tensors={"weight": (E4M3, _whole), "weight_scale_inv": (E8M0, _tiles)},
        config=_hf_config(scale_fmt="ue8m0"),
    ),
    "hf-static": Format(
        write=_hf(activation_scheme="static", activation_scale=0.05),
        tensors={"weight": (E4M3, _whole), "weight_scale_inv": (F32, _tiles), "activation_scale": (F32, _fixed())},
        config=_hf_config(activation_scheme="static"),
    ),
    "hf-tensor": Format(  # transformers 5.23 writes scales of [1, 1] and expects [] when it loads them
        write=_hf(weight_block_size=None),
        tensors={"weight": (E4M3, _whole), "weight_scale_inv": (F32, _fixed(1, 1))},
        config=_hf_config(weight_block_size=None),
        loads=False,
    ),
    "hf-mxfp8": Format(
        write=_hf(weight_block_size=(1, 32), scale_fmt="ue8m0", quant_method="mxfp8"),
        tensors={"weight": (E4M3, _whole), "weight_scale_inv": (E8M0, _columns(32))},
        config=_hf_config(weight_block_size=[1, 32], scale_fmt="ue8m0", quant_method="mxfp8"),
    ),
    "torchao-rowwise": Format(
        write=_torchao(_AO, _AO_DYNAMIC, "PerRow"),
        tensors={"_weight_qdata": (E4M3, _whole), "_weight_scale": (F32, lambda n, k: (n, 1))},
        config=_ao_config(_AO_DYNAMIC, 2),
    ),
    "torchao-tensorwise": Format(
        write=_torchao(_AO, _AO_DYNAMIC, "PerTensor"),
        tensors={"_weight_qdata": (E4M3, _whole), "_weight_scale": (F32, _fixed(1, 1))},
        config=_ao_config(_AO_DYNAMIC, 2),
    ),
    "torchao-weight-only": Format(
        write=_torchao(_AO, "Float8WeightOnlyConfig"),
        tensors={"_weight_qdata": (E4M3, _whole), "_weight_scale": (F32, lambda n, k: (n, 1))},
        config=_ao_config("Float8WeightOnlyConfig", 2),
    ),
    "torchao-mxfp8": Format(
        write=_torchao(_AO_MX, "MXDynamicActivationMXWeightConfig"),
        tensors={"_weight_qdata": (E4M3, _whole), "_weight_scale": (E8M0, _swizzled(32))},
        config=_ao_config("MXDynamicActivationMXWeightConfig"),
    ),
    "torchao-nvfp4-weight-only": Format(
        write=_torchao(_AO_MX, "NVFP4WeightOnlyConfig"),
        tensors={
            "_weight_qdata": (U8, _packed),
            "_weight_scale": (E4M3, _swizzled(16)),
            "_weight_per_tensor_scale": (F32, _fixed()),
        },
        config=_ao_config("NVFP4WeightOnlyConfig"),
    ),
    # scales are in the model's dtype
    "compressed-tensors-fp8": Format(
        write=_compressed_tensors("FP8"),
        tensors={"weight": (E4M3, _whole), "weight_scale": (BF16, _fixed(1)), "input_scale": (BF16, _fixed(1))},
        config=_ct_config(
            "float-quantized", {"strategy": "tensor", "dynamic": False}, {"strategy": "tensor", "dynamic": False}
        ),
    ),
    "compressed-tensors-fp8-dynamic": Format(
        write=_compressed_tensors("FP8_DYNAMIC"),
        tensors={"weight": (E4M3, _whole), "weight_scale": (BF16, lambda n, k: (n, 1))},
        config=_ct_config("float-quantized", {"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
    ),
    "compressed-tensors-fp8-block": Format(
        write=_compressed_tensors("FP8_BLOCK"),
        tensors={"weight": (E4M3, _whole), "weight_scale": (BF16, _tiles)},
        config=_ct_config(
            "float-quantized",
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
    ),
    "compressed-tensors-mxfp8": Format(
        write=_compressed_tensors("MXFP8"),
        tensors={"weight": (E4M3, _whole), "weight_scale": (U8, _columns(32))},
        config=_ct_config(
            "mxfp8-quantized",
            {"strategy": "group", "group_size": 32},
            {"strategy": "group", "group_size": 32, "dynamic": True},
        ),
    ),
    "compressed-tensors-nvfp4": Format(  # global scales divide: 448 * 6 / amax
        write=_compressed_tensors("NVFP4"),
        tensors={
            "weight_packed": (U8, _packed),
            "weight_scale": (E4M3, _columns(16)),
            "weight_global_scale": (F32, _fixed(1)),
            "input_global_scale": (F32, _fixed(1)),
        },
        config=_ct_config(
            "nvfp4-pack-quantized",
            {"strategy": "tensor_group", "group_size": 16, "num_bits": 4},
            {"strategy": "tensor_group", "group_size": 16, "num_bits": 4, "dynamic": "local"},
        ),
    ),
    "modelopt-fp8": Format(
        write=_modelopt("FP8_DEFAULT_CFG"),
        tensors={"weight": (E4M3, _whole), "weight_scale": (F32, _fixed()), "input_scale": (F32, _fixed())},
        **_modelopt_config("FP8"),
    ),
    "modelopt-fp8-channel": Format(
        write=_modelopt("FP8_PER_CHANNEL_PER_TOKEN_CFG"),
        tensors={"weight": (E4M3, _whole), "weight_scale": (F32, lambda n, k: (n,))},
        **_modelopt_config("FP8_PER_CHANNEL_PER_TOKEN"),
    ),
    "modelopt-fp8-block": Format(  # weights only
        write=_modelopt("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
        tensors={"weight": (E4M3, _whole), "weight_scale": (F32, lambda n, k: (n // 128, 1, k // 128, 1))},
        **_modelopt_config("fp8_pb_wo"),
    ),
    "modelopt-nvfp4": Format(  # weight_scale_2 multiplies: amax / (448 * 6)
        write=_modelopt("NVFP4_DEFAULT_CFG"),
        tensors={
            "weight": (U8, _packed),
            "weight_scale": (E4M3, _columns(16)),
            "weight_scale_2": (F32, _fixed()),
            "input_scale": (F32, _fixed()),
        },
        **_modelopt_config("NVFP4"),
    ),
    "modelopt-mxfp8": Format(
        write=_modelopt("MXFP8_DEFAULT_CFG"),
        tensors={"weight": (E4M3, _whole), "weight_scale": (U8, _columns(32))},
        **_modelopt_config("MXFP8"),
    ),
}
