"""Classify with BERT: an encoder, trained and then evaluated, in FP8.

python examples/encoder.py                                a tiny BERT
python examples/encoder.py google-bert/bert-base-uncased   your model
"""

import sys

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

import fp8graph

if len(sys.argv) > 1:
    model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    model = BertForSequenceClassification(BertConfig(**sizes, num_hidden_layers=1))

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
compiler = "inductor" if on_gpu else "eager"  # eager: no code generation, starts at once
model = fp8graph.compile(model.to(device), options={"compiler": compiler})

labels = torch.arange(8, device=device) % 2
ids = torch.full((8, 16), 7, device=device) + labels[:, None]  # two kinds of text
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    with torch.autocast(device, torch.bfloat16):  # weights in FP32
        loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

model.eval()
with torch.no_grad(), torch.autocast(device, torch.bfloat16):
    right = (model(input_ids=ids).logits.argmax(-1) == labels).float().mean()
print(f"{right:.0%} right")
print(fp8graph.backend_of(model).report.summary())  # the classifier is a head: high precision
