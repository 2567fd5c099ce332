"""Train a LightningModule under Lightning's Trainer; the state of delayed scaling is saved with its checkpoints.

python examples/lightning_module.py
"""

import tempfile

import lightning
import torch
from torch import nn

import fp8graph
from fp8graph.integrations.lightning import ScalingStateCallback


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        on_gpu = torch.cuda.is_available()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 16))
        self.net.bfloat16()
        fp8graph.compile(self.net, recipe="delayed", compiler="inductor" if on_gpu else "eager")

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y.float())
        print(f"step {self.global_step}: loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


x, y = torch.randn(64, 32).bfloat16(), torch.randn(64, 16).bfloat16()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
with tempfile.TemporaryDirectory() as folder:
    quiet = {"default_root_dir": folder, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for steps in (4, 8):  # the second run goes on where the first one stopped
        module = Regression()
        trainer = lightning.Trainer(max_epochs=steps, callbacks=[ScalingStateCallback()], **quiet)
        trainer.fit(module, data, ckpt_path=None if steps == 4 else f"{folder}/half.ckpt")
        trainer.save_checkpoint(f"{folder}/half.ckpt")
print(fp8graph.backend_of(module.net).report.summary())
