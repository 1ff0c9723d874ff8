"""A byte-level GPT in the manner of nanoGPT's train.py."""

import math
import sysconfig
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

batch_size, block_size, gradient_accumulation_steps = 8, 64, 4
learning_rate, min_lr, warmup_iters, max_iters = 3e-3, 3e-4, 20, 200
grad_clip, seed = 1.0, 1337
device = "cuda" if torch.cuda.is_available() else "cpu"


class GPT(nn.Module):
    def __init__(self, width=64, heads=4, layers=2):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(block_size, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, idx, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1], device=idx.device)
        x = self.token(idx) + self.place.weight[: idx.shape[1]]
        logits = self.head(self.blocks(x, mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    decay_ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * min(1, decay_ratio))) * (learning_rate - min_lr)


text = (Path(sysconfig.get_path("stdlib")) / "typing.py").read_bytes()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Windows(torch.utils.data.Dataset):
    def __len__(self):
        return len(data) - block_size

    def __getitem__(self, i):
        return data[i : i + block_size], data[i + 1 : i + 1 + block_size]


def loss_fn(model, batch):
    x, y = batch
    return model(x.to(device), y.to(device))


def train():
    torch.manual_seed(seed)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    batches = iter(torch.utils.data.DataLoader(Windows(), batch_size, shuffle=True))

    for it in range(max_iters):
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(it)
        for _ in range(gradient_accumulation_steps):
            loss = loss_fn(model, next(batches)) / gradient_accumulation_steps
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if it % 10 == 0:
            print(f"iter {it}: loss {loss.item() * gradient_accumulation_steps:.4f}")


if __name__ == "__main__":
    train()
