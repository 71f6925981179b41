# Activations and log-probabilities of any PyTorch model under the names of its modules, for `lockstep compare`.
# Usage: python dump_from_pytorch.py CHECKPOINT DOCS.json OUT.safetensors
import json
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForMultimodalLM  # or the class of your checkpoint

checkpoint, docs, out = sys.argv[1:]
model = AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
documents, rows = json.load(open(docs))["documents"], {}


def keep(name):
    def hook(module, args, output):
        value = output[0] if isinstance(output, tuple) else output
        if torch.is_tensor(value) and value.is_floating_point():
            rows.setdefault(name, []).append(value.detach().squeeze(0) if value.dim() > 2 else value.detach())

    return hook


for name, module in model.named_modules():
    module.register_forward_hook(keep(name))
with torch.no_grad():
    for ids in documents:
        logits = model(torch.tensor([ids])).logits[0]
        next_token = logits[:-1].float().log_softmax(-1).gather(1, torch.tensor(ids[1:], dtype=torch.long)[:, None])
        rows.setdefault("logits", []).append(logits)
        rows.setdefault("logprobs", []).append(torch.cat([next_token[:, 0], torch.tensor([float("nan")])]))
tokens = sum(map(len, documents))
one_row_each = {n: p for n, p in rows.items() if sum(map(len, p)) == tokens and len({v.shape[1:] for v in p}) == 1}
save_file({name: torch.cat(parts).contiguous() for name, parts in one_row_each.items()}, out)
