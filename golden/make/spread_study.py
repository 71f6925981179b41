"""How far may one more valid run exceed the worst of five? usage: spread_study.py [--case NAME[,NAME]] [--runs 25] [--draws 4000]

A stored case keeps the errors of five runs of the reference, and a limit is a factor times their worst. This measures what that worst is
worth: it makes many more runs (other channel orders and loss scales), draws six of them again and again, and divides the error of the sixth
by the worst of the other five. Tensors are grouped by their number of elements. Columns: tensors seen; the median of
2 mean(e^2)^2 / var(e^2), the degrees of freedom a tensor's error has; quantiles of the ratio over draws of all tensors of the group, and the
ratio that a Gaussian error of as many free elements would have at the last quantile. A last table judges all tensors of a sixth run by the
limits that the other five set (golden/compare/limits.hpp): by case, the share of draws with a tensor over its limit and how far over.
"""
import argparse
import os
import sys
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import numpy as np
import torch

import make_goldens as make
from cases import CASES
from reference import Reference

GROUPS = [(1, 1), (2, 3), (4, 8), (9, 24), (25, 128), (129, 1024), (1025, 1 << 40)]
QUANTILES = (0.5, 0.99, 0.999, 0.9999)
PRECISIONS = ("f32", "bf16", "bf16_replay")


def errors_of(name: str, runs: int) -> dict:
    """precision -> [(elements, name, errors [runs])]"""
    case = dict(CASES[name])
    seed, weights, docs, _, _ = make.find_seed(case, 1)
    run = Reference(case, weights, "f64").forward(docs, grads=True)
    want, out = make.flatten(run), {}
    experts = {k.removesuffix(".experts"): v for k, v in run["activations"].items() if k.endswith("gate.experts")}
    for precision in PRECISIONS:
        replay = experts if precision == "bf16_replay" else None
        spread = make.spread_of(case, weights, docs, want, precision.split("_")[0], replay, runs)
        out[precision] = [(want[k].numel(), f"{name}/{k}", np.array(e)) for k, e in spread.items()]
        print(f"{name} seed {seed} {precision}: {runs} runs", file=sys.stderr, flush=True)
    return out


def ratios(errors: np.ndarray, draws: int, rng) -> np.ndarray:
    """[draws]: the sixth of six different runs over the worst of the other five."""
    picked = np.argsort(rng.random((draws, len(errors))), axis=1)[:, :6]
    e = errors[picked]
    return e[:, 5] / e[:, :5].max(1)


def gaussian(elements: float, quantile: float, rng) -> float:
    e = np.sqrt(rng.gamma(elements / 2, size=(6, 400000)))
    return float(np.quantile(e[5] / e[:5].max(0), quantile))


def over_limits(rows: list, precision: str, draws: int, rng) -> dict:
    """case -> [draws]: the largest share of its limit that any tensor of a sixth run reaches."""
    factor = 2.0 if precision == "f32" else 1.25
    slack = lambda n: next((s for most, s in ((1, 3.0), (3, 2.4), (24, 1.75), (1024, 1.4)) if n <= most), 1 + 4 / 128**0.5)
    out = {}
    for case in dict.fromkeys(name.split("/")[0] for _, name, _ in rows):
        own = [(n, e) for n, name, e in rows if name.split("/")[0] == case and e.max() > 0]
        picked = np.argsort(rng.random((draws, len(own[0][1]))), axis=1)[:, :6]
        shares = [e[picked[:, 5]] / np.maximum(e[picked[:, :5]].max(1), 1e-300) / factor / slack(n) for n, e in own]
        out[case] = np.maximum.reduce(shares)
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--case", default="tiny,softplus,one_kda,one_dsa,streams2_conv2,groups,hf-tiny")
    p.add_argument("--runs", type=int, default=25)
    p.add_argument("--draws", type=int, default=4000)
    p.add_argument("--keep", help="also write all errors to this .npz file")
    a = p.parse_args()
    torch.set_num_threads(1)
    seen = {precision: [] for precision in PRECISIONS}
    for name in a.case.split(","):
        for precision, rows in errors_of(name, a.runs).items():
            seen[precision] += rows
    if a.keep:
        np.savez_compressed(a.keep, **{f"{precision}|{n}|{name}": e for precision, rows in seen.items() for n, name, e in rows})
    rng = np.random.default_rng(1)
    for precision, rows in seen.items():
        print(f"\n{precision}: ratio of one more run to the worst of five ({a.runs} runs, {a.draws} draws a tensor)")
        print(f"{'elements':>12s} {'tensors':>8s} {'freedom':>8s} " + " ".join(f"{q:>8g}" for q in QUANTILES) + f" {'max':>8s} {'gaussian':>9s}")
        for low, high in GROUPS:
            group = [(n, e) for n, _, e in rows if low <= n <= high and e.max() > 0]
            if not group:
                continue
            drawn = np.concatenate([ratios(np.maximum(e, 1e-300), a.draws, rng) for _, e in group])
            freedom = float(np.median([2 * (e**2).mean() ** 2 / max((e**2).var(ddof=1), 1e-300) for _, e in group]))
            label = f"{low}" if low == high else f"{low}-{high}" if high < 1 << 40 else f"{low}-"
            print(f"{label:>12s} {len(group):8d} {freedom:8.1f} " + " ".join(f"{np.quantile(drawn, q):8.2f}" for q in QUANTILES) +
                  f" {drawn.max():8.2f} {gaussian(low, QUANTILES[-1], rng):9.2f}")
    print("\nruns with a tensor over its limit, and 1 in 1000 above")
    for precision, rows in seen.items():
        cases = over_limits(rows, precision, 5 * a.draws, rng)
        every = np.concatenate(list(cases.values()))
        print(f"{precision}: all {np.mean(every > 1):.4f} {np.quantile(every, 0.999):.2f}; " +
              ", ".join(f"{case} {np.mean(share > 1):.4f}" for case, share in cases.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
