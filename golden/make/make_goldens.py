"""Makes golden files. usage: make_goldens.py --case NAME[,NAME]|all --out DIR [--seed N] [--full] [--quick] [--list]

--seed N   first seed to try; later ones follow until no top-k choice is nearly tied (the seed used is stored)
--full     store every tensor whole: a cache for locating a difference, not for committing
--quick    float64 only, no spread: for checks at fresh seeds that need no noise floor
"""
import argparse
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import h5py
import numpy as np
import torch
import transformers

import indexer_fp8
import make_hf_checkpoint
import reorder
import seeded
import sketch
import weights as W
from cases import CASES
from reference import Reference, gaps, source_sha256

FORMAT_VERSION = 1
SPREAD_RUNS = 5
HERE = pathlib.Path(__file__).resolve().parent


def documents_of(case: dict, seed: int) -> list:
    lengths, V = case["documents"], case["config"]["vocab_size"]
    u = seeded.uniform(seed, "documents/ids", sum(lengths))
    ids = torch.from_numpy(np.minimum(np.floor((u + 1.0) / 2.0 * V), V - 1).astype(np.int64))
    ids[len(ids) // 2] = case["config"]["pad_token_id"]  # the padding row of the embedding is read, and still gets no gradient
    return list(ids.split(lengths))


def fill_case(case: dict, seed: int) -> dict:
    """Adds the case's configuration and tensor table for this seed, where the case has none of its own, and returns its weights."""
    if "checkpoint" not in case:
        case["specs"] = W.table(case["config"])
        return W.make(case["specs"], seed)
    with tempfile.TemporaryDirectory() as d:
        make_hf_checkpoint.write(pathlib.Path(d), seed)
        case["config_text"], weights = make_hf_checkpoint.read(pathlib.Path(d) / case["checkpoint"])
    case["config"] = {k: v for k, v in json.loads(case["config_text"])["text_config"].items() if k != "dtype"}
    dtypes = {torch.bfloat16: "BF16", torch.float32: "F32"}
    case["specs"] = [dataclasses.replace(s, dtype=dtypes[weights[s.name].dtype]) for s in W.table(case["config"])]
    shapes = {k: tuple(t.shape) for k, t in weights.items()}
    if shapes != {s.name: s.shape for s in case["specs"]}:
        raise RuntimeError("the checkpoint holds other tensors than its configuration asks for")
    return weights


def find_seed(case: dict, first: int) -> tuple:
    """First seed whose smallest top-k gap is at least 10 times the float32 score error and 1e-5."""
    for seed in range(first, first + 200):
        weights = fill_case(case, seed)
        docs = documents_of(case, seed)
        wide = Reference(case, weights, "f64")
        wide.forward(docs, grads=False)
        gap, _ = gaps({}, wide.scores, case["config"])
        if min(gap.values()) < 1e-5:
            continue
        narrow = Reference(case, weights, "f32")
        narrow.forward(docs, grads=False)
        gap, error = gaps(narrow.scores, wide.scores, case["config"])
        if all(gap[k] >= max(1e-5, 10 * error[k]) for k in gap):
            return seed, weights, docs, gap, error
    raise RuntimeError("no seed without near ties in 200 tries: use a shorter case or more indexer heads")


def rel_l2(got, want) -> float:
    got, want = torch.as_tensor(got).double(), torch.as_tensor(want).double()
    ok = ~torch.isnan(want)
    got, want = got[ok], want[ok]
    norm = want.norm().item()
    return (got - want).norm().item() / norm if norm > 0 else float((got - want).norm().item() > 0)


def flatten(run: dict) -> dict:
    flat = {"logits": run["logits"], "logprobs": run["logprobs"], "loss": torch.tensor(run["loss"], dtype=torch.float64)}
    flat |= {"activations/" + k: v for k, v in run["activations"].items() if v.is_floating_point()}
    return flat | {"grads/" + k: v for k, v in run.get("grads", {}).items()}


def spread_of(case: dict, weights: dict, docs: list, want: dict, precision: str, replay: dict | None = None, runs: int = SPREAD_RUNS) -> dict:
    """Error of `runs` equally valid runs: the model as it is, and with its channels in other orders and its loss on other scales.

    A scale that is no power of two makes every rounding of backward another one. Another order alone hardly changes any in bfloat16.
    """
    errors = {}
    for r in range(runs):
        moves = reorder.plan(case["config"], case["specs"], r)
        scale = 2.0 ** (r * 0.618 % 1.0)  # even over the mantissas, for any number of runs
        reference = Reference(case, reorder.apply(moves, weights), precision)
        run = reference.forward(docs, grads=True, replay=replay, loss_scale=scale)
        run["grads"] = reorder.apply(moves, run["grads"], back=True)
        run["activations"] = {k: reorder.activation_back(moves, case["config"], k, v) for k, v in run["activations"].items()}
        for k, v in flatten(run).items():
            errors.setdefault(k, []).append(rel_l2(v, want[k]))
    return errors


def git(*args) -> str:
    return subprocess.run(["git", "-C", str(HERE), *args], capture_output=True, text=True).stdout.strip()


def generator_sha256() -> str:
    digest = hashlib.sha256()
    for p in sorted(HERE.glob("*.py")):
        digest.update(p.name.encode() + b"\0" + p.read_bytes())
    return digest.hexdigest()


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []:
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {torch.backends.cpu.get_cpu_capability()}"
    return platform.processor()


def provenance() -> dict:
    dirty = "-dirty" if git("status", "--porcelain", "--", str(HERE)) else ""
    return dict(format_version=FORMAT_VERSION, generator_commit=git("log", "-1", "--format=%H", "--", str(HERE)) + dirty, generator_sha256=generator_sha256(),
                reference_sha256=source_sha256(), torch=torch.__version__, transformers=transformers.__version__, numpy=np.__version__,
                cpu=cpu_name())


def put(group, name, array, **attrs):
    """Small and incompressible data is stored compact, in the object header; the rest deflated."""
    array = np.asarray(array)
    if array.nbytes > 4096:
        d = group.create_dataset(name, data=array, compression="gzip", compression_opts=9, shuffle=True)
    else:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple(array.shape) if array.shape else h5py.h5s.create(h5py.h5s.SCALAR)
        parent = group.require_group(name.rsplit("/", 1)[0]) if "/" in name else group
        d = h5py.Dataset(h5py.h5d.create(parent.id, name.rsplit("/", 1)[-1].encode(), h5py.h5t.py_create(array.dtype, logical=True), space, plist))
        d[...] = array
    for k, v in attrs.items():
        d.attrs[k] = v


def put_tensor(group, name, tensor, kind, full):
    if full or not tensor.is_floating_point() or tensor.numel() <= sketch.FULL_LIMIT:
        put(group, name, (tensor.double() if tensor.is_floating_point() else tensor).numpy())
    else:
        put(group, name, sketch.make(name, tensor, kind), kind=np.bytes_(kind), shape=np.array(tensor.shape, dtype=np.int64))


def strings(values) -> np.ndarray:
    return np.array([v.encode() for v in values], dtype="S")


def write_case(path: pathlib.Path, name: str, case: dict, seed, weights, docs, gap, error, run, spread, full: bool):
    specs = case["specs"]
    with h5py.File(path, "w", libver=("v110", "v110")) as f:
        f.attrs["case"] = np.bytes_(name)
        for k, v in provenance().items():
            f.attrs[k] = np.bytes_(v) if isinstance(v, str) else np.int64(v)
        f.attrs["seed"] = np.int64(seed)
        f.attrs["carried_selection"] = np.int64(case["carry"])
        f.attrs["weights_sha256"] = np.bytes_(W.sha256(specs, weights))
        for k in gap:
            f.attrs[f"min_gap_{k}"], f.attrs[f"f32_score_error_{k}"] = np.float64(gap[k]), np.float64(error[k])
        put(f, "config", np.frombuffer(case.get("config_text", json.dumps(case["config"])).encode(), dtype=np.uint8))
        put(f, "documents/ids", torch.cat(docs).numpy())
        put(f, "documents/cu_seqlens", np.concatenate([[0], np.cumsum([len(d) for d in docs])]).astype(np.int64))
        if "checkpoint" in case:
            f.attrs["checkpoint"] = np.bytes_(case["checkpoint"])  # a folder beside this file
        else:
            w = f.create_group("weights")
            put(w, "names", strings(s.name for s in specs))
            put(w, "dtypes", strings(s.dtype for s in specs))
            put(w, "shapes", np.array([list(s.shape) + [-1] * (3 - len(s.shape)) for s in specs], dtype=np.int64))
            put(w, "rules", np.array([[s.offset, s.amplitude] for s in specs]))
        g = f.create_group("f64")
        put(g, "logits", run["logits"].numpy())
        put(g, "logprobs", run["logprobs"].numpy())
        put(g, "loss", np.float64(run["loss"]))
        a, d = g.create_group("activations"), g.create_group("grads")
        for k, v in run["activations"].items():
            put_tensor(a, k, v, "tokens", full)
        for k, v in run["grads"].items():
            put_tensor(d, k, v, "tensor", full)
        if spread:
            s = f.create_group("spread")
            put(s, "names", strings(spread["f32"].keys()))
            for k in ("f32", "bf16", "bf16_replay"):
                put(s, k, np.array(list(spread[k].values())))


def make_case(name: str, out: pathlib.Path, first_seed: int, full: bool, quick: bool) -> dict:
    case, start = dict(CASES[name]), time.time()
    seed, weights, docs, gap, error = find_seed(case, first_seed)
    run = Reference(case, weights, "f64").forward(docs, grads=True)
    want, spread = flatten(run), None
    if not quick:
        spread = {p: spread_of(case, weights, docs, want, p) for p in ("f32", "bf16")}
        experts = {k.removesuffix(".experts"): v for k, v in run["activations"].items() if k.endswith("gate.experts")}
        spread["bf16_replay"] = spread_of(case, weights, docs, want, "bf16", experts) if experts else spread["bf16"]
        assert list(spread["f32"]) == list(spread["bf16"]) == list(spread["bf16_replay"])
    if "checkpoint" in case:  # gradients under the names of its files
        renamed = {k: make_hf_checkpoint.file_name(k) for k in run["grads"]}
        run["grads"] = {renamed[k]: v for k, v in run["grads"].items()}
        renamed = {"grads/" + k: "grads/" + v for k, v in renamed.items()}
        spread = spread and {p: {renamed.get(k, k): e for k, e in errors.items()} for p, errors in spread.items()}
    path = out / name / "v1.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_case(path.with_suffix(".part"), name, case, seed, weights, docs, gap, error, run, spread, full)
    os.replace(path.with_suffix(".part"), path)
    files = make_hf_checkpoint.write(path.parent, seed) if "checkpoint" in case else []
    size = path.stat().st_size
    line = f"{name:16s} seed {seed:3d} gap " + " ".join(f"{k} {v:.1e}" for k, v in gap.items()) + f" {size / 1024:7.1f} KiB"
    if spread:
        line += f" f32 logits {max(spread['f32']['logits']):.1e} bf16 logits " + " ".join(f"{e:.1e}" for e in spread["bf16"]["logits"])
        line += f" replayed {max(spread['bf16_replay']['logits']):.1e}"
    print(line, f"{time.time() - start:.0f} s", flush=True)
    made = dict(description=case["description"], seed=seed)
    return made | (dict(checkpoint_files=[digest_of(out, file) for file in files]) if files else {})


def digest_of(out: pathlib.Path, file: pathlib.Path) -> dict:
    return dict(file=file.relative_to(out).as_posix(), sha256=hashlib.sha256(file.read_bytes()).hexdigest(), size=file.stat().st_size)


def write_manifest(out: pathlib.Path, made: dict):
    path = out / "MANIFEST.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    p = provenance()
    for name, about in made.items():
        cases[name] = dict(**digest_of(out, out / name / "v1.h5"), **about,
                           generator_commit=p["generator_commit"], torch=p["torch"], transformers=p["transformers"])
    text = json.dumps(dict(format_version=FORMAT_VERSION, cases=dict(sorted(cases.items()))), indent=1)
    path.with_suffix(".part").write_text(text + "\n")
    os.replace(path.with_suffix(".part"), path)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--case", default="all")
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--full", action="store_true")
    p.add_argument("--quick", action="store_true")
    p.add_argument("--threads", type=int, default=1, help="torch threads (default 1: sums in one fixed order)")
    p.add_argument("--list", action="store_true")
    a = p.parse_args()
    if a.list:
        for name, case in CASES.items():
            print(f"{name:16s} {case['description']}")
        print(f"{'indexer_fp8':16s} {indexer_fp8.DESCRIPTION}")
        return 0
    if a.out is None:
        p.error("--out DIR is required")
    names = [*CASES, "indexer_fp8"] if a.case == "all" else a.case.split(",")
    unknown = [n for n in names if n not in CASES and n != "indexer_fp8"]
    if unknown:
        p.error(f"unknown case {', '.join(unknown)}; have {', '.join([*CASES, 'indexer_fp8'])}")
    torch.set_num_threads(a.threads)
    for name in names:
        if name == "indexer_fp8":
            made = indexer_fp8.write(a.out / name / "v1.h5", a.seed, provenance(), put)
        else:
            made = make_case(name, a.out, a.seed, a.full, a.quick)
        write_manifest(a.out, {name: made})
    return 0


if __name__ == "__main__":
    sys.exit(main())
