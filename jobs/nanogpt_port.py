"""A byte-level GPT in the manner of nanoGPT's train.py."""

# docs/ports/nanogpt.py, made elastic: its accumulation steps become the virtual workers.
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import elastic_dp as edp

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


def train(ctx):
    torch.manual_seed(seed)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    # The rate that was set by hand: as a scheduler, since that is part of what a joining worker
    # takes over.
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: get_lr(it) / learning_rate)

    for step in ctx.steps(model, optimizer, loss_fn, scheduler=rate, clip_norm=grad_clip):
        if step.number % 10 == 0:
            ctx.log({"loss": step.loss})


if __name__ == "__main__":
    windows = edp.MapStyleData(Windows(), micro_batch_size=batch_size, seed=seed)
    scaling = edp.ScalingConfig(max_workers=2, virtual_workers=gradient_accumulation_steps)
    edp.ElasticTrainer(train, data=windows, scaling=scaling, max_steps=max_iters).fit()
