"""Device code: torch and triton only, nothing of models, corpora or stores.

Each Triton kernel has a plain PyTorch twin in a file of its own that defines what is right and serves the CPU.
"""

from typing import Literal, get_args

Pool = Literal["last", "mean", "weighted_mean", "sum"]  # which tokens make a sentence's vector
POOLS: tuple[str, ...] = get_args(Pool)
