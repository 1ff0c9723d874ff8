"""A tiny Llama from `transformers` on lines of Python: padded batches, the mean over valid
tokens."""

import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

batch_size, learning_rate, max_steps, seed = 16, 3e-3, 200, 0
device = "cuda" if torch.cuda.is_available() else "cpu"
source = (Path(sysconfig.get_path("stdlib")) / "typing.py").read_bytes()
lines = [list(line[:96]) for line in source.split(b"\n") if len(line) > 1]


def collate(rows):
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def train():
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    scheduler = get_linear_schedule_with_warmup(optimizer, 20, max_steps)
    loader = torch.utils.data.DataLoader(lines, batch_size, shuffle=True, collate_fn=collate)
    batches = (batch for _ in range(max_steps) for batch in loader)

    for step, batch in zip(range(1, max_steps + 1), batches, strict=False):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
