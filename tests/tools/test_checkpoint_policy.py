"""Policy.from_checkpoint: the layers that a checkpoint quantizes, in its recipe, and no other."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8graph
from fp8graph import (
    Backend,
    CheckpointError,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Policy,
    Rule,
)
from fp8graph.checkpoints import Checkpoint
from fp8graph.checkpoints.checkpoint import parsed
from fp8graph.cli import main
from fp8graph.recipes.policy import policy_toml
from fp8graph.tools.checkpoint_policy import _expressions
from handed_over import differences
from helpers import Checkpointed, in_one_test, same_bits
from ranks import run_ranks
from tiny_models import model_and_inputs

ROWWISE = Float8RowwiseScaling(power_2_scale=False, amax_epsilon=0.0)
BLOCKWISE = Float8BlockScaling(power_2_scale=False)
ROUTER_AND_HEAD = [Rule("*.mlp.gate", None, optional=True), Rule("lm_head", None)]


def recipes_of(report: Any) -> dict[str, set[str | None]]:
    found: dict[str, set[str | None]] = {}
    for gemm in report.gemms:
        if gemm.gemm == "fprop" and gemm.op != "matmul":
            found.setdefault(gemm.fqn, set()).add(gemm.recipe)
    return found


def logits(model: Any, inputs: Mapping[str, Any], policy: Any) -> Any:
    fp8graph.compile(model, policy=policy, compiler="eager")
    with torch.no_grad():
        return model(input_ids=inputs["input_ids"], use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("llama", [Rule("*.v_proj", None), Rule("*.mlp.*", "mxfp8"), Rule("*.self_attn.*", ROWWISE)]),
        pytest.param("qwen3", [Rule("model.layers.0.*", None), Rule("model.*", BLOCKWISE)], marks=pytest.mark.release),
        ("mixtral", [*ROUTER_AND_HEAD, Rule("*.experts", "mxfp8", op="grouped_mm"), Rule("*", ROWWISE)]),
        pytest.param(
            "qwen3_moe",
            [*ROUTER_AND_HEAD, Rule("*.experts", None, op="grouped_mm"), Rule("*", "mxfp8")],
            marks=pytest.mark.release,
        ),
        ("deepseek_v3", [*ROUTER_AND_HEAD, Rule("*.kv_*", ROWWISE), Rule("*", "mxfp8")]),
    ],
)
def test_export_gives_back_the_policy_that_it_was_trained_under(
    family: str, policy: list[Rule], tmp_path: Path
) -> None:
    model, inputs = model_and_inputs(family)
    default = "mxfp8" if family == "deepseek_v3" else None  # its experts
    trained = Policy(policy, default=default, min_speedup=0)
    fp8graph.compile(model, policy=trained, compiler="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**inputs, use_cache=False).loss.backward()
    optimizer.step()
    fresh = type(model)(model.config).bfloat16()
    fresh.load_state_dict(model.state_dict())

    expected = logits(model, inputs, trained)
    fp8graph.export(model, tmp_path / "tuned-FP8")
    found = Policy.from_checkpoint(tmp_path / "tuned-FP8")
    assert same_bits([logits(fresh, inputs, found)], [expected])
    report = fp8graph.backend_of(fresh).report
    report.check()
    assert recipes_of(report) == recipes_of(fp8graph.backend_of(model).report)
    for fqn in recipes_of(report):
        op = "grouped_mm" if fqn.endswith("experts") else "linear"
        assert found.resolve(fqn, op).recipes == trained.resolve(fqn, op).recipes
    assert all("tuned-FP8" in row.reason for row in report.gemms if row.op != "matmul")

    (tmp_path / "policy.toml").write_text(policy_toml(found))
    (tmp_path / "policy.json").write_text(json.dumps(found.to_dict()))
    assert [Policy.load(tmp_path / f"policy.{kind}").identity() for kind in ("toml", "json")] == 2 * [found.identity()]
    assert Policy.coerce(str(tmp_path / "tuned-FP8")) == found


@pytest.mark.slow
def test_checkpoint_is_a_policy_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, inputs = model_and_inputs("llama", layers=1)
    logits(model, inputs, Policy([Rule("*.v_proj", None)], default="mxfp8"))
    folder = str(fp8graph.export(model, tmp_path / "tuned-FP8"))
    assert main(["explain", folder, "--policy", folder, "--inference", "--table"]) == 0
    assert "tuned-FP8 has it in high precision" in capsys.readouterr().out


def group(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, *targets: str) -> dict[str, Any]:
    arguments = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "weights": {**arguments, "dynamic": False, **weights},
        "input_activations": None if inputs is None else {**arguments, "dynamic": True, **inputs},
        "output_activations": None,
        "targets": list(targets or ("Linear",)),
    }


def compressed_tensors(*groups: dict[str, Any], ignore: list[str] | None = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "float-quantized",
        "config_groups": {f"group_{i}": one for i, one in enumerate(groups)},
        "ignore": ["lm_head"] if ignore is None else ignore,
    }


# config.json of deepseek-ai/DeepSeek-V3
DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
# config.json of Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8, cut to the first layer of 62
QWEN3 = {
    **DEEPSEEK,
    "modules_to_not_convert": [
        "lm_head",
        "model.layers.0.input_layernorm",
        "model.layers.0.mlp.gate",
        "model.layers.0.post_attention_layernorm",
    ],
}
# config.json of RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic: weights per channel, inputs per token
LLAMA = compressed_tensors(group({"strategy": "channel"}, {"strategy": "token"}))
# llm-compressor's FP8_BLOCK of Qwen3-30B-A3B, vllm-project/llm-compressor issue 1758, and the routers that it ignores
QWEN3_BLOCK = compressed_tensors(
    group(
        {"strategy": "block", "block_structure": [128, 128]},
        {"strategy": "group", "group_size": 128},
    ),
    ignore=["lm_head", "re:.*mlp.gate$"],
)
# the example in vLLM's and TensorRT-LLM's reader of hf_quant_config.json (nvidia/Llama-3.1-8B-Instruct-FP8 is like it)
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.19.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
Q, GATE, EXPERTS = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate", "model.layers.0.mlp.experts"


@in_one_test(
    ("config", "recipe"),
    [
        ({"quantization_config": DEEPSEEK, "_name_or_path": "DeepSeek-V3"}, BLOCKWISE),
        (DEEPSEEK, BLOCKWISE),
        ({**DEEPSEEK, "scale_fmt": "ue8m0"}, Float8BlockScaling(scale_format="ue8m0")),
        (QWEN3, BLOCKWISE),
        (LLAMA, ROWWISE),
        (QWEN3_BLOCK, BLOCKWISE),
    ],
    ids=["DeepSeek-V3", "its table alone", "DeepSeek-V3.1", "Qwen3-FP8", "Llama-3.1-FP8", "Qwen3-FP8-BLOCK"],
)
def test_public_configs_quantize_all_but_heads_and_routers(config: dict[str, Any], recipe: Any) -> None:
    policy = Policy.from_checkpoint(config)
    assert policy.min_speedup == 0
    for layer, op in ((Q, "linear"), (EXPERTS, "grouped_mm"), ("model.layers.0.mlp.gate_proj", "linear")):
        assert set(policy.resolve(layer, op).recipes.values()) == {recipe}
    for layer in ("lm_head", GATE):
        found = policy.resolve(layer, "linear")
        assert set(found.recipes.values()) == {None}
        assert found.source.startswith("rule ")
    assert not any(policy.resolve(GATE, "matmul").recipes.values())
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))).identity() == policy.identity()


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "fp8graph.Policy.from_checkpoint(config)",
        "import_module('fp8graph.recipes.policy').Policy.from_checkpoint(config)",
        "import_module('fp8graph.backend.backend').Backend(config).policy",
    ],
)
def test_a_checkpoint_is_a_policy_whatever_was_imported(policy: str) -> None:
    """Of an installed package, too: it loads its public names when the first is asked for."""
    script = f"""
import sys
from importlib import import_module, metadata
find, metadata.distribution = metadata.distribution, lambda name: name
import fp8graph
metadata.distribution = find
assert not {{"torch", "fp8graph.face"}} & sys.modules.keys()
config = {DEEPSEEK}
policy = {policy}
assert ("fp8graph.face" in sys.modules) == {policy.startswith("fp8graph.")}
print(policy.default)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == f"{Policy.from_checkpoint(DEEPSEEK).default}\n", done.stderr[-3000:]


def test_static_scales_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="the config: FP8 has static scales of inputs, which no recipe takes"):
        Policy.from_checkpoint(MODELOPT)
    policy = Policy.from_checkpoint(MODELOPT, recipes={"FP8": "delayed"})
    assert policy.resolve(Q, "linear").recipes["fprop"] == DelayedScaling()
    assert policy.resolve("lm_head", "linear").recipes["fprop"] is None


TENSOR = {"strategy": "tensor"}


@in_one_test(
    ("config", "message"),
    [
        (compressed_tensors(group(TENSOR, None)), "FP8_A16 quantizes weights alone"),
        (compressed_tensors(group(TENSOR, {**TENSOR, "dynamic": False})), "FP8 has static scales of inputs"),
        (
            compressed_tensors(group(TENSOR, {"strategy": "token"})),
            "FP8 has one scale for weights and a scale per row for inputs, which no recipe has together",
        ),
        (
            compressed_tensors(group({"strategy": "group", "group_size": 64}, {"strategy": "group", "group_size": 32})),
            "FP8_GROUP_64 has 1x64 scales for weights and 1x32 scales for inputs",
        ),
        ({**DEEPSEEK, "weight_block_size": None}, r"recipes=\{'dynamic tensor': 'tensorwise'\}"),
        ({**DEEPSEEK, "expert_dtype": "fp4"}, "fp4 1x32 has 4-bit numbers in tiles of 1x32, which no recipe makes"),
        ({"quant_method": "torchao", "quant_type": {}}, "quant_method is 'torchao'. Known: fp8"),
        ({"model_type": "llama"}, "there is neither a quantization_config nor a quant_method"),
        (
            compressed_tensors(group(TENSOR, TENSOR), ignore=["re:(((a*b?)*c?)*d?)*"]),
            r"the config: the expression '.*' takes 9e\+07 steps to match 256 characters, and 100000 are made: no",
        ),
        (DEEPSEEK["fmt"], "e4m3: there is no such file"),
        (None, "folder_or_config must be an FP8 checkpoint"),
    ],
)
def test_forms_and_configs_that_are_not_exact_are_refused(config: Any, message: str) -> None:
    with pytest.raises((CheckpointError, fp8graph.ConfigError), match=message):
        Policy.from_checkpoint(config)


@in_one_test("text", [".?" * 40 + "!", r"(?:\w|.)" * 39 + "!", "(.+)+!", ".{0,40}" * 20 + "!", ".*a" * 9])
def test_an_expression_of_a_config_cannot_hang(text: str) -> None:
    """Python's re tries 2**31 ways or more."""
    name, started = "layers.0.self_attn.q_projection_layer.a", time.process_time()
    ignored = compressed_tensors(group(TENSOR, TENSOR), ignore=[f"re:{text}"])
    for config in (DEEPSEEK | {"modules_to_not_convert": [text]}, ignored):
        policy = Policy.from_checkpoint(config)
        assert policy.resolve(name, "linear").recipes["fprop"] is not None
        copied = pickle.loads(pickle.dumps(policy))
        assert copied.resolve(name, "linear").recipes["fprop"] is not None
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("one", "recipe"),
    [
        (group(TENSOR, TENSOR), Float8CurrentScaling()),
        (
            group({"strategy": "group", "group_size": 64}, {"strategy": "group", "group_size": 64}),
            Float8BlockScaling(power_2_scale=False, w_block=(1, 64), x_block=(1, 64), grad_block=(1, 1)),
        ),
        (
            group(
                {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
                {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            ),
            MXFP8BlockScaling(),
        ),
    ],
)
def test_forms_of_groups_are_recipes(one: dict[str, Any], recipe: Any) -> None:
    found = Policy.from_checkpoint(compressed_tensors(one)).resolve(Q, "linear").recipes["fprop"]
    assert found == recipe


def test_groups_decide_by_name_then_expression_then_class() -> None:
    config = compressed_tensors(
        group({"strategy": "channel"}, {"strategy": "token"}, "Linear"),
        group(TENSOR, TENSOR, "re:.*mlp.*"),
        group(
            {"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}, f"{GATE}_x"
        ),
        ignore=["re:.*down_proj"],
    )
    policy = Policy.from_checkpoint(config)
    names = {
        "model.layers.0.mlp.down_proj": None,
        "model.layers.0.mlp.up_proj": Float8CurrentScaling(),
        f"{GATE}_x": BLOCKWISE,
        Q: ROWWISE,
    }
    assert {name: policy.resolve(name, "linear").recipes["fprop"] for name in names} == names


NAMES = [
    *(f"model.layers.{i}.{leaf}" for i in (0, 1, 11) for leaf in ("self_attn.q_proj", "mlp.gate", "mlp.gate_proj")),
    *("lm_head", "model.lm_head", "model.layers.1.mlp.experts.0.up_proj", "model.layers.1.mlp.shared_experts.up_proj"),
    *("visual.blocks.0.attn.qkv", "model.layers.1", "xlm_head", "model.layers.1.mlp.experts.gate_up_proj"),
]
MIXED: dict[str, Any] = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"model.layers.1": {"quant_algo": "MXFP8"}},
}
SELECTED = {
    **{f"fp8 {name}": {**DEEPSEEK, "modules_to_not_convert": [name]} for name in ("lm_head", "mlp.gate", "layers.1")},
    "fp8 expressions": {**DEEPSEEK, "modules_to_not_convert": ["model.layers.1", "visual|.*gate", r".*\.\d\.mlp"]},
    "fp8 embeddings": {**DEEPSEEK, "modules_to_convert": ["mlp.gate", "qkv"], "modules_to_not_convert": ["lm_head"]},
    "fp8 four bits": {**DEEPSEEK, "expert_dtype": "fp4"},
    "compressed-tensors": LLAMA,
    "compressed-tensors groups": compressed_tensors(
        group(TENSOR, TENSOR, r"re:.*self_attn", "lm_head"),
        group({"strategy": "channel"}, {"strategy": "token"}, "re:.*(gate|up)_proj$", Q),
        ignore=["re:visual.*", "model.layers.11.self_attn.q_proj", "re:.*gate$"],
    ),
    "compressed-tensors none": compressed_tensors(group(TENSOR, TENSOR), ignore=["Linear"]),
    "modelopt": MODELOPT,
    "modelopt patterns": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["*.mlp.gate", "model.layers.1", "visual*", "lm_head", "model.layers.1[12]*"],
    },
    "modelopt mixed": {
        "quant_method": "modelopt",
        **MIXED,
        "quantized_layers": {
            **MIXED["quantized_layers"],
            "model.layers.1.mlp.experts": {"quant_algo": "FP8"},
            Q: {"quant_algo": "FP8"},
        },
    },
}


@in_one_test("config", SELECTED.values(), ids=SELECTED)
def test_selections_say_of_each_name_what_the_config_says(config: dict[str, Any]) -> None:
    quantization = parsed(config, "here")
    selections = list(quantization.selections())
    for name in NAMES:
        formats = quantization.layer_formats(name)
        found = next((stored for text, stored in selections if re.fullmatch(text, name)), None)
        assert (found is None, getattr(found, "scheme", None)) == (
            not formats,
            formats[0].scheme if formats else None,
        ), name


def test_expressions_match_their_names_alone() -> None:
    everything = [f"m.{i}.experts.{e}.{leaf}" for i in (0, 1, 2, 10) for e in (0, 1, 7) for leaf in ("up", "up.x")]
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        chosen = {name for name in everything if torch.rand((), generator=generator) < 0.6} | {"m.0a.up"}
        texts = list(_expressions(sorted(chosen)))
        matched = {name for name in [*everything, "m.0a.up", "m.0b.up"] if any(re.fullmatch(t, name) for t in texts)}
        assert matched == chosen
    assert list(_expressions(f"m.{i}.experts.{e}.up" for i in (0, 3) for e in (0, 1))) == [
        r"m\.(?:0|3)\.experts\.(?:0|1)\.up"
    ]


def gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def exported(folder: Path) -> Path:
    """A checkpoint of a model that transformers does not know, whose second layer is in high precision."""
    net = Net().bfloat16()
    fp8graph.compile(net, policy=Policy([Rule("layers.1", None)], default="mxfp8"), compiler="eager")
    net(X)
    return fp8graph.export(net, folder / "net")


@pytest.mark.parametrize("how", ["plain", "checkpointed", pytest.param("generated", marks=pytest.mark.release)])
def test_fresh_model_under_the_policy_of_an_export_gives_its_bits(how: str, tmp_path: Path) -> None:
    def compiled(net: Net, policy: Any) -> Any:
        run: Any = Checkpointed(net) if how == "checkpointed" else net
        return fp8graph.compile(run, policy=policy, compiler="inductor" if how == "generated" else "eager")

    net = Net().bfloat16()
    rules = [Rule("*layers.0", ROWWISE), Rule("*layers.1", None)]
    trained = compiled(net, Policy(rules, default="mxfp8", min_speedup=0))
    trained(X).square().mean().backward()
    with torch.no_grad():
        net.layers[1].get_parameter("weight").add_(0.25)
    fresh = Net().bfloat16()
    fresh.load_state_dict(net.state_dict())
    run = compiled(fresh, fp8graph.export(trained, tmp_path / "net"))
    y, expected = run(X), trained(X)
    assert same_bits([y], [expected])
    y.square().mean().backward()
    net.zero_grad()
    expected.square().mean().backward()
    for one, other in zip(fresh.parameters(), net.parameters(), strict=True):
        assert torch.equal(gradient(one), gradient(other))
    report = fp8graph.backend_of(run).report
    report.check()
    recipes = {name.rpartition(".")[2]: recipe for name, recipe in recipes_of(report).items()}
    assert recipes == {"0": {"rowwise"}, "1": {None}, "2": {"mxfp8"}}


def on_ranks(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model under FSDP2 and the policy of ``folder``."""
    net: Any = fully_shard(Net().bfloat16())
    fp8graph.compile(net, policy=Policy.from_checkpoint(folder), compiler="eager")
    net(X).square().mean().backward()
    fp8graph.backend_of(net).report.check()
    return dict(fp8graph.quantized_state(net))


@pytest.mark.slow
def test_two_ranks_under_the_policy_of_a_folder_hand_over_its_bytes(tmp_path: Path) -> None:
    shards = Checkpoint(exported(tmp_path)).shards
    expected = {name: shards.tensor(name) for name in shards}
    (tmp_path / "ranks").mkdir()
    for found in run_ranks(on_ranks, 2, tmp_path / "ranks", tmp_path / "net"):
        assert differences(found, expected) == []


def test_files_win_over_the_config_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = exported(tmp_path)
    found = Policy.from_checkpoint(folder)
    assert caplog.messages == []
    assert [str(rule) for rule in found.rules] == [
        r"/layers\.(?:0|2)/ (net stores it as MXFP8) -> mxfp8",
        '"*" (net has it in high precision) -> high precision',
        '"*" (op grouped_mm, net has it in high precision) -> high precision',
    ]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["layers.0"]
    (folder / "config.json").write_text(json.dumps(config))
    assert Policy.from_checkpoint(folder) == found
    assert caplog.messages == [
        f"{folder}: layer 'layers.0' is F8_E4M3 in its files, and the config leaves it in high precision: the files "
        "decide.",
        f"{folder}: layer 'layers.1' is BF16 in its files, and the config quantizes it: the files decide.",
    ]


def test_layer_whose_form_no_config_says_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["re:layers.*"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"layer 'layers.0' is F8_E4M3 in its files, .* its form is not known"):
        Policy.from_checkpoint(folder)


def test_experts_in_several_forms_are_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    names = {f"layers.{i}.": f"layers.0.mlp.experts.{i}.up_proj." for i in range(3)}
    tensors = load_file(folder / "model.safetensors")
    for old, new in names.items():
        tensors = {name.replace(old, new) if name.startswith(old) else name: x for name, x in tensors.items()}
    assert set(Checkpoint(folder).layers) == {"layers.0", "layers.2"}
    save_file({name: x for name, x in tensors.items() if ".experts.1." not in name}, folder / "model.safetensors")
    assert Policy.from_checkpoint(folder).resolve("layers.0.mlp.experts", "grouped_mm").recipes["fprop"] is not None
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    other = group({"strategy": "channel"}, {"strategy": "token"}, "re:.*experts.2.*")
    config["config_groups"]["group_9"] = other
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError, match="the layers of 'layers.0.mlp.experts' are quantized in several ways"):
        Policy.from_checkpoint(folder)


def test_checkpoints_are_policies_by_name(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    expected = Policy.from_checkpoint(folder)
    for given in (folder, str(folder)):
        assert Backend(given).policy == expected
    of_config = Policy.from_checkpoint(folder / "config.json")
    config = json.loads((folder / "config.json").read_text())
    for given in (str(folder / "config.json"), config, config["quantization_config"]):
        assert Backend(given).policy.resolve("layers.0", "linear") == of_config.resolve("layers.0", "linear")
        assert Policy.coerce(given).resolve("layers.1", "linear").recipes["fprop"] is None
    net = Net().bfloat16()
    compiled = torch.compile(net, backend="fp8graph", options={"policy": str(folder), "compiler": "eager"})
    compiled(X)
    report = fp8graph.backend_of(compiled).report
    report.check()
    assert recipes_of(report) == {"layers.0": {"mxfp8"}, "layers.1": {None}, "layers.2": {"mxfp8"}}
    assert {row.reason for row in report.gemms if row.recipe is None} >= {
        'rule "*" (net has it in high precision) -> high precision'
    }


def test_policy_called_config_json_stays_a_policy(tmp_path: Path) -> None:
    policy = Policy([Rule("a", None)])
    (tmp_path / "config.json").write_text(json.dumps(policy.to_dict()))
    assert Policy.coerce(tmp_path / "config.json") == policy
