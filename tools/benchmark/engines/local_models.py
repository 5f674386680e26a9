"""Models without a download: config.json and a tokenizer of made-up words; engines draw the weights.

The layers have the shapes of the published models, in fewer layers and experts.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

VOCABULARY = 4096
FIRST_WORD = 3  # below it are the special tokens
_SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2}


_COMMON: dict[str, object] = {
    "dtype": "bfloat16", "vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "head_dim": 128, "intermediate_size": 512, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "max_position_embeddings": 65536, "tie_word_embeddings": False,
    "use_cache": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ROPE = {"rope_theta": 10000000, "partial_rotary_factor": 0.25}
# What Qwen3-Next and Qwen3.5 share: every fourth layer is attention.
_QWEN = _COMMON | {
    "full_attention_interval": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "attention_bias": False, "attention_dropout": 0.0,
    "initializer_range": 0.02, "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip
_QWEN3_NEXT = _QWEN | _ROPE | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "use_sliding_window": False,
}  # fmt: skip
# The dense text model, whose drafts vLLM verifies by one fused kernel.
_QWEN3_5 = _QWEN | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
    "mamba_ssm_dtype": "float32", "rope_parameters": _ROPE | {"rope_type": "default"},
}  # fmt: skip
_KIMI_LINEAR = _COMMON | {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 128,
    "num_shared_experts": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
    "model_max_length": 65536,
    "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128,
                           "num_heads": 4, "short_conv_kernel_size": 4},
}  # fmt: skip

MODELS: dict[str, dict[str, object]] = {
    "tiny-qwen3-next": _QWEN3_NEXT,
    "tiny-qwen3.5": _QWEN3_5,
    "tiny-kimi-linear": _KIMI_LINEAR,
    # Eight layers of Qwen3-Next-80B-A3B with 16 of its 512 experts.
    "mid-qwen3-next": _QWEN3_NEXT | {
        "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 16,
        "num_experts_per_tok": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    },
    # Eight layers with the delta rule of Kimi K3 as one of two GPUs has it: 48 of 96 heads, gates with a bound,
    # a full output gate. The experts are few and plain.
    "mid-kimi-k3": _KIMI_LINEAR | {
        "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16,
        "intermediate_size": 4096, "num_experts": 16, "num_experts_per_token": 4, "moe_intermediate_size": 512,
        "linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 128,
                               "num_heads": 48, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
                               "gate_lower_bound": -5.0},
    },
}  # fmt: skip


def write(folder: Path, name: str) -> Path:
    """The model's folder below this one, made where it is missing."""
    model = folder / name
    model.mkdir(parents=True, exist_ok=True)
    words = _SPECIAL | {f"w{i}": i for i in range(FIRST_WORD, VOCABULARY)}
    documents = {
        "config.json": MODELS[name],
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>",
            "eos_token": "</s>",
        },
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
            "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
            "decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
        },
    }  # fmt: skip
    for name, document in documents.items():
        file, text = model / name, json.dumps(document, indent=1)
        if not file.exists() or file.read_text() != text:  # another run may be reading it
            file.write_text(text)
    return model


def draw(name: str, parameter: Any, adds_one_to_norms: bool) -> None:
    """Sets a parameter (a tensor of any device) to values that follow from its name and shape alone: every
    process has the same weights, and layers give numbers of order 1.

    adds_one_to_norms: the model's RMSNorm multiplies by 1 + weight, that of its gated output aside.
    """
    import torch

    generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
    value = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    last = name.rsplit(".", 1)[-1]
    if last == "A_log":
        value.uniform_(1, 16, generator=generator).log_()
    elif last == "dt_bias":
        value.uniform_(-6, -1, generator=generator)
    elif "norm" in name and parameter.dim() == 1:
        gated = ".linear_attn.norm" in name or "o_norm" in name
        value.fill_(0.0 if adds_one_to_norms and not gated else 1.0)
    elif parameter.dim() >= 2:
        scale = 1.0 if "embed" in name else 1.2 * parameter.shape[-1] ** -0.5
        value.normal_(0, scale, generator=generator)
    else:
        value.zero_()
    with torch.no_grad():
        parameter.copy_(value)
