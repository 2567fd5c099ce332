"""The libraries that people train and serve with, as they use them: Trainer, accelerate, PEFT, pipelines, DDP."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import fp8graph
from accelerate_on_ranks import forget_accelerators
from helpers import ALL, MLP, eager_backend, first_fast, first_slow, same_bits, step
from tiny_models import causal_lm

# transformers, of the names that PEFT and users still type
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")

LINEARS = 7  # of one Llama layer, its head aside
DATA = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(i, i + 16) % 64 + 3 for i in range(64))]


def llama() -> Any:
    torch.manual_seed(0)
    return causal_lm("Llama")(1)


def furthest(expected: list[float], got: list[float]) -> float:
    """The largest relative difference of two series of losses."""
    return max(abs(b / a - 1) for a, b in zip(expected, got, strict=True))


def trained_by_trainer(folder: Path, backend: fp8graph.Backend | None, **arguments: Any) -> tuple[Any, list[float]]:
    from transformers import Trainer, TrainingArguments

    torch._dynamo.reset()
    model = llama()
    if backend is not None:
        model.compile(backend=backend)
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "bf16": True, "use_cpu": True,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "learning_rate": 1e-3, "disable_tqdm": True,
    }  # fmt: skip
    trainer = Trainer(model=model, args=TrainingArguments(**settings, **arguments), train_dataset=DATA)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@first_slow(
    ("compiler", "arguments"),
    [
        pytest.param("eager", {"gradient_accumulation_steps": 2}, id="accumulation"),
        pytest.param("eager", {"gradient_checkpointing": True}, id="checkpointing"),
        pytest.param("inductor", {}, id="generated code"),
    ],
)
def test_trainer(compiler: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Master weights under autocast, fused AdamW (the default), a schedule, clipping."""
    reference, expected = trained_by_trainer(tmp_path, None, **arguments)
    backend = fp8graph.Backend(compiler=compiler, cache_weights="update")
    trainer, losses = trained_by_trainer(tmp_path, backend, **arguments)
    assert trainer.args.optim == "adamw_torch_fused"
    assert furthest(expected, losses) < 0.002
    assert losses[-1] < 0.95 * losses[0]
    assert backend.weights.quantized == LINEARS * 6  # once a step, accumulation or not
    assert len(backend.report.graphs) == 1
    assert sum(g.recipe is None for g in backend.report.gemms) == 3  # lm_head
    trainer.save_model(str(tmp_path / "saved"))
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == reference.model.state_dict().keys()
    evaluated = trainer.evaluate(DATA[:8])["eval_loss"]
    assert abs(evaluated / reference.evaluate(DATA[:8])["eval_loss"] - 1) < 0.002


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_trainer_started_by_torchrun(tmp_path: Path) -> None:
    """Two ranks: Trainer wraps the compiled model in DistributedDataParallel; delayed scaling reduces its amaxes."""
    root = Path(__file__).parents[2]
    folders = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + [str(root / "tests" / "support" / "trainer_on_ranks.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert first == second  # losses, report, scales: every rank says the same
    reference, found = first["bf16"], first["delayed"]
    assert (found["wrapped"], found["ranks"]) == ("DistributedDataParallel", 2)
    assert len(found["losses"]) == 4
    assert furthest(reference["losses"], found["losses"]) < 0.002
    assert found["losses"] != reference["losses"]
    assert found["losses"][-1] < 0.95 * found["losses"][0]
    names = [name for name, _ in llama().named_modules()]
    assert all(fqn in names for fqn, *_ in found["gemms"])  # no "module." in front
    assert {fqn for fqn, _, in_fp8 in found["gemms"] if not in_fp8} == {"lm_head"}
    assert len(found["gemms"]) == 3 * (LINEARS + 1)
    assert found["quantized"] == LINEARS * 4  # once a step
    assert len(found["state"]) == 1 + LINEARS * 3 * 2


def trained_by_accelerate(backend: fp8graph.Backend | None) -> list[float]:
    from accelerate import Accelerator

    torch._dynamo.reset()
    forget_accelerators()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = llama()
    if backend is not None:
        model.compile(backend=backend)  # before prepare(), which knows no backend of this name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(DATA[:4] * 8, batch_size=4)  # pyright: ignore[reportArgumentType]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert accelerator.unwrap_model(model).state_dict().keys() == llama().state_dict().keys()
    return losses


@pytest.mark.slow
def test_accelerate() -> None:
    expected = trained_by_accelerate(None)
    backend = eager_backend(None, cache_weights="update")
    losses = trained_by_accelerate(backend)
    assert furthest(expected, losses) < 0.002
    assert losses[-1] < 0.95 * losses[0]
    assert backend.weights.quantized == LINEARS * 4
    assert {g.dtypes[2] for g in backend.report.gemms if g.recipe} == {"bf16"}
    # mixed precision decorates forward: names begin in the model all the same
    assert {g.fqn for g in backend.report.gemms} <= {name for name, _ in llama().named_modules()}
    assert len(backend.report.graphs) == 1


def with_adapters(**settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "v_proj", "down_proj", "embed_tokens"]
    return get_peft_model(
        llama().bfloat16(), LoraConfig(r=8, target_modules=names, init_lora_weights=False, **settings)
    )


def trained_adapters(backend: fp8graph.Backend | None) -> tuple[Any, list[float]]:
    torch._dynamo.reset()
    model = with_adapters()
    if backend is not None:
        backend.bind(model)
        model.compile(backend=backend)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2, fused=True)
    losses: list[float] = []
    ids = torch.stack([entry["input_ids"] for entry in DATA[:4]])
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.slow
def test_lora() -> None:
    """Frozen weights in FP8, quantized once; adapters in high precision."""
    _, expected = trained_adapters(None)
    backend = eager_backend(None, cache_weights="update")
    model, losses = trained_adapters(backend)
    assert furthest(expected, losses) < 0.002
    assert losses[-1] < 0.98 * losses[0]
    names = dict(model.named_modules())
    (graph,) = backend.report.graphs
    assert all(g.fqn in names or g.fqn.endswith("lora_embedding_B") for g in graph.gemms)
    adapters = [g for g in graph.gemms if "lora_" in g.fqn]
    assert len({g.fqn for g in adapters}) == 3 * 2 + 1  # A and B of three layers, B of the embedding
    assert {(g.recipe, "lora_" in g.reason) for g in adapters} == {(None, True)}
    base = [g for g in graph.gemms if g.recipe]
    assert {g.gemm for g in base} == {"fprop", "dgrad"}  # no gradient of a frozen weight
    assert len(base) == 2 * LINEARS
    assert backend.weights.quantized == LINEARS  # once, in six steps
    assert [g.fqn for g in graph.gemms if g.recipe is None and g not in adapters] == ["base_model.model.lm_head"] * 2


@pytest.mark.slow
def test_frozen_weights_need_no_columnwise_copy_of_the_input() -> None:
    model = with_adapters()
    model.compile(backend=eager_backend(None, cache_weights="update"))
    ids = torch.stack([entry["input_ids"][:15] for entry in DATA[:4]])  # 60 rows: no weight has a multiple of that
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        model(input_ids=ids, labels=ids)
    elements = [t.numel() for t in saved if t.dtype == torch.float8_e4m3fn]
    assert len(elements) == LINEARS - 1  # the weights, for dgrad; those of gate and up are one
    assert all(n % 60 for n in elements)


@pytest.mark.slow
def test_merged_adapters_and_back() -> None:
    """PEFT merges through ``.data``; its lists show it."""
    model = with_adapters().eval()
    backend = eager_backend(None, cache_weights="update")
    model.compile(backend=backend)
    ids = DATA[0]["input_ids"][None]
    with torch.no_grad():
        apart = model(input_ids=ids).logits
        model.merge_adapter()
        merged = model(input_ids=ids).logits
        model.unmerge_adapter()
        again = model(input_ids=ids).logits
        with model.disable_adapter():
            without = model(input_ids=ids).logits
    sqnr = fp8graph.numerics.sqnr_db
    assert sqnr(apart, merged) > 18 > 10 > sqnr(apart, without)
    assert sqnr(apart, again) > 25


@pytest.fixture
def process_group() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@first_fast("order", ["compile inside", "compile in place inside", "compile outside"])
def test_ddp(order: str) -> None:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model, x = nn.Sequential(MLP(), MLP()), torch.randn(16, 32, requires_grad=True)
    expected = step(torch.compile(model, backend=eager_backend(ALL)), x, parameters=model.parameters())
    torch._dynamo.reset()
    backend = eager_backend(ALL, cache_weights="update")
    backend.bind(model)
    wrapped: Any
    if order == "compile inside":
        wrapped = DistributedDataParallel(torch.compile(model, backend=backend))  # pyright: ignore[reportArgumentType]
    elif order == "compile in place inside":
        model.compile(backend=backend)
        wrapped = DistributedDataParallel(model)
    else:
        wrapped = torch.compile(DistributedDataParallel(model), backend=backend)
    got = step(wrapped, x, parameters=model.parameters())
    assert same_bits(expected, got)
    names = {f"{i}.{name}" for i in range(2) for name in ("gate", "up", "down")}
    assert {g.fqn for g in backend.report.gemms if g.recipe} == names
    assert len(backend.report.gemms) == 18
    assert backend.weights.quantized == 6


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")


def generated(backend: Any, cache: str) -> tuple[Any, Tensor]:
    """Four words continued by eight, and two by two."""
    from transformers import pipeline

    torch._dynamo.reset()
    model = llama().eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    model.compile(backend=backend)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
    settings: dict[str, Any] = {"do_sample": False, "cache_implementation": cache, "return_tensors": True}
    (out,) = generate("w5 w6 w7 w8", max_new_tokens=8, **settings)
    generate("w9 w9", max_new_tokens=2, **settings)
    return model, torch.tensor(out["generated_token_ids"])


@first_slow("cache", ["dynamic", "static"])
def test_text_generation_pipeline(cache: str) -> None:
    counter = CompileCounter()
    generated(counter, cache)
    backend = eager_backend(None, cache_weights="update")
    model, ids = generated(backend, cache)
    assert ids.shape == (12,)
    assert backend.weights.quantized == LINEARS
    # one more: a prompt's keys come out with other strides than eager code gives them, which the second prompt shows
    assert len(backend.report.graphs) == counter.frame_count + (cache == "dynamic")
    with torch.no_grad():
        logits = copy.deepcopy(model)(ids[None]).logits[0, 3:-1]
    chosen = logits.gather(1, ids[4:, None])[:, 0]  # high precision would have chosen them, or some as likely
    assert (logits.amax(1) - chosen).max() < 0.1 * logits.std()
