"""Checks of the generator itself. usage: check.py      (a minute; exits non-zero on the first difference)

1. A checkpoint written under released names and read by transformers' own from_pretrained, as a composite model in bfloat16 and float32,
   gives exactly the parameters and dtypes that reference.py builds, and the same logits.
2. The FP8 indexer reproduces the bytes, scale and roundings that an engine's GPU kernels were seen to give.
3. The stored checkpoint hf-tiny, read by from_pretrained in both of its forms, gives the parameters and logits that reference.py computes for
   the case of that name, and is what make_hf_checkpoint.py writes.
4. The float64 run differs from a float32 run by float32's error, and it does not depend on the order of channels or the scale of
   the loss.
"""
import json
import os
import pathlib
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

import indexer_fp8 as fp8
import make_goldens as make
import make_hf_checkpoint
import weights as W
from cases import CASES
from reference import DTYPES, Reference


def case_of(name):
    case = dict(CASES[name])
    case["specs"] = W.table(case["config"])
    return case, W.make(case["specs"], 1), make.documents_of(case, 1)


def from_pretrained_agrees(name, precision):
    case, weights, docs = case_of(name)
    vision = dict(hidden_size=32, depth=1, num_heads=2, intermediate_size=32, out_hidden_size=case["config"]["hidden_size"], projection_intermediate_size=48)
    text = {k: v for k, v in case["config"].items() if k != "architectures"}
    composite = Glm5NextConfig(text_config=text, vision_config=vision)
    filler = Glm5NextForConditionalGeneration(composite)
    with tempfile.TemporaryDirectory() as d:
        tensors = {k.replace("model.", "model.language_model.", 1) if k.startswith("model.") else k: v for k, v in weights.items()}
        tensors |= {k: v.clone() for k, v in filler.state_dict().items() if "visual" in k}
        save_file(tensors, pathlib.Path(d) / "model.safetensors", metadata={"format": "pt"})
        config = json.loads(composite.to_json_string(use_diff=False))
        config["architectures"] = ["Glm5NextForConditionalGeneration"]
        (pathlib.Path(d) / "config.json").write_text(json.dumps(config))
        model = Glm5NextForConditionalGeneration.from_pretrained(d, dtype=DTYPES[precision], attn_implementation="eager", experts_implementation="eager")
    same_as_reference(model, case, weights, docs, name, precision)


def same_as_reference(model, case, weights, docs, name, precision):
    body = model.model.language_model
    for c in (model.config, model.config.text_config):
        c._attn_implementation = c._experts_implementation = "eager"
    ours = Reference(case, weights, precision)
    mine = {k: t for k, t in [*ours.body.named_parameters(), *ours.body.named_buffers()]}
    theirs = {k: t for k, t in [*body.named_parameters(), *body.named_buffers()]}
    assert set(mine) == set(theirs), sorted(set(mine) ^ set(theirs))
    for k in mine:
        assert mine[k].dtype == theirs[k].dtype, (k, mine[k].dtype, theirs[k].dtype)
        assert torch.equal(mine[k], theirs[k]), k
    with torch.no_grad():
        got = torch.cat([model.lm_head(body(input_ids=d[None], use_cache=False).last_hidden_state)[0] for d in docs])
    want = ours.forward(docs, grads=False)["logits"]
    assert torch.equal(got, want), (name, precision, (got - want).abs().max())
    print(f"from_pretrained: {name} {precision}: {len(mine)} tensors and {tuple(got.shape)} logits equal")


def hf_tiny_agrees(precision):
    case = dict(CASES["hf-tiny"])
    weights = make.fill_case(case, 1)
    stored = make.HERE.parent / "data" / "hf-tiny"
    text, read = make_hf_checkpoint.read(stored / case["checkpoint"])
    assert text == case["config_text"] and read.keys() == weights.keys() and all(torch.equal(read[k], weights[k]) for k in read)
    for form, _ in make_hf_checkpoint.FORMS:
        model = Glm5NextForConditionalGeneration.from_pretrained(
            stored / form, dtype=DTYPES[precision], attn_implementation="eager", experts_implementation="eager")
        same_as_reference(model, case, weights, make.documents_of(case, 1), f"hf-tiny/{form}", precision)


def fp8_numbers():
    x = fp8.round_bf16(np.array([np.sin(0.37 * (i + 1)) * (i % 5 + 1) for i in range(128)], np.float32))
    h = fp8.hadamard(x)
    bytes_, scale = fp8.quantise(h)
    assert [float(v) for v in h[:4]] == [1.359375, 0.1884765625, -0.220703125, 0.57421875] and np.abs(h).max() == 13.6875, h[:4]
    assert scale == 0.03125 and bytes_[:16].tobytes().hex(" ") == "63 4c ce 59 51 d8 d9 d1 71 ed f3 ca fe e1 e4 61", bytes_[:16].tobytes().hex(" ")
    assert int(bytes_.astype(int).sum()) == 19989 and float(bytes_.view(fp8.e4m3).astype(np.float64).sum()) == 122.1484375
    values = np.array([17, 19, 20.5, 248, 447.9, 2.0**-10, 3 * 2.0**-10, -0.00830078125], np.float32)
    assert values.astype(fp8.e4m3).tobytes().hex() == "585a5a787e000284"
    w = lambda n, a: np.sin(a * (np.arange(n) + 1))
    pk = fp8.pool(w(8, 0.7).reshape(1, 4, 2).astype(np.float32), w(8, 1.9).reshape(1, 4, 2).astype(np.float32), w(8, 0.2).reshape(4, 2).astype(np.float32))[0]
    assert np.allclose(pk, [-0.2596288388, -0.0926014603], atol=1e-6), pk
    print("fp8 indexer: bytes, scale, roundings and pool equal the recorded ones")


def float64_is_float64(name):
    case, weights, docs = case_of(name)
    wide = Reference(case, weights, "f64").forward(docs, grads=True)
    want = make.flatten(wide)
    runs = make.spread_of(case, weights, docs, want, "f64", runs=2)  # as it is, and in another order with another loss scale
    errors = {k: e[1] for k, e in runs.items()}
    worst = max(errors, key=errors.get)
    assert errors["logits"] < 1e-13 and errors[worst] < 1e-12, (worst, errors[worst])
    print(f"float64: {name}: logits {errors['logits']:.1e}, worst {worst} {errors[worst]:.1e} between two orders of all channels")


if __name__ == "__main__":
    torch.set_num_threads(1)
    fp8_numbers()
    for name in ("tiny", "softplus"):
        float64_is_float64(name)
    for precision in ("f32", "bf16"):
        for name in ("tiny", "softplus", "shared"):
            from_pretrained_agrees(name, precision)
        hf_tiny_agrees(precision)
    sys.exit(0)
