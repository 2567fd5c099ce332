"""GRPO on a toy task: a trainer on two ranks, and a rollout whose log-probabilities are the trainer's bit for bit.

python examples/rl_loop.py                         five updates; the weights go to the rollout in FP8, without a disk
python examples/rl_loop.py --updates 50 --kv fp8   and the rollout's keys and values are in FP8 while it draws
"""

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph
from fp8graph.extras.kv_cache import Fp8StaticCache

RANKS, PROMPT, NEW, GROUP = 2, 4, 8, 8  # of the trainer; tokens of a prompt and of an answer; answers to each prompt
RECIPE = fp8graph.Float8BlockScaling(power_2_scale=False, backward_override="dequantized")  # servers' scales
SERVERS: dict[str, dict[str, Any]] = {  # beside the one that gets our tensors: they get bf16, and quantize themselves
    "bf16 wire": {"recipe": "rowwise"},  # a server's own choice
    "by names": {"policy": fp8graph.Policy([fp8graph.Rule("*", RECIPE), fp8graph.Rule("*mlp.gate*", None)])},
}  # ("mlp.gate" is a router's name, and a part of gate_proj's)


def llama(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_hidden_layers": 1, "pad_token_id": 0, "eos_token_id": None}
    return LlamaForCausalLM._from_config(LlamaConfig(**sizes), dtype=dtype)


def of_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probabilities of the tokens of the answers."""
    return logits.float().log_softmax(-1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


def scored(model: Any, ids: Tensor) -> Tensor:
    return of_tokens(model(ids, use_cache=False).logits[:, PROMPT - 1 : -1], ids)


@torch.no_grad()
def rollout(folder: str, kv: str, inbox: Any, outbox: Any) -> None:
    """Draw answers with the weights that arrive, and score each rank's share of them with each server."""
    torch.set_num_threads(1)
    server = fp8graph.load_checkpoint(llama(torch.bfloat16).eval(), folder)
    fp8graph.compile(server, compiler="eager", dynamic=False)
    others = {
        name: fp8graph.compile(llama(torch.bfloat16).eval(), compiler="eager", **settings)
        for name, settings in SERVERS.items()
    }
    while (message := inbox.get()) is not None:
        tensors, in_bf16, prompts, seed = message
        fp8graph.update_weights(server, tensors)
        torch.manual_seed(seed)
        settings = {"do_sample": True, "disable_compile": True, "output_logits": True, "return_dict_in_generate": True}
        cache = {"past_key_values": Fp8StaticCache(server.config, max_cache_len=PROMPT + NEW)}
        settings |= cache if kv == "fp8" else {"cache_implementation": "static"}
        drawn = server.generate(prompts, **settings, max_new_tokens=NEW)
        ids = drawn.sequences
        found = {"as drawn": of_tokens(torch.stack(drawn.logits, 1), ids)}
        for name, other in {"ours": server, **others}.items():
            if name != "ours":
                other.load_state_dict(in_bf16)
            found[name] = torch.cat([scored(other, share) for share in ids.chunk(RANKS)])
        outbox.put((ids.tolist(), {name: x.tolist() for name, x in found.items()}))


def sharded() -> Any:
    """FP32 masters in shards, which FSDP2 gathers in bf16, and those that are multiplied in FP8 in FP8."""
    model, precision = llama(torch.float32), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    backend = fp8graph.Backend(recipe=RECIPE, compiler="eager")
    backend.bind(model)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
        layer.compile(backend=backend)
    fully_shard(model, mp_policy=precision)
    return model


def trainer(rank: int, folder: str, updates: int, kv: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prompts = torch.randint(1, 64, (2, PROMPT), generator=torch.Generator().manual_seed(1)).repeat_interleave(GROUP, 0)
    scored(model, torch.ones(GROUP, PROMPT + NEW, dtype=torch.int64))  # what was compiled can be exported
    fp8graph.export(model, f"{folder}/fp8")
    context = multiprocessing.get_context("spawn")
    inbox, outbox, zeros = context.Queue(), context.Queue(), 0
    process = context.Process(target=rollout, args=(f"{folder}/fp8", kv, inbox, outbox), daemon=True)
    if rank == 0:
        process.start()
    for update in range(updates):
        tensors = [(name, x.clone()) for name, x in fp8graph.quantized_state(model)]  # on all ranks
        in_bf16 = {name: x.full_tensor().bfloat16() for name, x in model.state_dict().items()}
        answers: list[Any] = [None]
        if rank == 0:
            inbox.put((tensors, in_bf16, prompts, update))
            answers = [outbox.get(timeout=300)]
        dist.broadcast_object_list(answers)
        ids, servers = torch.tensor(answers[0][0]), {name: torch.tensor(x) for name, x in answers[0][1].items()}
        reward = (ids[:, PROMPT:] < 16).float().mean(1).view(-1, GROUP)  # small tokens are good ones
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        mine = scored(model, ids.chunk(RANKS)[rank])
        all_mine = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(all_mine, mine.detach())
        said = f"update {update}: reward {reward.mean():.3f}"
        for name, theirs in servers.items():
            r = theirs - torch.cat(all_mine)
            said += f" | {name}: KL {(r.exp() - 1 - r).mean():.1e}, at most {r.abs().max():.1e}"
        if rank == 0:
            print(said, flush=True)
        zeros += torch.equal(torch.cat(all_mine), servers["ours"])
        ratio = (mine - servers["ours"].chunk(RANKS)[rank]).exp()  # 1: they are the same
        (-ratio * advantage.chunk(RANKS)[rank]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        inbox.put(None)
        process.join()
        print(f"KL was 0.0 in {zeros} of {updates} updates with our tensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO with a rollout in FP8.")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--kv", choices=["bf16", "fp8"], default="bf16", help="keys and values of the rollout")
    options = parser.parse_args()
    multiprocessing.spawn(trainer, (tempfile.mkdtemp(), options.updates, options.kv), nprocs=RANKS)
