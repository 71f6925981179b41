"""Opens checkpoint folders in transformers and compares them.

usage: check_export.py EXPORTED REFERENCE
Both folders must load without a missing, unexpected or mismatched text tensor, hold the same text weights in the same dtypes, and give
identical logits on fixed documents. A folder of a text-only config is opened through the text model. Prints one line; exit 0 or 1.
"""
import json
import pathlib
import sys
import warnings

warnings.filterwarnings("ignore")
import torch
from safetensors import safe_open
from transformers import Glm5NextConfig, Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration, Glm5NextTextModel


def load(folder: pathlib.Path):
    """(text weights by module name, logits) of a folder."""
    config = json.loads((folder / "config.json").read_text())
    composite = config["model_type"] == "glm5_next"
    cls = Glm5NextForConditionalGeneration if composite else Glm5NextTextModel
    model, info = cls.from_pretrained(folder, output_loading_info=True, attn_implementation="eager", experts_implementation="eager")
    text = {k: [n for n in v if "visual" not in n] for k, v in info.items() if k != "error_msgs"}
    if not composite:  # this transformers has no text model with a head
        text["unexpected_keys"] = [n for n in text["unexpected_keys"] if n != "lm_head.weight"]
    if any(text.values()) or info["error_msgs"]:
        sys.exit(f"{folder}: {text} {info['error_msgs']}")
    body = model.model.language_model if composite else model
    weights = {n: t for n, t in body.state_dict().items()}
    head = model.lm_head.weight if composite else read(folder, "lm_head.weight")
    weights["lm_head"] = head
    ids = torch.arange(1, 48).remainder(config.get("text_config", config)["vocab_size"])[None]
    with torch.no_grad():
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state
        return weights, torch.nn.functional.linear(hidden, head.to(hidden.dtype))


def read(folder: pathlib.Path, name: str) -> torch.Tensor:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            if name in f.keys():
                return f.get_tensor(name)
    sys.exit(f"{folder}: no {name}")


def main():
    exported, reference = (pathlib.Path(a) for a in sys.argv[1:3])
    (a, x), (b, y) = load(exported), load(reference)
    if a.keys() != b.keys():
        sys.exit(f"different parameters: {sorted(a.keys() ^ b.keys())}")
    bad = [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]
    if bad:
        sys.exit(f"different values: {bad}")
    if not torch.equal(x, y):
        sys.exit(f"different logits: max abs {(x - y).abs().max().item()}")
    print(f"{len(a)} tensors and {x.numel()} logits are equal")


if __name__ == "__main__":
    main()
