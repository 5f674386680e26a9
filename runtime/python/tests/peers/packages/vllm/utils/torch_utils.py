"""Seeds."""

import torch


def set_random_seed(seed: int) -> None:
    torch.manual_seed(seed)
