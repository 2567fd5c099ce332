"""GRPO with TRL in FP8: rollouts by transformers' generate, and training, run the same compiled layers.

python examples/trainers/trl_grpo.py
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import fp8graph

POLICY = {"rules": [{"pattern": "*layers.1.*", "recipe": "high_precision"}], "default": "tensorwise"}
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)} | {"<eos>": 60, "<pad>": 61}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 64}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
on_gpu = torch.cuda.is_available()
compiler = "inductor" if on_gpu else "eager"  # eager: no code generation, starts at once
fp8graph.compile(model, policy=POLICY, regions="auto", compiler=compiler)  # one layer at a time: few compilations


def short_words(completions: list[str], **_: object) -> list[float]:
    """The share of words from w0 to w9."""
    return [sum(len(word) == 2 for word in text.split()) / 8 for text in completions]


arguments = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    max_steps=3,
    per_device_train_batch_size=8,
    num_generations=8,
    max_completion_length=8,
    learning_rate=1e-2,
    bf16=True,
    use_cpu=not on_gpu,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
prompts = Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(32)]})
trainer = GRPOTrainer(
    model=model, reward_funcs=short_words, args=arguments, train_dataset=prompts, processing_class=tokenizer
)
trainer.train()
for step, log in enumerate(trainer.state.log_history[:-1]):
    print(f"step {step}: reward {log['reward']:.2f}, entropy {log['entropy']:.2f}")
print(fp8graph.backend_of(model).report.summary())
