"""A GPT in one file, without any library but torch: every nn.Linear but the head runs in FP8.

python examples/nano_gpt.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import fp8graph


class Block(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.attention, self.project = nn.LayerNorm(size), nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.norm_2, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, letters: int = 128, size: int = 64, layers: int = 2, context: int = 32) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(letters, size), nn.Embedding(context, size)
        self.blocks = nn.Sequential(*(Block(size, heads=4) for _ in range(layers)))
        self.head = nn.Linear(size, letters, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.token(ids) + self.position.weight[: ids.shape[1]])
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


device = "cuda" if torch.cuda.is_available() else "cpu"
model = fp8graph.compile(GPT().bfloat16().to(device), compiler="inductor" if device == "cuda" else "eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.tensor([list(b"to be, or not to be: that is the")] * 4, device=device)
for step in range(8):
    loss = model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
print(fp8graph.backend_of(model).report.summary())
