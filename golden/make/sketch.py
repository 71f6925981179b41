"""Short forms of large tensors, remade identically by golden/store: a norm, fixed random projections and two whole rows.

kind "tensor" (gradients): [norm, 64 projections of the flattened tensor, whole rows]
kind "tokens" (activations [T, C]): [norm, 2 projections of every row (t-major), whole rows]
Projection p is sqrt(3) * u(0, "golden-projection/<p>"): mean 0, variance 1, so the mean square of the projections of a difference
estimates its squared norm. Rows are floor((u + 1) / 2 * R) of u(0, "golden-rows/<name>"), two draws, ascending, once each.
"""
import math

import numpy as np
import torch

import seeded

FULL_LIMIT = 1024  # elements; up to here a tensor is stored whole
PROJECTIONS, TOKEN_PROJECTIONS, ROWS = 64, 2, 2
_cache = {}


def projection(p: int, count: int) -> torch.Tensor:
    if p not in _cache or len(_cache[p]) < count:
        _cache[p] = torch.from_numpy(math.sqrt(3.0) * seeded.uniform(0, f"golden-projection/{p}", max(count, 4096)))
    return _cache[p][:count]


def rows_of(name: str, rows: int) -> list:
    draws = seeded.uniform(0, "golden-rows/" + name, ROWS)
    return sorted({min(int(math.floor((u + 1.0) / 2.0 * rows)), rows - 1) for u in draws})


def make(name: str, tensor: torch.Tensor, kind: str) -> np.ndarray:
    flat = tensor.double().reshape(tensor.shape[0], -1)
    if kind == "tensor":
        projections = torch.stack([torch.dot(flat.reshape(-1), projection(p, flat.numel())) for p in range(PROJECTIONS)])
    else:
        vectors = torch.stack([projection(p, flat.shape[1]) for p in range(TOKEN_PROJECTIONS)], 1)
        projections = (flat @ vectors).reshape(-1)
    rows = flat[rows_of(name, flat.shape[0])].reshape(-1)
    return torch.cat([flat.norm().reshape(1), projections, rows]).numpy()
