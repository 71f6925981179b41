"""Runs the transformers glm5_next text model as the reference, in true float64, float32 or bfloat16.

The modeling file casts to float32 in many places. For the float64 run its text is loaded again under another name with every such cast
raised to float64, and the run happens under a guard that fails when any operator, forward or backward, returns another float dtype.
For every precision the loaded text also gets lines that keep the scores behind each top-k choice, so that near ties can be rejected, and
that let a caller replay expert choices, and, for cases that share an indexer across KDA layers, three lines that carry the selection there (the reference drops it).
"""
import hashlib
import importlib.util
import math
import pathlib
import sys
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Glm5NextTextConfig
from transformers.models.glm5_next import modeling_glm5_next as original

import weights as W

SOURCE = pathlib.Path(original.__file__)
# What a transformers 5.24.0 modeling file contains; anything else is another program and needs another look.
CASTS = {"torch.float32": "torch.float64", ".float()": ".double()", "dtype=torch.float)": "dtype=torch.float64)"}


def _replace_once(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise RuntimeError(f"{SOURCE}: expected exactly one {old!r}, found {text.count(old)}; this is not the transformers 5.24.0 file")
    return text.replace(old, new)


def load_modeling(double: bool, carry: bool) -> types.ModuleType:
    text = SOURCE.read_text()
    k = "        select_k = min(self.index_topk // self.index_kpool, index_scores.shape[-1])\n"
    text = _replace_once(text, k, k + "        self.kept_scores = (index_scores, valid_candidates, select_k)\n")
    k = "        scores_for_choice = scores_for_choice.masked_fill(~score_mask.bool(), float(\"-inf\"))\n"
    text = _replace_once(text, k, "        raw_choice = scores_for_choice\n" + k + "        self.kept_scores = (raw_choice, scores_for_choice, group_scores)\n")
    k = "        topk_weights = scores.gather(1, topk_indices)\n"
    text = _replace_once(text, k, "        topk_indices = self.replay.pop(0) if self.replay else topk_indices\n" + k)
    if carry:
        k = "return attn_output, attn_weights, topk_indices if self.next_skip_topk else None"
        text = _replace_once(text, k, "return attn_output, attn_weights, topk_indices")
        k = "        hidden_states = self.input_layernorm(hidden_states)\n        topk_indices = None\n"
        text = _replace_once(text, k, k.replace("= None", "= prev_topk_indices"))
    if double:
        for old, new in CASTS.items():
            text = text.replace(old, new)
    name = f"{original.__package__}.golden_{'f64' if double else 'plain'}{'_carry' if carry else ''}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(SOURCE))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(SOURCE)
    module.__package__ = original.__package__
    sys.modules[name] = module
    exec(compile(text, str(SOURCE), "exec"), module.__dict__)
    module.Glm5NextTextTopkRouter.replay = None
    return module


def source_sha256() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


class OnlyFloat64(TorchDispatchMode):
    """Fails when an operator returns a floating tensor that is not float64."""

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64:
                raise RuntimeError(f"{func} returned {t.dtype} in a float64 run")
        return out


DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}


class Reference:
    """The text model and its head, built from file-named weights."""

    def __init__(self, case: dict, file_weights: dict, precision: str):
        self.precision, self.case = precision, case
        c = {k: v for k, v in case["config"].items() if k not in ("architectures", "model_type")}
        config = Glm5NextTextConfig(**c)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        self.config = config
        modeling = load_modeling(precision == "f64", case["carry"])
        torch.manual_seed(0)
        self.body = modeling.Glm5NextTextModel(config)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        assert self.body.config._attn_implementation == "eager" and self.body.config._experts_implementation == "eager"
        self._cast()
        self._load(file_weights)
        self.body.eval()
        self.kept, self.scores = {}, {}
        self._hook()

    def _cast(self):
        if self.precision == "f64":
            self.body.double()
            self.head.double()
        elif self.precision == "bf16":
            keep = type(self.body)._keep_in_fp32_modules_strict
            for name, t in [*self.body.named_parameters(), *self.body.named_buffers()]:
                if t.is_floating_point() and not any(k in name for k in keep):
                    t.data = t.data.bfloat16()
            self.head.bfloat16()

    def _load(self, file_weights):
        named = W.to_reference(file_weights, self.config.num_hidden_layers)
        own = {"model." + k: t for k, t in [*self.body.named_parameters(), *self.body.named_buffers()]}
        own["lm_head.weight"] = self.head.weight
        if set(own) != set(named):
            raise RuntimeError(f"weights and reference differ in names: {sorted(set(own) ^ set(named))[:8]}")
        with torch.no_grad():
            for k, t in own.items():
                if t.shape != named[k].shape:
                    raise RuntimeError(f"{k}: reference has {tuple(t.shape)}, formula {tuple(named[k].shape)}")
                t.copy_(named[k])

    def _keep(self, name, tensor):
        self.kept.setdefault(name, []).append(tensor.detach().reshape(tensor.shape[-2] if tensor.dim() == 2 else tensor.shape[1], -1))

    def _hook(self):
        def plain(name):
            return lambda m, i, o: self._keep(name, o[0] if isinstance(o, tuple) else o)

        def streams(name):
            def hook(m, i, o):
                for part, t in zip(("post", "comb", "collapsed"), o):
                    self._keep(f"{name}.{part}", t)
            return hook

        def gate(name):
            def hook(m, i, o):
                order = o[2].argsort(-1)
                self._keep(f"{name}.weights", o[1].gather(1, order))
                self._keep(f"{name}.experts", o[2].gather(1, order).int())
                self.scores.setdefault(name, []).append(tuple(t.detach() for t in m.kept_scores))
            return hook

        def indexer(name):
            def hook(m, i, o):
                big = torch.iinfo(torch.int32).max
                rows = torch.where(o < 0, torch.full_like(o, big), o).sort(-1).values
                self._keep(name, torch.where(rows == big, torch.full_like(rows, -1), rows + self.offset * (rows != big).int()))
                self.scores.setdefault(name, []).append(m.kept_scores)
            return hook

        self.offset = 0
        for name, m in self.body.named_modules():
            kind = type(m).__name__.removeprefix("Glm5NextText")
            if kind == "HyperConnection":
                m.register_forward_hook(streams(name))
            elif kind == "TopkRouter":
                m.register_forward_hook(gate(name))
            elif kind == "Indexer":
                m.register_forward_hook(indexer(name))
            elif kind in ("RMSNorm", "RMSNormGated", "ForgetGate", "LinearAttention", "Attention", "MLP", "MoE", "Experts", "DecoderLayer"):
                m.register_forward_hook(plain(name))

    def forward(self, documents: list, grads: bool, replay: dict | None = None, loss_scale: float = 1.0):
        """documents: list of id tensors; replay: expert ids [T, k] by gate name, taken instead of choosing; loss_scale: multiplies the loss
        before backward and divides the gradients after it. Returns dict with logits, logprobs, loss, activations and, asked for, gradients
        under file names."""
        self.kept, self.scores, self.offset = {}, {}, 0
        params = {"model." + k: p for k, p in self.body.named_parameters()} | {"lm_head.weight": self.head.weight}
        for name, ids in (replay or {}).items():
            self.body.get_submodule(name).replay = list(ids.long().split([len(d) for d in documents]))
        targets = sum(max(len(d) - 1, 0) for d in documents)
        logits, logprobs, total, sums = [], [], 0.0, {}
        for ids in documents:
            guard = OnlyFloat64() if self.precision == "f64" else _nothing()
            with guard, torch.set_grad_enabled(grads):
                z = self.head(self.body(input_ids=ids[None], use_cache=False).last_hidden_state)[0]
                wide = z if self.precision == "f64" else z.float()
                lp = torch.log_softmax(wide, -1)[:-1].gather(1, ids[1:, None])[:, 0]
                if grads and len(ids) > 1:
                    (-lp.sum() / targets * loss_scale).backward()
            total -= lp.double().sum().item()
            logits.append(z.detach())
            logprobs.append(torch.cat([lp.detach(), lp.new_full((1,), math.nan)]))
            self.offset += len(ids)
            if grads:  # each document's gradient in the model's dtype; the sum over documents adds no rounding
                for k, p in params.items():
                    if p.grad is not None:
                        grad = p.grad.double() / loss_scale
                        sums[k] = sums[k] + grad if k in sums else grad
                        p.grad = None
        out = dict(logits=torch.cat(logits), logprobs=torch.cat(logprobs), loss=total / max(targets, 1),
                   activations={k: torch.cat(v) for k, v in self.kept.items()})
        if grads:
            missing = {k for k in params if k not in sums}
            if any(".indexer." not in k for k in missing) or any(".indexer." in k for k in sums):
                raise RuntimeError(f"unexpected set of tensors without gradient: {sorted(missing)[:5]}")
            out["grads"] = W.from_reference(sums, self.case["specs"])
        return out


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *a):
        return False


def gaps(scores: dict, wide: dict, config) -> dict:
    """Smallest distance at a top-k boundary, per kind of choice, in `wide` (float64); and the largest score error of `scores`."""
    gap = dict(pools=math.inf, experts=math.inf, groups=math.inf)
    error = dict(pools=0.0, experts=0.0, groups=0.0)

    def boundary(kind, s, k):  # s [T, N], -inf or the lowest finite value where not a candidate
        if s.shape[-1] <= k:
            return
        top = s.topk(k + 1, dim=-1).values
        legal = top[:, k] > -1e30
        if legal.any():
            gap[kind] = min(gap[kind], (top[:, k - 1] - top[:, k])[legal].min().item())

    for name, documents in wide.items():
        for d, kept in enumerate(documents):
            other = scores[name][d] if scores else None
            if name.endswith("indexer"):
                s, valid, k = kept
                boundary("pools", s[0], k)
                if other is not None and valid.any():
                    error["pools"] = max(error["pools"], (s - other[0].double())[valid].abs().max().item())
            else:
                raw, masked, group = kept
                boundary("experts", masked, config["num_experts_per_tok"])
                if config["n_group"] > 1:
                    boundary("groups", group, config["topk_group"])
                if other is not None:
                    error["experts"] = max(error["experts"], (raw - other[0].double()).abs().max().item())
                    error["groups"] = max(error["groups"], (group - other[2].double()).abs().max().item())
    return gap, error
