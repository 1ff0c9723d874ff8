"""What is known of the optimizers of `torch.optim`. Each updates a parameter from that parameter's
gradient and state alone, and its `step` does nothing else."""

from __future__ import annotations

import torch

# They compute each element from that element's gradient and state.
ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
# The others look at the whole parameter.
BY_PARAMETER = ELEMENTWISE | {torch.optim.Adafactor, torch.optim.Muon}
