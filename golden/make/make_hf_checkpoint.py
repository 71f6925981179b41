"""Small composite checkpoint written by transformers itself, kept in golden/data/hf-tiny.

usage: make_hf_checkpoint.py [--out golden/data/hf-tiny] [--seed 1]
  released/   save_pretrained as it is: one tensor per expert, three convolutions, flat hc_* names (245-tensor style of published files)
  modules/    save_pretrained(save_original_format=False): stacked experts, one convolution, forget_gate, attn_hc
Both hold the same bfloat16 and float32 values (a seeded generator, norms and biases away from their defaults), a vision tower of one
block that Lockstep drops, and config.json. Made again with the same library versions, the files come out byte for byte the same.
The golden case hf-tiny holds what transformers computes from them.
"""
import argparse
import pathlib
import shutil
import tempfile
import warnings

warnings.filterwarnings("ignore")
import torch
from safetensors.torch import load_file
from transformers import Glm5NextConfig
from transformers.utils import logging
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

TEXT = dict(
    vocab_size=67, hidden_size=48, intermediate_size=80, moe_intermediate_size=16, num_hidden_layers=4, num_attention_heads=3,
    num_key_value_heads=3, n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=1, q_lora_rank=20, kv_lora_rank=12,
    qk_nope_head_dim=10, v_head_dim=14, index_n_heads=24, index_head_dim=8, index_topk=8, index_kpool=4, linear_head_dim=8,
    linear_num_heads=3, linear_conv_kernel_dim=4, pad_token_id=0,
    layer_types=["linear_attention"] * 3 + ["indexed_attention"], mlp_layer_types=["dense"] + ["sparse"] * 3)
VISION = dict(hidden_size=8, depth=1, num_heads=2, intermediate_size=8, out_hidden_size=48, projection_intermediate_size=8,
              patch_size=2, temporal_patch_size=1, image_size=8)


FORMS = (("released", True), ("modules", False))  # folder, save_original_format


def build(seed: int) -> torch.nn.Module:
    model = Glm5NextForConditionalGeneration._from_config(Glm5NextConfig(text_config=TEXT, vision_config=VISION), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(19 + seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            u = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
            is_norm = name.endswith(("norm.weight", "norm1.weight", "norm2.weight"))
            offset = 1.0 if is_norm or name.endswith("_hc.scale") else 0.0
            amplitude = 0.3 if tensor.dim() < 2 else (3.0 / tensor[0].numel()) ** 0.5
            tensor.copy_((offset + amplitude * u).to(tensor.dtype))
    return model.eval()


def write(out: pathlib.Path, seed: int) -> list:
    """Writes both forms below `out`; returns the files, none touched that already holds the same bytes."""
    logging.disable_progress_bar()
    files, model = [], build(seed)
    with tempfile.TemporaryDirectory() as temporary:
        for form, original in FORMS:
            made = pathlib.Path(temporary) / form
            model.save_pretrained(made, save_original_format=original)
            (made / "generation_config.json").unlink(missing_ok=True)
            (out / form).mkdir(parents=True, exist_ok=True)
            for file in sorted(made.iterdir()):
                files.append(out / form / file.name)
                if not files[-1].exists() or files[-1].read_bytes() != file.read_bytes():
                    shutil.copyfile(file, files[-1])
    return files


def read(folder: pathlib.Path) -> tuple:
    """(text of config.json, text tensors under the names of a text-only checkpoint) of a folder in released form."""
    tensors = {k.replace("model.language_model.", "model."): t for k, t in load_file(folder / "model.safetensors").items()}
    return (folder / "config.json").read_text(), {k: t for k, t in tensors.items() if ".visual." not in k}


def file_name(name: str) -> str:
    """The name that a tensor of a text-only checkpoint has in these files."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1] / "data" / "hf-tiny")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    for file in write(a.out, a.seed):
        print(file, file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
