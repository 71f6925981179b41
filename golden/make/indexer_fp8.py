"""Plain reference of the indexer's FP8 scoring: Hadamard rotation, e4m3 with a power-of-two scale, pooled keys, selection.

numpy and ml_dtypes only, written from the definition; no model code. Inputs are seeded (names below), so the file holds results only.
Everything up to the e4m3 bytes is exact float32 arithmetic in a stated order. Scores are computed from those bytes in float64, and seeds in
which a choice would depend on the order of a float32 sum, or a pooled key lies near a bfloat16 rounding boundary, are rejected.
"""
import math
import os

import h5py
import ml_dtypes
import numpy as np

import seeded

DESCRIPTION = "FP8 indexer: pooled keys, Hadamard, e4m3 bytes and scales, scores, selected keys (heads 32 x 128, pools of 4, 4 pools)"
DOCUMENTS, HEADS, DIM, KPOOL, TOPK = [45, 3, 30], 32, 128, 4, 16
SAMPLED_TOKENS = [0, 17, 44, 47, 77]
INPUTS = {  # name: (shape, amplitude, rounded to bfloat16)
    "q": (lambda T: (T, HEADS, DIM), 2.0, True), "k": (lambda T: (T, DIM), 2.0, True), "gate": (lambda T: (T, DIM), 3.0, True),
    "ape": (lambda T: (KPOOL, DIM), 0.5, False), "head_weight": (lambda T: (T, HEADS), 1.0, False)}
f32, bf16, e4m3 = np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def round_bf16(x):
    return x.astype(f32).astype(bf16).astype(f32)


def hadamard(x):
    """[..., d] float32 holding bfloat16 values -> the same, rotated. Stages of stride 1, 2, 4, ...; then times d^-1/2, rounded once."""
    x, d, stride = x.astype(f32).copy(), x.shape[-1], 1
    while stride < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :], pairs[..., 1, :] = a + b, a - b
        stride *= 2
    return round_bf16(x * f32(d**-0.5))


def quantise(x):
    """[..., d] -> e4m3 bytes and one power-of-two float32 scale per vector."""
    amax = np.maximum(np.abs(x).max(-1), f32(1e-4)).astype(f32)
    mantissa, exponent = np.frexp(amax * f32(1.0 / 448.0))  # in [1/2, 1) * 2^e: the ceiling of log2 is e, or e - 1 for an exact power
    scale = np.ldexp(f32(1.0), np.where(mantissa == 0.5, exponent - 1, exponent)).astype(f32)
    y = np.clip(x / scale[..., None], f32(-448), f32(448))
    return y.astype(e4m3).view(np.uint8), scale


def pool(k, gate, ape):
    """k, gate [P, p, d], ape [p, d] float32 -> pooled keys before and after the one rounding to bfloat16."""
    s = gate + ape
    e = np.exp((s - s.max(1, keepdims=True)).astype(np.float64)).astype(f32)
    num, den = np.zeros(k[:, 0].shape, f32), np.zeros(k[:, 0].shape, f32)
    for j in range(k.shape[1]):
        num, den = num + e[:, j] * k[:, j], den + e[:, j]
    raw = num / den
    return raw, round_bf16(raw)


def inputs(seed):
    T, out = sum(DOCUMENTS), {}
    for name, (shape, amplitude, rounded) in INPUTS.items():
        shape = shape(T)
        x = (amplitude * seeded.uniform(seed, f"indexer_fp8/{name}", math.prod(shape))).astype(f32).reshape(shape)
        out[name] = round_bf16(x) if rounded else x
    return out


def run(seed):
    x, start, raw, pooled, first = inputs(seed), 0, [], [], []
    for length in DOCUMENTS:
        m = length // KPOOL
        rows = slice(start, start + m * KPOOL)
        if m:
            r, p = pool(x["k"][rows].reshape(m, KPOOL, DIM), x["gate"][rows].reshape(m, KPOOL, DIM), x["ape"])
            raw.append(r)
            pooled.append(p)
        first.append((start, sum(len(p) for p in pooled[:-1]) if m else sum(len(p) for p in pooled)))
        start += length
    raw, pooled = np.concatenate(raw), np.concatenate(pooled)
    boundary = raw.view(np.uint32).astype(np.int64) & 0xFFFF
    pool_margin = int(np.abs(boundary - 0x8000).min())  # float32 ulps to the nearest tie of the rounding to bfloat16
    rotated = hadamard(pooled)
    k_bytes, k_scale = quantise(rotated)
    q_bytes, q_scale = quantise(hadamard(x["q"]))
    weight = (x["head_weight"] * q_scale) * f32(DIM**-0.5 * HEADS**-0.5)
    dots = np.einsum("thd,pd->thp", q_bytes.view(e4m3).astype(np.float64), k_bytes.view(e4m3).astype(np.float64))
    scores = k_scale.astype(np.float64) * np.einsum("th,thp->tp", weight.astype(np.float64), np.maximum(dots, 0))
    gap, select = math.inf, np.full((sum(DOCUMENTS), TOPK + KPOOL - 1), -1, np.int32)
    for (begin, pool0), length in zip(first, DOCUMENTS):
        for pos in range(length):
            m, t = (pos + 1) // KPOOL, begin + pos
            s = scores[t, pool0:pool0 + m]
            order = np.lexsort((np.arange(m), -s))
            if m > TOPK // KPOOL:
                gap = min(gap, s[order[TOPK // KPOOL - 1]] - s[order[TOPK // KPOOL]])
            keys = [begin + KPOOL * p + j for p in sorted(order[:TOPK // KPOOL]) for j in range(KPOOL)] + list(range(begin + KPOOL * m, t + 1))
            select[t, :len(keys)] = keys
    return dict(pooled=pooled, rotated=rotated, k_bytes=k_bytes, k_scale=k_scale, q_bytes=q_bytes, q_scale=q_scale, head_weight=weight,
                scores=scores, selection=select), gap, pool_margin


def write(path, first_seed, provenance, put):
    for seed in range(first_seed, first_seed + 500):
        r, gap, margin = run(seed)
        if gap >= 1e-4 * np.abs(r["scores"]).max() and margin >= 8:
            break
    else:
        raise RuntimeError("indexer_fp8: no seed without near ties")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with h5py.File(part, "w", libver=("v110", "v110")) as f:
        f.attrs["case"] = np.bytes_("indexer_fp8")
        for k, v in (provenance | dict(ml_dtypes=ml_dtypes.__version__)).items():
            f.attrs[k] = np.bytes_(v) if isinstance(v, str) else np.int64(v)
        f.attrs["seed"] = np.int64(seed)
        f.attrs["min_gap_pools"], f.attrs["pool_margin_ulp"] = np.float64(gap), np.int64(margin)
        for k, v in dict(heads=HEADS, head_dim=DIM, kpool=KPOOL, topk=TOPK).items():
            f.attrs[k] = np.int64(v)
        put(f, "documents/cu_seqlens", np.concatenate([[0], np.cumsum(DOCUMENTS)]).astype(np.int64))
        put(f, "pooled", r["pooled"])
        put(f, "rotated", r["rotated"])
        put(f, "k_bytes", r["k_bytes"])
        put(f, "k_scale", r["k_scale"])
        put(f, "q_scale", r["q_scale"])
        put(f, "q_checksum", (r["q_bytes"].astype(np.int64) * (np.arange(DIM) + 1)).sum(-1))
        put(f, "q_sampled_tokens", np.array(SAMPLED_TOKENS, np.int64))
        put(f, "q_sampled_bytes", r["q_bytes"][SAMPLED_TOKENS])
        put(f, "head_weight", r["head_weight"])
        put(f, "scores", r["scores"])
        put(f, "selection", r["selection"])
    os.replace(part, path)
    print(f"{'indexer_fp8':16s} seed {seed:3d} gap {gap:.1e} margin {margin} ulp {path.stat().st_size / 1024:7.1f} KiB", flush=True)
    return dict(description=DESCRIPTION, seed=seed)
