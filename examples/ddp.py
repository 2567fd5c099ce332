"""Data parallel: each rank has its own batch. DDP averages the gradients, fp8graph makes the scales those of all ranks.

torchrun --nproc-per-node 2 examples/ddp.py      on CPUs (gloo), or on as many GPUs (NCCL)
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)  # the same model everywhere
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).bfloat16().to(device)

# delayed scaling: one small all-reduce of amaxes in forward and one in backward, inside the compiled code
backend = fp8graph.Backend(recipe="delayed", compiler="inductor" if on_gpu else "eager")  # eager: starts at once
model.compile(backend=backend)
wrapped = DistributedDataParallel(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = (torch.arange(16, device=device) + 16 * rank).repeat(4, 1)  # each rank's own data
for step in range(8):
    loss = wrapped(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.3f}")

scales = torch.cat([value for name, value in backend.state_dict().items() if name.endswith("|scale")]).to(device)
everywhere = [torch.empty_like(scales) for _ in range(dist.get_world_size())]
dist.all_gather(everywhere, scales)
if rank == 0:
    print(f"{len(scales)} scales, the same on every rank: {all(torch.equal(scales, other) for other in everywhere)}")
    print(backend.report.summary())
dist.barrier()  # before an exit: gloo may still hold the tensors above (torch issue 190489: "terminate called")
dist.destroy_process_group()
