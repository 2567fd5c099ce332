"""Adapters of PEFT on linears in FP8: merged into the base's format, taken out to the bit, exported, swapped."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import fp8graph
from fp8_checkpoints import CONFIG, FORMATS, IDS, decoded_by_its_library, load
from fp8graph.checkpoints import Checkpoint
from fp8graph.libraries.stored_linear import StoredLinear, StoredWeight
from fp8graph.numerics import sqnr_db
from fp8graph.numerics.requantize import requantize
from helpers import Checkpointed, bits, first_fast, first_slow, in_one_test, same_bits

peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")

E4M3 = torch.float8_e4m3fn
TARGETS = ["q_proj", "down_proj"]
N, K = 160, 384  # 1.25 tiles of 128 rows


def base(kind: str = "block", n: int = N, k: int = K, bias: bool = False) -> StoredLinear:
    random = torch.Generator().manual_seed(n + k)
    data = (torch.randn(n, k, generator=random) * 100).clamp(-448, 448).to(E4M3)
    shape, block = {
        "tensor": ((), []),
        "row": ((n, 1), []),
        "block": ((-(-n // 128), k // 128), [128, 128]),
        "block_e8m0": ((-(-n // 128), k // 128), [128, 128]),
        "mxfp8": ((n, k // 32), [1, 32]),
    }[kind]
    scale = torch.rand(shape, generator=random) / 1000 + 0.001
    if kind in ("block_e8m0", "mxfp8"):
        scale = torch.randint(116, 119, shape, dtype=torch.uint8, generator=random)
    stored = StoredWeight(data=data, scale_inv=scale, scaling=kind, block=block)
    return StoredLinear(stored, nn.Parameter(torch.randn(n, generator=random)) if bias else None)


def adapted(*layers: nn.Module, names: tuple[str, ...] = ("default",), **settings: Any) -> Any:
    """Layer 0 has adapters, others have none."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*layers)
    given = {"r": 4, "target_modules": ["0"], "init_lora_weights": False, **settings}
    model = peft.get_peft_model(model, peft.LoraConfig(**given), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, peft.LoraConfig(**given))
    for name, parameter in model.named_parameters():
        if ".lora_" in name and "magnitude" not in name:
            parameter.data.normal_(std=0.1)
    return fp8graph.adopt(model)


def lora(model: Any) -> Any:
    return model.base_model.model[0]


def tensors(module: nn.Module) -> list[Tensor]:
    return [bits(x.detach()).clone() for x in (*module.parameters(recurse=False), *module.buffers(recurse=False))]


def scales64(scale: Tensor) -> Tensor:
    exact = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
    return 2.0 ** (exact.double() - 127) if exact.dtype == torch.uint8 else exact.double()


def numbers(data: Tensor, scale: Tensor) -> Tensor:
    """float64, from the shapes alone."""
    (n, k), exact = data.shape, scales64(scale)
    exact = exact.reshape(1, 1) if exact.numel() == 1 else exact.reshape(exact.shape[0], -1)
    rows = n if len(exact) == 1 else 1 if len(exact) == n else 128
    columns = next(c for c in (32, 128, k) if -(-k // c) == exact.shape[1])
    return data.double() * exact.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def delta(layer: Any, name: str = "default") -> Tensor:
    a, b = layer.lora_A[name].weight.detach().double(), layer.lora_B[name].weight.detach().double()
    return b @ a * layer.scaling[name]


KINDS = ["block", "tensor", "row", "block_e8m0", "mxfp8"]


@in_one_test("kind", KINDS)
def test_sum_is_quantized_once_in_the_form_of_the_base(kind: str) -> None:
    model = adapted(base(kind), base(kind, n=K, k=N) if kind in ("tensor", "row") else nn.Linear(N, 8))
    layer, other = lora(model), model.base_model.model[1]
    stored, untouched = layer.base_layer, tensors(other)
    old = stored.weight_scale_inv.clone()
    expected = numbers(stored.weight.detach(), old) + delta(layer)
    model.merge_adapter()
    scale = stored.weight_scale_inv
    assert (stored.weight.dtype, scale.dtype, scale.shape) == (E4M3, old.dtype, old.shape)
    each = numbers(torch.ones(expected.shape), scale)
    rounded = (expected / each).float().clamp(-448, 448).to(E4M3)  # the oracle: float64, and the scales as stored
    assert (rounded.float() != stored.weight.float()).double().mean() < 1e-3  # ties that FP32 decides otherwise
    assert sqnr_db(expected, numbers(stored.weight.detach(), scale)) > 31  # what three bits of mantissa allow
    largest = (expected.abs() / each).max()
    assert 440 < largest < 448.001 if old.dtype != torch.uint8 else 224 < largest <= 448
    assert same_bits(tensors(other), untouched)


@in_one_test("kind", KINDS)
def test_unmerge_restores_every_byte(kind: str) -> None:
    model = adapted(base(kind, bias=True), names=("one", "two"), lora_bias=True)
    before = tensors(lora(model).base_layer)
    for _ in range(2):
        model.merge_adapter(["one"])
        assert not same_bits(tensors(lora(model).base_layer), before)
        model.merge_adapter(["two"])
        assert lora(model).merged_adapters == ["one", "two"]
        model.unmerge_adapter()
        assert same_bits(tensors(lora(model).base_layer), before)
        assert not lora(model).merged
    with pytest.warns(UserWarning, match="Already unmerged"):
        model.unmerge_adapter()


def test_adapters_merged_in_turn_are_quantized_once() -> None:
    at_once, in_turn = (adapted(base(), names=("one", "two")) for _ in range(2))
    expected = numbers(lora(at_once).base_layer.weight.detach(), lora(at_once).base_layer.weight_scale_inv)
    expected = expected + delta(lora(at_once), "one") + delta(lora(at_once), "two")
    at_once.merge_adapter(["one", "two"])
    in_turn.merge_adapter(["one"])
    in_turn.merge_adapter(["two"])
    assert lora(in_turn).merged_adapters == ["one", "two"]
    merged = lora(at_once).base_layer
    assert sqnr_db(expected, numbers(merged.weight.detach(), merged.weight_scale_inv)) > 31
    assert same_bits(tensors(lora(in_turn).base_layer), tensors(merged))
    with pytest.warns(UserWarning, match="All adapters are already merged"):
        in_turn.merge_adapter(["one"])


def test_scales_that_are_powers_of_two_stay_so() -> None:  # DeepSeek-V3.1: in FP32
    weight = torch.randn(N, K)
    for old in (torch.full((2, 3), 0.25), torch.full((2, 3), 0.25, dtype=torch.bfloat16)):
        _, scale = requantize(weight, old, (128, 128), E4M3)
        assert scale.dtype == old.dtype
        assert (torch.frexp(scale.float()).mantissa == 0.5).all()
    _, scale = requantize(weight, torch.full((2, 3), 0.3), (128, 128), E4M3)
    assert (torch.frexp(scale).mantissa != 0.5).any()


def test_tiles_without_a_scale_of_their_own_keep_theirs() -> None:
    weight = torch.zeros(2, 64)
    weight[1, 0] = torch.nan
    data, scale = requantize(weight, torch.tensor([[0.25, 0.5], [1.0, 2.0]]), (1, 32), E4M3)
    assert scale.tolist() == [[0.25, 0.5], [1.0, 2.0]]
    assert data.isnan().sum() == 1


def test_adapter_of_zeros_changes_no_byte() -> None:
    model = adapted(base())
    lora(model).lora_B["default"].weight.data.zero_()
    before = tensors(lora(model).base_layer)
    model.merge_adapter()
    assert same_bits(tensors(lora(model).base_layer), before)


def test_merge_that_fails_changes_nothing() -> None:
    model = adapted(base(), names=("one", "two"))
    model.merge_adapter(["one"])
    before = tensors(lora(model).base_layer)
    lora(model).lora_A["two"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="The adapter two seems to be broken"):
        model.merge_adapter(["two"], safe_merge=True)
    assert lora(model).merged_adapters == ["one"]
    assert type(lora(model).base_layer) is StoredLinear
    assert same_bits(tensors(lora(model).base_layer), before)


@pytest.mark.parametrize("method", ["LoKrConfig", "IA3Config"])
def test_other_methods_of_peft(method: str) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"target_modules": ["0"], "init_weights": False}
    if method == "IA3Config":
        settings = {"target_modules": ["0"], "feedforward_modules": [], "init_ia3_weights": False}
    layer = base(bias=True)
    model = fp8graph.adopt(peft.get_peft_model(cast_any(nn.Sequential(layer)), getattr(peft, method)(**settings)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.normal_(mean="ia3" in name, std=0.1)
    before, x = tensors(layer), torch.randn(8, K)
    expected = model(x).detach()
    model.merge_adapter()
    assert sqnr_db(expected, model(x)) > 28
    model.unmerge_adapter()
    assert same_bits(tensors(layer), before)


def cast_any(x: Any) -> Any:
    return x


def test_copies_merge_their_own_base() -> None:
    model = adapted(base())
    other = copy.deepcopy(model)
    before = tensors(lora(model).base_layer)
    other.merge_adapter()
    assert same_bits(tensors(lora(model).base_layer), before)
    assert not same_bits(tensors(lora(other).base_layer), before)


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@first_fast("copied", [saved_and_loaded, copy.deepcopy])
@first_fast("merged", [False, True])
def test_copy_of_a_compiled_model_merges_into_its_own_base(copied: Callable[[Any], Any], merged: bool) -> None:
    model: Any = fp8graph.compile(adapted(base()), compiler="eager")
    before, x = tensors(lora(model).base_layer), torch.randn(16, K)
    if merged:
        model.merge_adapter()
    after = tensors(lora(model).base_layer)
    other = copied(model)
    assert torch.equal(other(x), model(x))
    if not merged:
        other.merge_adapter()
        assert not same_bits(tensors(lora(other).base_layer), before)
    other.unmerge_adapter()
    assert same_bits(tensors(lora(other).base_layer), before)
    assert same_bits(tensors(lora(model).base_layer), after)


def _answer(model: Any, x: Tensor, file: str) -> None:
    model.merge_adapter()
    torch.save(model(x).detach(), file)


@pytest.mark.slow
def test_model_is_sent_to_a_process_that_is_spawned(tmp_path: Path) -> None:
    model, x = fp8graph.compile(adapted(base()), compiler="eager"), torch.randn(16, K)
    merged: Any = copy.deepcopy(model)  # the memory of the other is shared with the process
    merged.merge_adapter()
    process = torch.multiprocessing.get_context("spawn").Process(target=_answer, args=(model, x, str(tmp_path / "y")))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    assert torch.equal(torch.load(tmp_path / "y"), merged(x))


def test_compiled_by_name_is_adopted_in_the_first_call() -> None:
    model = peft.get_peft_model(cast_any(nn.Sequential(base())), peft.LoraConfig(r=4, target_modules=["0"]))
    assert "merge" not in lora(model).__dict__
    compiled: Any = torch.compile(model, backend=fp8graph.Backend(compiler="eager"))
    compiled(torch.randn(16, K))
    lora(model).lora_B["default"].weight.data.normal_()
    before = tensors(lora(model).base_layer)
    model.merge_adapter()
    assert not same_bits(tensors(lora(model).base_layer), before)


def test_fp4_is_refused() -> None:
    stored = StoredWeight(
        data=torch.zeros(N, K // 2, dtype=torch.uint8),
        scale_inv=torch.ones(N, K // 16).to(E4M3),
        scaling="nvfp4",
        block=[1, 16],
        global_scale_inv=torch.ones(()),
    )
    with pytest.raises(fp8graph.ConfigError, match=r"its weight is in FP4 \(nvfp4\)"):
        adapted(StoredLinear(stored)).merge_adapter()


def test_sums_of_fp8_numbers_are_still_missing() -> None:
    """As long as it raises, PEFT merges nothing into FP8 by itself; nor makes DoRA, for which it adds to the weight."""
    with pytest.raises(RuntimeError, match="Promotion for Float8 Types is not supported"):
        torch.ones(2).to(E4M3).add_(torch.ones(2))
    with pytest.raises(RuntimeError, match="Promotion for Float8 Types|not implemented for 'Float8_e4m3fn'"):
        adapted(base(), use_dora=True)


def test_merges_whose_names_were_seen_compile_nothing() -> None:
    layers = base(n=128, k=256), base(n=256, k=128)
    model = adapted(*layers, names=("one", "two"))
    fp8graph.compile(model.eval(), compiler="eager", cache_weights=True)
    x = torch.randn(16, 256, dtype=torch.bfloat16)

    @torch.no_grad()
    def expected(*names: str) -> Tensor:
        copied = copy.deepcopy(model.base_model)  # not compiled
        copied.merge_adapter([*names])
        return fp8graph.compile(copied.eval(), compiler="eager")(x)

    one, two, both = expected("one"), expected("two"), expected("one", "two")

    def swap(*names: str) -> Tensor:
        if lora(model).merged:
            model.unmerge_adapter()
        model.merge_adapter([*names])
        return model(x)

    with torch.no_grad():
        for names in (["one"], ["two"], ["one", "two"]):  # Dynamo guards on the names of what is merged
            swap(*names)
        with torch.compiler.set_stance("fail_on_recompile"):
            for names, result in ((["two"], two), (["one"], one), (["one", "two"], both), (["one"], one)):
                assert torch.equal(swap(*names), result)
    assert not torch.equal(one, two)


def test_adapters_that_have_run_are_switched_without_compiling() -> None:
    def outputs(model: Any, *names: str) -> list[Tensor]:
        found = list[Tensor]()
        for name in names:
            model.set_adapter(name)
            found.append(model(x))
        return found

    made = [adapted(base(n=128, k=256), base(n=256, k=128), names=("one", "two")).eval() for _ in range(3)]
    x = torch.randn(16, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        (model, first, second) = (fp8graph.compile(one, compiler="eager", cache_weights=True) for one in made)
        one, two = outputs(model, "one", "two")
        with torch.compiler.set_stance("fail_on_recompile"):
            assert same_bits(outputs(model, "one", "two", "one"), [one, two, one])
        assert not torch.equal(one, two)
        assert same_bits([one, two], [*outputs(first, "one"), *outputs(second, "two")])


def trained_layers(kind: str, how: str = "plain") -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses and gradients of two steps of two adapted linears, and their bytes after the merge.

    ``how``: "plain", "checkpointed", or "generated". In FP32, as in bf16 generated code skips roundings.
    """
    torch._dynamo.reset()
    layers = base(kind, n=128, k=256), nn.GELU(), base(kind, n=256, k=128)
    model = adapted(*layers, target_modules=["0", "2"])
    run: Any = Checkpointed(model) if how == "checkpointed" else model
    fp8graph.compile(run, compiler="inductor" if how == "generated" else "eager")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    losses, gradients = list[float](), list[Tensor]()
    for _ in range(2):
        loss = run(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        gradients += [p.grad.clone() for p in trained if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    assert len(gradients) == 2 * len(trained)
    assert losses[1] < losses[0]
    merged = model.merge_and_unload()
    return losses, gradients, [*tensors(merged[0]), *tensors(merged[2])]


@first_fast("kind", KINDS)
def test_checkpointing_changes_no_number(kind: str) -> None:
    losses, gradients, merged = trained_layers(kind)
    again, their_gradients, their_merged = trained_layers(kind, "checkpointed")
    assert again == losses
    assert same_bits(their_gradients, gradients)
    assert same_bits(their_merged, merged)


@first_slow("kind", KINDS)
def test_generated_code_trains_as_eager(kind: str) -> None:
    """Products are added in another order, and a few numbers are rounded to another code."""
    losses, gradients, merged = trained_layers(kind)
    found, their_gradients, their_merged = trained_layers(kind, "generated")
    assert found == pytest.approx(losses, rel=1e-6)
    assert min(map(sqnr_db, gradients, their_gradients)) > 70
    for one, other in zip(merged[::2], their_merged[::2], strict=True):  # the codes
        assert (one != other).double().mean() < 1e-3


@pytest.mark.parametrize(
    ("kind", "method", "scheme"),
    [
        ("block", "fp8", "dynamic 128x128"),
        ("block_e8m0", "fp8", "dynamic 128x128 ue8m0"),
        ("row", "compressed-tensors", "FP8_DYNAMIC"),
        ("mxfp8", "compressed-tensors", "MXFP8"),
    ],
)
def test_merged_model_is_exported_as_it_is_stored(kind: str, method: str, scheme: str, tmp_path: Path) -> None:
    merged = adapted(base(kind, n=128, bias=True), base(kind, n=256, k=128)).merge_and_unload()
    fp8graph.compile(merged, compiler="eager")
    with torch.no_grad():
        merged(torch.randn(16, K, dtype=torch.bfloat16))
    checkpoint = Checkpoint(fp8graph.export(merged, tmp_path / "out"))
    checkpoint.check()
    assert (checkpoint.quantization.method, {one.scheme for one in checkpoint.layers.values()}) == (method, {scheme})
    for layer, module in (("0", merged[0]), ("1", merged[1])):
        stored = checkpoint.weight(layer)
        assert same_bits([stored.data], [module.weight.detach()])
        assert torch.equal(
            scales64(stored.scale_inv), scales64(module.weight_scale_inv).reshape(stored.scale_inv.shape)
        )
    assert [*checkpoint.others] == ["0.bias"]
    assert dict(fp8graph.quantized_state(merged)).keys() == set(checkpoint.shards)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"activations": "none"}, "its checkpoint quantizes weights only"),
        ({"activations": "static", "input_scale_inv": torch.ones(())}, "its input has a static scale, and its weight"),
    ],
)
def test_export_refuses_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    layer = base(n=128)
    for name, value in changed.items():
        setattr(layer, name, value)
    model = nn.Sequential(layer, nn.Linear(128, 128, dtype=torch.bfloat16))
    fp8graph.compile(model, compiler="eager", recipe="blockwise")
    model(torch.randn(16, K, dtype=torch.bfloat16))
    with pytest.raises(fp8graph.ConfigError, match=f"^0 cannot be exported as it is stored: {message}"):
        fp8graph.export(model, tmp_path / "out")


# whole models, as libraries load them


def in_bf16() -> Any:
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), dtype=torch.bfloat16).eval()


def loaded(name: str, folder: Path) -> Any:
    FORMATS[name].write(folder)
    if not name.startswith("modelopt"):
        return load(folder)
    return fp8graph.load_checkpoint(in_bf16(), folder)


def with_lora(model: Any, seed: int = 0) -> Any:
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.02)
    return model


def bytes_of(model: Any) -> dict[str, list[Tensor]]:
    """The tensors of each linear, those that torchao wraps too."""
    found = dict[str, list[Tensor]]()
    for name, module in model.named_modules():
        if name.endswith("_proj") or name.endswith("_proj.base_layer"):
            held = [x for x in (*module.parameters(recurse=False), *module.buffers(recurse=False))]
            held = [part for x in held for part in ((x.qdata, x.scale) if hasattr(x, "qdata") else (x,))]
            leaf = name.removesuffix(".base_layer").removeprefix("base_model.model.")
            if found.get(leaf) or held:
                found[leaf] = [bits(x.detach()).clone() for x in held]
    return found


@first_slow(
    ("name", "method"),
    [
        ("hf-float", "fp8"),
        ("hf-ue8m0", "fp8"),
        ("compressed-tensors-fp8", "compressed-tensors"),
        ("compressed-tensors-fp8-dynamic", "compressed-tensors"),
        ("compressed-tensors-fp8-block", "compressed-tensors"),
        ("compressed-tensors-mxfp8", "compressed-tensors"),
        ("modelopt-fp8", "modelopt"),
        ("modelopt-fp8-channel", "modelopt"),
        ("modelopt-mxfp8", "modelopt"),
        ("torchao-rowwise", "compressed-tensors"),
        ("torchao-tensorwise", "fp8"),
        ("torchao-mxfp8", "compressed-tensors"),
    ],
)
def test_merged_exported_and_loaded(name: str, method: str, tmp_path: Path) -> None:
    model = fp8graph.adopt(with_lora(loaded(name, tmp_path)))
    before = bytes_of(model)
    compiled = fp8graph.compile(model, compiler="eager")
    with torch.no_grad():
        unmerged = compiled(input_ids=IDS).logits
    merged = model.merge_and_unload()
    after = bytes_of(merged)
    assert before.keys() == after.keys()
    for layer, held in before.items():
        assert same_bits(held, after[layer]) == (layer.rpartition(".")[2] not in TARGETS), layer
        assert [(x.dtype, x.shape) for x in held] == [(x.dtype, x.shape) for x in after[layer]]

    fp8graph.compile(merged, compiler="eager")
    with torch.no_grad():
        logits = merged(input_ids=IDS).logits
    assert sqnr_db(unmerged, logits) > 20  # of a random model, whose every linear quantizes its input
    checkpoint = Checkpoint(fp8graph.export(merged, tmp_path / "out", method))
    checkpoint.check()
    checkpoint.check_scales()
    assert checkpoint.quantization.method == method
    assert len(checkpoint.layers) == 14
    again = fp8graph.load_checkpoint(in_bf16(), tmp_path / "out")
    fp8graph.compile(again, compiler="eager")
    with torch.no_grad():
        loaded_again = again(input_ids=IDS).logits
    if name == "torchao-tensorwise":  # with one scale, transformers' kernels quantize tokens, and torchao the input;
        # dequantized, they are the same: test_export_of_a_trained_model_has_its_numbers
        assert sqnr_db(logits, loaded_again) > 20
    else:
        assert torch.equal(loaded_again, logits)
    if name == "hf-float":
        theirs: Any = load(tmp_path / "out")
        kinds = {type(module).__name__ for name, module in theirs.named_modules() if name.endswith("_proj")}
        assert kinds == {"FP8Linear"}
        assert bytes_of(theirs).keys() == after.keys()
        assert all(same_bits(held, after[layer]) for layer, held in bytes_of(theirs).items())
        assert transformers.AutoConfig.from_pretrained(tmp_path / "out").quantization_config["quant_method"] == "fp8"


def trained(name: str, folder: Path, how: str = "plain") -> tuple[Any, list[float]]:
    """A model with adapters after two steps, and their losses."""
    model = with_lora(loaded(name, folder)).train()
    if how == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    fp8graph.compile(model, compiler="inductor" if how == "generated" else "eager")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = list[float]()
    for _ in range(2):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def decoded(model: Any) -> dict[str, Tensor]:
    """Each weight in FP8 by its layer, in float64, from its bytes and its scales as they are stored."""
    found = dict[str, Tensor]()
    for layer, module in model.named_modules():
        holder = module.weight if hasattr(getattr(module, "weight", None), "qdata") else module
        names = ("weight_scale_inv", "weight_scale", "scale")
        scale = next((getattr(holder, name) for name in names if hasattr(holder, name)), None)
        if scale is not None:
            data = holder.qdata if holder is not module else module.weight
            found[layer] = numbers(data.detach(), scale.detach())
    return found


@torch.no_grad()
def dequantized(model: Any) -> Tensor:
    """The logits of ``model`` in bf16, with each weight decoded in float64."""
    wide, weights = in_bf16(), decoded(model)
    state = wide.state_dict()
    for layer, module in model.named_modules():
        if f"{layer}.weight" in state:
            state[f"{layer}.weight"].copy_(weights.get(layer, getattr(module, "weight", None)))
    return wide(input_ids=IDS, use_cache=False).logits


@torch.no_grad()
def logits_of_its_library(folder: Path, method: str) -> Tensor:
    """In bf16, without quantized inputs: as transformers loads it on a CPU."""
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if method == "compressed-tensors":
        model(input_ids=IDS)  # its hook decompresses the weights
        model.apply(pytest.importorskip("compressed_tensors.quantization").disable_quantization)
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize(
    ("name", "written", "how"),
    [
        pytest.param("hf-float", "hf-float", "checkpointed", marks=pytest.mark.slow),
        pytest.param("hf-float", "hf-float", "generated", marks=pytest.mark.release),
        pytest.param("hf-ue8m0", "hf-ue8m0", "plain", marks=pytest.mark.release),
        pytest.param(*2 * ["compressed-tensors-fp8-dynamic"], "plain", marks=pytest.mark.slow),
        pytest.param(*2 * ["compressed-tensors-fp8-block"], "plain", marks=pytest.mark.release),
        pytest.param("modelopt-fp8", "modelopt-fp8", "plain", marks=pytest.mark.slow),
        pytest.param("modelopt-fp8-channel", "modelopt-fp8-channel", "plain", marks=pytest.mark.release),
        pytest.param("torchao-rowwise", "compressed-tensors-fp8-dynamic", "plain", marks=pytest.mark.release),
        pytest.param("torchao-tensorwise", "hf-tensor", "plain", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # users' name
def test_export_of_a_trained_model_has_its_numbers(name: str, written: str, how: str, tmp_path: Path) -> None:
    """Train, merge, export: the library that owns the format decodes each weight to the merged numbers, and
    transformers computes the logits of the merged model, dequantized, from what it loads."""
    model, losses = trained(name, tmp_path / "base", how)
    if how != "plain":
        expected = trained(name, tmp_path / "plain")[1]
        assert losses == (expected if how == "checkpointed" else pytest.approx(expected, rel=1e-2))
    merged = fp8graph.compile(model.merge_and_unload().eval(), compiler="eager")
    with torch.no_grad():
        merged(input_ids=IDS, use_cache=False)
    method = FORMATS[written].config["quant_method"]
    fp8graph.export(merged, tmp_path / "out", "auto" if name.startswith("torchao") else method)
    file = load_file(tmp_path / "out" / "model.safetensors")
    weights = decoded(merged)
    assert len(weights) == 14
    for layer, exact in weights.items():
        own = {key.removeprefix(f"{layer}."): x for key, x in file.items() if key.startswith(f"{layer}.")}
        theirs = decoded_by_its_library(written, own, tmp_path / "out")
        assert torch.equal(theirs, exact.to(theirs.dtype)), layer
        if name.startswith("torchao"):
            weight: Any = merged.get_submodule(layer).weight
            assert torch.equal(weight.dequantize(torch.float32), exact.float()), layer
    if method != "modelopt":  # whose folders are for engines
        expected, found = dequantized(merged), logits_of_its_library(tmp_path / "out", method)
        if method == "compressed-tensors":  # it rounds scales to bf16
            assert sqnr_db(expected, found) > 40
        else:
            assert torch.equal(expected, found)


@first_slow("loads", [load, lambda folder: fp8graph.load_checkpoint(in_bf16(), folder)], ids=["theirs", "ours"])
def test_trainer_of_transformers(loads: Callable[[Path], Any], tmp_path: Path) -> None:
    FORMATS["hf-float"].write(tmp_path / "base")
    model = fp8graph.compile(with_lora(loads(tmp_path / "base")).train(), compiler="eager")
    settings: dict[str, Any] = {"max_steps": 3, "learning_rate": 1e-2, "per_device_train_batch_size": 2}
    settings |= {"use_cpu": True, "report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    data: Any = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), **settings)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses == sorted(losses, reverse=True)
    report = fp8graph.backend_of(model).report
    assert {gemm.recipe for gemm in report.gemms if gemm.fqn.endswith("base_layer")} == {"blockwise"}


@first_slow("name", ["hf-float", "modelopt-fp8", "compressed-tensors-fp8-dynamic", "torchao-rowwise"])
def test_hot_swap_compiles_nothing(name: str, tmp_path: Path) -> None:
    from peft.utils.hotswap import hotswap_adapter

    model = with_lora(loaded(name, tmp_path / "base"), seed=0)
    other = with_lora(loaded(name, tmp_path / "base"), seed=1)
    other.save_pretrained(tmp_path / "adapter")
    fp8graph.compile(model.eval(), compiler="eager", cache_weights=True)
    fp8graph.compile(other.eval(), compiler="eager", cache_weights=True)

    @torch.no_grad()
    def logits(run: Any) -> Tensor:
        return run(input_ids=IDS).logits

    first = logits(model)
    other.merge_adapter()
    second = logits(other)  # of the new adapter, merged
    model.merge_adapter()
    merged = logits(model)
    assert not torch.equal(first, merged)
    with torch.compiler.set_stance("fail_on_recompile"):
        model.unmerge_adapter()
        assert torch.equal(logits(model), first)
        hotswap_adapter(model, str(tmp_path / "adapter"), adapter_name="default")
        assert not torch.equal(logits(model), first)
        model.merge_adapter()
        assert torch.equal(logits(model), second)
        assert not torch.equal(second, merged)
