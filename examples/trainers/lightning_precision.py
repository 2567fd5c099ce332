"""Lightning's Trainer in FP8 by its plugin for precision, with a policy that tells the model's layers apart.

python examples/trainers/lightning_precision.py
"""

import lightning
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph
from fp8graph.integrations.lightning import FP8Precision

POLICY = {"rules": [{"pattern": "*layers.1.*", "recipe": "high_precision"}], "default": "delayed"}


class Llama(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
        self.llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.llama(input_ids=ids, labels=ids, use_cache=False).loss
        print(f"step {self.global_step}: loss {loss.item():.2f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


compiler = "inductor" if torch.cuda.is_available() else "eager"  # eager: no code generation, starts at once
data = torch.utils.data.DataLoader(torch.arange(16).repeat(16, 1), batch_size=4)
module = Llama()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
lightning.Trainer(max_epochs=1, plugins=[FP8Precision(policy=POLICY, compiler=compiler)], **quiet).fit(module, data)
print(fp8graph.backend_of(module).report.summary())
