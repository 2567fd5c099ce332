"""axolotl's own program on a CPU: ``python -m axolotl_on_cpu config.yaml`` in place of ``-m axolotl.cli.train``.

axolotl asks the GPU what it can, and has no option that trains on a CPU. Here it gets the answers of an H100, and
``use_cpu`` by a plugin, which also writes what was trained. All else is axolotl's: its checks, tokenization, loaders,
patches of Trainer, trainer and checkpoints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import fp8graph

ANSWERS = {"bf16": True, "fp8": True, "tf32": False, "n_gpu": 1, "compute_capability": "sm_90"}
CONFIG: dict[str, Any] = {  # but for the files
    "plugins": ["axolotl_on_cpu.Plugin"],
    "attn_implementation": "sdpa",
    "bf16": True,
    "dataset_num_proc": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "lr_scheduler": "constant",
    "max_steps": 4,
    "micro_batch_size": 4,
    "optimizer": "adamw_torch",
    "save_steps": 2,
    "seed": 0,
    "sequence_len": 32,
    "val_set_size": 0,
}


def files(folder: Path) -> dict[str, Any]:
    """Write a Llama of two layers, its tokenizer and 32 lines of text: the entries of a config that name them."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tiny_models import causal_lm

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    torch.manual_seed(0)
    causal_lm("Llama")(2).save_pretrained(folder / "model")
    lines = [" ".join(f"w{(i + 3 * j) % 60}" for j in range(30)) for i in range(32)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return {
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(folder / "text.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
    }


def trained(folder: Path) -> dict[str, Any]:
    """Read what a training wrote into ``folder``: losses, and of a model that fp8graph compiled recipes and state."""
    last = max(folder.glob("checkpoint-*"), key=lambda each: int(each.name.partition("-")[2]))
    history = json.loads((last / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    losses = [row["loss"] for row in history if "loss" in row]
    return {"losses": losses, **torch.load(folder / "fp8.pt")}


def main() -> None:
    import axolotl.cli.args  # pyright: ignore[reportMissingImports]
    import axolotl.cli.config  # pyright: ignore[reportMissingImports]
    import axolotl.cli.train  # pyright: ignore[reportMissingImports]

    axolotl.cli.config.gpu_capabilities = lambda: (ANSWERS, {"torch_version": torch.__version__.partition("+")[0]})
    config = axolotl.cli.config.load_cfg(sys.argv[1])
    config.device_map = "cpu"  # on several ranks it is each one's GPU
    axolotl.cli.train.do_train(config, axolotl.cli.args.TrainerCliArgs())


if __name__ == "__main__":
    main()
else:
    from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]

    class Plugin(BasePlugin):  # pyright: ignore[reportUntypedBaseClass]
        """Trains on the CPU, and writes ``fp8.pt``."""

        def get_training_args(self, cfg: Any) -> dict[str, Any]:
            return {"use_cpu": True}

        def post_train(self, cfg: Any, model: Any) -> None:
            found: dict[str, Any] = {"recipes": {}, "state": {}}
            if cfg.fp8:
                backend = fp8graph.backend_of(model)
                found["recipes"] = {f"{gemm.fqn} {gemm.gemm}": str(gemm.recipe) for gemm in backend.report.gemms}
                found["state"] = backend.state_dict()
            if int(cfg.local_rank or 0) == 0:
                torch.save(found, Path(cfg.output_dir, "fp8.pt"))
