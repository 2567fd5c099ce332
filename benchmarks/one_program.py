"""GRPO with a trainer and a server in two processes: how far apart are their log-probabilities, at each update?

The server draws 16 answers in batches of 1 to 8, prompts of different lengths padded on the left, token by token with a
cache. The trainer packs all 16 into one row and scores them. With ``batch_invariant=True`` the log-probabilities are
equal bit for bit. Runs on a CPU, in generated code, about ten minutes for each set-up. Scales are not rounded to powers
of two, as servers have them.

    python -m benchmarks.one_program --model llama --recipe rowwise
    python -m benchmarks.one_program --model mixture --recipe mxfp8 --updates 20 --compiler eager
    python -m benchmarks.one_program --trainer fsdp2 --kv fp8
    python -m benchmarks.one_program --cost
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, multiprocessing
from torch._dynamo import config as dynamo_config
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, StaticCache

import fp8graph
from fp8graph.extras.kv_cache import Fp8DynamicCache, Fp8StaticCache
from fp8graph.tools.record.machine import commit, this_machine

ANSWERS, NEW, GROUP, VOCABULARY = 16, 8, 4, 64  # in an update; tokens of each; answers to one prompt
PROMPTS: Final = (3, 4, 6, 7)  # their lengths
LONGEST: Final = max(PROMPTS)
FOLDER: Final = Path(__file__).parent / "results" / "one_program"
SIZES: Final[dict[str, Any]] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": VOCABULARY} | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
RECIPES: Final[dict[str, Any]] = {
    "rowwise": fp8graph.Float8RowwiseScaling(power_2_scale=False),
    "blockwise": fp8graph.Float8BlockScaling(power_2_scale=False),
    "mxfp8": "mxfp8",
}
EXPERTS: Final[dict[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64} | {
    "head_dim": 32
}


def make(model: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    if model == "llama":
        return LlamaForCausalLM._from_config(LlamaConfig(**SIZES), dtype=dtype)
    return Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**SIZES, **EXPERTS), dtype=dtype)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    return {"compiler": options.compiler, "batch_invariant": not options.without}


def scores(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of tokens [...] under logits [..., vocabulary]."""
    return logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def draw(model: Any, prompts: list[Tensor], kv: str, seed: int) -> tuple[Tensor, Tensor]:
    """Answers [batch, NEW] to prompts of different lengths, and the log-probabilities of their tokens."""
    ids = torch.stack([functional.pad(prompt, (LONGEST - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([(torch.arange(LONGEST) >= LONGEST - len(prompt)).long() for prompt in prompts])
    length = LONGEST + NEW
    cache: Any = StaticCache(config=model.config, max_cache_len=length)
    if kv == "fp8":
        cache = Fp8StaticCache(model.config, max_cache_len=length, exact_prefill=False)
    generator, tokens, drawn = torch.Generator().manual_seed(seed), list[Tensor](), list[Tensor]()
    for _ in range(NEW):
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        logits = out.logits[:, -1]
        ids = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
        tokens.append(ids[:, 0])
        drawn.append(scores(logits, ids[:, 0]))
        mask = functional.pad(mask, (0, 1), value=1)
    return torch.stack(tokens, 1), torch.stack(drawn, 1)


def serve(options: argparse.Namespace, folder: str, inbox: Any, outbox: Any) -> None:
    """Draw answers with the weights that arrive: in FP8, or in bf16 if ``folder`` is "", as experts do."""
    torch.set_num_threads(1)
    dynamo_config.recompile_limit = 64
    server = make(options.model, torch.bfloat16).eval()
    if folder:
        server = fp8graph.load_checkpoint(server, folder)
        fp8graph.compile(server, dynamic=True, **settings_of(options))
    else:
        fp8graph.compile(server, recipe=RECIPES[options.recipe], dynamic=True, **settings_of(options))
    while (message := inbox.get()) is not None:
        tensors, prompts, seed = message
        if folder:
            fp8graph.update_weights(server, tensors)
        else:
            server.load_state_dict(dict(tensors))
        generator = torch.Generator().manual_seed(seed)
        order, sizes = torch.randperm(ANSWERS, generator=generator).tolist(), list[int]()
        while sum(sizes) < ANSWERS:
            sizes.append(min(int(torch.randint(1, 9, (), generator=generator)), ANSWERS - sum(sizes)))
        tokens, drawn = (torch.empty(ANSWERS, NEW, dtype=dtype) for dtype in (torch.int64, torch.float32))
        for size in sizes:
            batch, order = order[:size], order[size:]
            tokens[batch], drawn[batch] = draw(server, [prompts[i] for i in batch], options.kv, seed + batch[0])
        outbox.put((tokens.tolist(), drawn.tolist(), sizes))


def packed_scores(model: Any, prompts: list[Tensor], tokens: Tensor) -> Tensor:
    """[ANSWERS, NEW]: the trainer's log-probabilities, from one row that holds all sequences."""
    sequences = [torch.cat([prompt, answer]) for prompt, answer in zip(prompts, tokens, strict=True)]
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    logits = model(torch.cat(sequences)[None], position_ids=positions[None], use_cache=False).logits[0]
    ends = torch.tensor([len(sequence) for sequence in sequences]).cumsum(0)
    places = ends[:, None] - NEW - 1 + torch.arange(NEW)
    return scores(logits[places], tokens)


@torch.no_grad()
def scores_with_cache(model: Any, prompts: list[Tensor], tokens: Tensor) -> Tensor:
    """The same under FP8 keys and values, from one batch: transformers packs nothing in a cache."""
    sequences = [torch.cat([prompt, answer]) for prompt, answer in zip(prompts, tokens, strict=True)]
    ids, mask = (
        torch.stack([functional.pad(x, (0, LONGEST + NEW - len(x))) for x in parts])
        for parts in (sequences, [torch.ones_like(sequence) for sequence in sequences])
    )
    cache = Fp8DynamicCache(model.config, exact_prefill=False)
    logits = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits
    places = mask.sum(1, keepdim=True) - NEW - 1 + torch.arange(NEW)
    return scores(logits[torch.arange(ANSWERS)[:, None], places], tokens)


def trained(options: argparse.Namespace) -> Any:
    """The trainer's model, compiled: in bf16, or FP32 masters that FSDP2 gathers in bf16."""
    settings = settings_of(options)
    if options.trainer == "bf16":
        return fp8graph.compile(
            make(options.model, torch.bfloat16), recipe=RECIPES[options.recipe], dynamic=True, **settings
        )
    model, precision = make(options.model, torch.float32), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    backend = fp8graph.Backend(recipe=RECIPES[options.recipe], **settings)
    backend.bind(model)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    model.compile(backend=backend, dynamic=True)
    return model


def train(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    dynamo_config.recompile_limit = 64
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = trained(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    questions = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in PROMPTS]
    prompts = [prompt for prompt in questions for _ in range(GROUP)]
    packed_scores(model, prompts, torch.ones(ANSWERS, NEW, dtype=torch.int64))  # what was compiled can be exported
    in_fp8 = options.model == "llama"  # load_checkpoint has no place for experts that a module keeps as one tensor
    if in_fp8:
        fp8graph.export(model, f"{folder}/fp8")
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(options, f"{folder}/fp8" * in_fp8, inbox, outbox), daemon=True)
    process.start()
    rows: list[dict[str, Any]] = []
    for update in range(options.updates):
        state = fp8graph.quantized_state(model) if in_fp8 else model.state_dict().items()
        inbox.put(([(name, x.clone()) for name, x in state], prompts, 100 * update))
        tokens, drawn, sizes = outbox.get(timeout=1800)
        tokens, theirs = torch.tensor(tokens), torch.tensor(drawn)
        mine = packed_scores(model, prompts, tokens)
        compared = mine.detach()
        if options.kv == "fp8":  # the server's keys and values are rounded, and so are these
            compared = scores_with_cache(model, prompts, tokens)
        r, without_cache = theirs - compared, theirs - mine.detach()
        reward = (tokens < VOCABULARY // 4).float().mean(1).view(-1, GROUP)  # small tokens are good ones
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        rows.append(
            {
                "update": update,
                "batches": sizes,
                "equal": torch.equal(compared, theirs),
                "kl": float((r.exp() - 1 - r).mean()),
                "kl_of_gradient": float((without_cache.exp() - 1 - without_cache).mean()),
                "largest": float(r.abs().max()),
                "reward": float(reward.mean()),
            }
        )
        if update % 10 == 0:
            Console().print(json.dumps(rows[-1]))
        (-(mine - theirs).exp() * advantage).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    inbox.put(None)
    process.join()
    dist.destroy_process_group()
    report = fp8graph.backend_of(model).report
    gemms = [gemm for gemm in report.gemms if gemm.recipe is not None]
    return {"gemms_in_fp8": len(gemms), "of": len(report.gemms), "updates": rows}


def cost() -> dict[str, float]:
    """The time of a call with ``batch_invariant=True``, as a ratio to that without: medians of calls in turn."""
    sizes: dict[str, Any] = SIZES | {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "vocab_size": 4096,
    }
    models: dict[bool, Any] = {}
    for invariant in (False, True):
        torch.manual_seed(0)
        models[invariant] = LlamaForCausalLM._from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
        fp8graph.compile(models[invariant], recipe=RECIPES["rowwise"], batch_invariant=invariant)
    ids = torch.arange(512).reshape(8, 64)

    def forward(model: Any) -> None:
        with torch.no_grad():
            model(ids, use_cache=False)

    def decoding(model: Any) -> None:
        with torch.no_grad():
            model(ids[:, :1], use_cache=False)

    def training(model: Any) -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()

    ratios: dict[str, float] = {}
    for call in (forward, decoding, training):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(12):
            for invariant, model in models.items():
                start = time.perf_counter()
                call(model)
                seconds[invariant].append(time.perf_counter() - start)
        ratios[call.__name__] = statistics.median(seconds[True][2:]) / statistics.median(seconds[False][2:])
    return ratios


def conditions() -> dict[str, Any]:
    """The machine, and the commit."""
    return {**this_machine(), "vectors": torch.backends.cpu.get_cpu_capability(), "clean": not commit()[1]}


def row(run: dict[str, Any]) -> str:
    """Return the line of docs/reinforcement_learning.md for a run."""
    trainer = {"bf16": "bf16 weights", "fsdp2": "FP32 masters under FSDP2"}[run["trainer"]]
    model = run["model"] + ", without `batch_invariant`" * run["without"]
    kv = {"bf16": "bf16", "fp8": "FP8"}[run["kv"]]
    equal, kl = f"{run['equal']} of {len(run['updates'])} updates", f"{run['kl']:.0e}" if run["kl"] else "0.0"
    return f"| {model} | `{run['recipe']}` | {trainer} | {kv} | {equal} | {kl} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=["llama", "mixture"], default="llama")
    parser.add_argument("--recipe", choices=[*RECIPES], default="rowwise")
    parser.add_argument("--trainer", choices=["bf16", "fsdp2"], default="bf16")
    parser.add_argument("--kv", choices=["bf16", "fp8"], default="bf16", help="keys and values of the server's cache")
    parser.add_argument("--compiler", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--without", action="store_true", help="without batch_invariant, for comparison")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--cost", action="store_true", help="time calls with and without it, and nothing else")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.cost:
        text = json.dumps({**conditions(), "ratios": cost()})
        (options.out / "cost.json").write_text(text + "\n", encoding="utf-8")
        Console().print(text)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = train(options, folder)
    chosen = {name: getattr(options, name) for name in ("model", "recipe", "trainer", "kv", "compiler", "without")}
    equal = sum(row["equal"] for row in result["updates"])
    summary = {"equal": equal, "kl": max(row["kl"] for row in result["updates"])}
    name = "_".join(str(value) for name, value in chosen.items() if name != "without") + "_without" * options.without
    text = json.dumps({**chosen, **conditions(), **summary, **result})
    (options.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    Console().print(f"{name}: equal in {equal} of {options.updates} updates, largest KL {summary['kl']:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
