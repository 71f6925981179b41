"""Weights of a small glm5_next text model by seed and formula, under the names of a released checkpoint.

value = offset + amplitude * u(seed, name), computed in float64, rounded to float32 and, where the file dtype is BF16, to bfloat16.
Every run (float64, float32, bfloat16) starts from these stored values.
"""
import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch

import seeded


@dataclass(frozen=True)
class Spec:
    name: str
    shape: tuple
    dtype: str  # "BF16" or "F32", as a released file declares it
    offset: float
    amplitude: float
    hidden: tuple  # (dimension, copies): which dimension runs over hidden channels (reorder.py); () if none


def _rule(name: str, shape: tuple, softplus: bool):
    if name.endswith("layernorm.weight") or name.endswith("norm.weight"):
        return 1.0, 0.2
    if name.endswith("k_norm.bias"):
        return 0.0, 0.1
    if name.endswith(("_base", "A_log", "compress_ape")):
        return 0.0, 0.5
    if name.endswith("_scale"):
        return 1.0, 0.3
    if name.endswith("dt_bias"):
        return (-1.0, 1.5) if softplus else (-2.5, 2.5)
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.1
    if name.endswith("embed_tokens.weight"):
        return 0.0, 0.5 * math.sqrt(3.0)
    if name == "lm_head.weight":
        return 0.0, 2.0 * math.sqrt(3.0 / shape[-1])
    return 0.0, math.sqrt(3.0 / shape[-1])  # matrices by fan-in, convolutions by width, hyper-connection fn by streams * hidden


def _is_f32(name: str) -> bool:
    leaf = name.split(".")[-1]
    return leaf.startswith("hc_") or leaf in ("A_log", "dt_bias", "e_score_correction_bias") or "_conv1d." in name


def table(c: dict) -> list:
    """Every tensor of the checkpoint, in file order, from a text config."""
    D, n = c["hidden_size"], c["hc_mult"]
    Hl, K, W = c["linear_num_heads"], c["linear_head_dim"], c["linear_conv_kernel_dim"]
    H, dn, dv = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]
    Rq, R = c["q_lora_rank"], c["kv_lora_rank"]
    Hi, di, p = c["index_n_heads"], c["index_head_dim"], c["index_kpool"]
    E, Ie, I = c["n_routed_experts"], c["moe_intermediate_size"], c["intermediate_size"]
    softplus = c["linear_lower_bound"] is None
    out = []

    def add(name, shape, hidden=()):
        offset, amplitude = _rule(name, shape, softplus)
        out.append(Spec(name, tuple(shape), "F32" if _is_f32(name) else "BF16", offset, amplitude, hidden))

    add("model.embed_tokens.weight", (c["vocab_size"], D), (1, 1))
    for i in range(c["num_hidden_layers"]):
        P = f"model.layers.{i}."
        add(P + "input_layernorm.weight", (D,), (0, 1))
        add(P + "post_attention_layernorm.weight", (D,), (0, 1))
        for part in ("attn", "ffn"):
            add(P + f"hc_{part}_fn", ((2 + n) * n, n * D), (1, n))
            add(P + f"hc_{part}_base", ((2 + n) * n,))
            add(P + f"hc_{part}_scale", (3,))
        A = P + "self_attn."
        if c["layer_types"][i] == "linear_attention":
            for x in "qkv":
                add(A + f"{x}_proj.weight", (Hl * K, D), (1, 1))
            for x in "qkv":
                add(A + f"{x}_conv1d.weight", (Hl * K, 1, W))
            add(A + "b_proj.weight", (Hl, D), (1, 1))
            add(A + "f_a_proj.weight", (K, D), (1, 1))
            add(A + "f_b_proj.weight", (Hl * K, K))
            add(A + "g_a_proj.weight", (K, D), (1, 1))
            add(A + "g_b_proj.weight", (Hl * K, K))
            add(A + "A_log", (Hl,))
            add(A + "dt_bias", (Hl * K,))
            add(A + "o_norm.weight", (K,))
            add(A + "o_proj.weight", (D, Hl * K), (0, 1))
        else:
            add(A + "q_a_proj.weight", (Rq, D), (1, 1))
            add(A + "q_a_layernorm.weight", (Rq,))
            add(A + "q_b_proj.weight", (H * dn, Rq))
            add(A + "kv_a_proj_with_mqa.weight", (R, D), (1, 1))
            add(A + "kv_a_layernorm.weight", (R,))
            add(A + "kv_b_proj.weight", (H * (dn + dv), R))
            add(A + "o_proj.weight", (D, H * dv), (0, 1))
            if c["indexer_types"][i] == "full":
                X = A + "indexer."
                add(X + "wq_b.weight", (Hi * di, Rq))
                add(X + "wk.weight", (di, D), (1, 1))
                add(X + "k_norm.weight", (di,))
                add(X + "k_norm.bias", (di,))
                add(X + "weights_proj.weight", (Hi, D), (1, 1))
                add(X + "index_kpool_compress_ape", (p, di))
                add(X + "index_kpool_compress_gate", (di, D), (1, 1))
        M = P + "mlp."
        if c["mlp_layer_types"][i] == "dense":
            add(M + "gate_proj.weight", (I, D), (1, 1))
            add(M + "up_proj.weight", (I, D), (1, 1))
            add(M + "down_proj.weight", (D, I), (0, 1))
        else:
            add(M + "gate.weight", (E, D), (1, 1))
            add(M + "gate.e_score_correction_bias", (E,))
            for e in range(E):
                add(M + f"experts.{e}.gate_proj.weight", (Ie, D), (1, 1))
                add(M + f"experts.{e}.up_proj.weight", (Ie, D), (1, 1))
                add(M + f"experts.{e}.down_proj.weight", (D, Ie), (0, 1))
            S = M + "shared_experts."
            width = Ie * c["n_shared_experts"]
            add(S + "gate_proj.weight", (width, D), (1, 1))
            add(S + "up_proj.weight", (width, D), (1, 1))
            add(S + "down_proj.weight", (D, width), (0, 1))
    add("model.norm.weight", (D,), (0, 1))
    add("lm_head.weight", (c["vocab_size"], D), (1, 1))
    return out


def make(specs: list, seed: int) -> dict:
    """name -> tensor in its file dtype."""
    result = {}
    for s in specs:
        u = seeded.uniform(seed, s.name, math.prod(s.shape))
        value = torch.from_numpy((s.offset + s.amplitude * u).astype(np.float32)).reshape(s.shape)
        result[s.name] = value.to(torch.bfloat16) if s.dtype == "BF16" else value
    return result


def sha256(specs: list, weights: dict) -> str:
    """Over the raw bytes of every tensor in table order."""
    digest = hashlib.sha256()
    for s in specs:
        w = weights[s.name]
        digest.update((w.view(torch.int16) if w.dtype == torch.bfloat16 else w).numpy().tobytes())
    return digest.hexdigest()


def to_reference(weights: dict, layers: int) -> dict:
    """File names -> names and packing of the reference's modules."""
    out, experts, convs = {}, {}, {}
    for name, w in weights.items():
        if ".mlp.experts." in name:
            layer, _, rest = name.partition(".mlp.experts.")
            e, leaf = rest.split(".")[:2]
            experts.setdefault(layer, {}).setdefault(int(e), {})[leaf] = w
        elif "_conv1d." in name:
            layer, _, leaf = name.rpartition(".self_attn.")
            convs.setdefault(layer, {})[leaf[0]] = w
        else:
            out[_rename(name)] = w
    for layer, by_id in experts.items():
        ids = sorted(by_id)
        out[layer + ".mlp.experts.gate_up_proj"] = torch.stack([torch.cat([by_id[e]["gate_proj"], by_id[e]["up_proj"]]) for e in ids])
        out[layer + ".mlp.experts.down_proj"] = torch.stack([by_id[e]["down_proj"] for e in ids])
    for layer, parts in convs.items():
        out[layer + ".self_attn.conv1d.weight"] = torch.cat([parts[x] for x in "qkv"])
    return out


def _rename(name: str) -> str:
    for part in ("attn", "ffn"):
        name = name.replace(f".hc_{part}_", f".{part}_hc.")
    for leaf in ("f_a_proj", "f_b_proj", "dt_bias", "A_log"):
        name = name.replace(f".self_attn.{leaf}", f".self_attn.forget_gate.{leaf}")
    return name


def from_reference(grads: dict, specs: list) -> dict:
    """Gradients under file names. Tensors without a gradient (the frozen indexer, the correction bias) are absent."""
    out = {}
    for s in specs:
        name = s.name
        if ".mlp.experts." in name:
            layer, _, rest = name.partition(".mlp.experts.")
            e, leaf = rest.split(".")[:2]
            if leaf == "down_proj":
                g = grads[layer + ".mlp.experts.down_proj"][int(e)]
            else:
                half = grads[layer + ".mlp.experts.gate_up_proj"][int(e)].chunk(2, dim=0)
                g = half[0 if leaf == "gate_proj" else 1]
        elif "_conv1d." in name:
            layer, _, leaf = name.rpartition(".self_attn.")
            g = grads[layer + ".self_attn.conv1d.weight"].chunk(3, dim=0)["qkv".index(leaf[0])]
        else:
            g = grads.get(_rename(name))
        if g is not None:
            out[name] = g.contiguous()
    return out
