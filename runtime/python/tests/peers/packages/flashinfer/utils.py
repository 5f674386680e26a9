"""What kind of GPU the tests find: the CPU passes for Hopper."""

from __future__ import annotations

import torch


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def is_sm90a_supported(device: torch.device) -> bool:
    return get_compute_capability(device)[0] == 9


def is_sm100a_supported(device: torch.device) -> bool:
    return get_compute_capability(device)[0] == 10


def is_sm12x_supported(device: torch.device) -> bool:
    return get_compute_capability(device)[0] == 12
