"""A module that asks for CUDA when it is imported, as many do: a process that was forked after that cannot use CUDA."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
