"""Runs a tiny model with a preset's heads once through its life: prefill, more of it, decoding, training.

usage: preset_models.py LIBRARY PRESET H HV K V TOKENS SERVED [LIFE], the library being transformers or
fla, SERVED operators or layers, and LIFE padded (the default) or, of FLA's layers, packed (with an
attention mask) or unbounded (the gate of kda)

Prints what wyvern.prepared() says as JSON. In a process of its own, so that its cache is WYVERN_CACHE_DIR's.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch

import wyvern

SHORT = 64  # the most tokens that FLA's layers take by the recurrent pass
COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def model_of_transformers(preset: str, H: int, HV: int, K: int, V: int) -> Any:
    import transformers

    if preset.startswith("kimi"):
        config = transformers.KimiLinearConfig(
            **COMMON, num_local_experts=4, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
            v_head_dim=32, linear_head_dim=K, linear_num_heads=H,
        )  # fmt: skip
        return transformers.KimiLinearForCausalLM(config)
    own = {
        "linear_key_head_dim": K,
        "linear_value_head_dim": V,
        "linear_num_key_heads": H,
        "linear_num_value_heads": HV,
        "head_dim": 32,
    }
    if preset.startswith("qwen3.5"):
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**COMMON, **own))
    config = transformers.Qwen3NextConfig(
        **COMMON, **own, num_experts=4, shared_expert_intermediate_size=32
    )
    return transformers.Qwen3NextForCausalLM(config)


def live_with_transformers(model: Any, tokens: int, whole: bool) -> None:
    import wyvern.transformers

    model = model.bfloat16()
    ids = torch.randint(0, COMMON["vocab_size"], (1, 2 * tokens + 1))
    with wyvern.transformers.enable(layers=whole):
        with torch.no_grad():
            past = model(ids[:, :tokens], use_cache=True).past_key_values
            past = model(ids[:, tokens:-1], past_key_values=past, use_cache=True).past_key_values
            model(ids[:, -1:], past_key_values=past, use_cache=True)
        train = functools.partial(model, ids[:, :tokens], labels=ids[:, :tokens], use_cache=False)
        train().loss.backward()
        ends = torch.tensor([0, tokens], dtype=torch.int32)
        packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        if whole and model.config.model_type != "kimi_linear":  # or their convolution knows no pack
            packed["seq_idx"] = torch.zeros(1, tokens, dtype=torch.int32)
        train(**packed, max_length_q=tokens, max_length_k=tokens).loss.backward()
    assert not wyvern.transformers.report().declined, wyvern.transformers.report()


def layer_of_fla(preset: str, H: int, HV: int, K: int, V: int, bounded: bool) -> Any:
    from fla import layers

    common = {"hidden_size": 64, "layer_idx": 0}
    heads = {"head_dim": K, "num_heads": H, "expand_v": V / K}
    if preset.startswith("kimi"):
        bound = -5.0 if bounded else None
        return layers.KimiDeltaAttention(**common, **heads, num_v_heads=HV, lower_bound=bound)
    if preset == "fla-gdn-1.3b":
        return layers.GatedDeltaNet(**common, **heads, num_v_heads=HV)
    if preset == "fla-gated-deltaproduct":
        return layers.GatedDeltaProduct(
            **common, **heads, num_v_heads=HV, num_householder=1, use_forget_gate=False
        )
    return layers.DeltaNet(
        **common | {"hidden_size": H * K}, num_heads=H, expand_k=1.0, expand_v=V / K
    )


def live_with_fla(layer: Any, tokens: int, whole: bool, masked: bool) -> None:
    from fla.models.utils import Cache

    import wyvern.fla

    layer = layer.bfloat16()
    x = torch.randn(1, 2 * tokens + 1, layer.hidden_size).bfloat16()

    def mask(count: int) -> torch.Tensor | None:
        return torch.ones(1, count, dtype=torch.int64) if masked else None

    def generate(*lengths: int) -> None:
        past, first = Cache(), 0
        for length in lengths:
            part = x[:, first : first + length]
            first += length
            _, _, past = layer(part, mask(first), past_key_values=past, use_cache=True)

    with wyvern.fla.enable(layers=whole):
        layer.eval()
        with torch.no_grad():
            generate(tokens, tokens, 1)
            generate(SHORT, SHORT)
        layer.train()
        layer(x[:, :tokens], mask(tokens))[0].sum().backward()
    assert not wyvern.fla.report().declined, wyvern.fla.report()


def main() -> None:
    library, preset, *numbers = sys.argv[1:8]
    whole = sys.argv[8] == "layers"
    life = sys.argv[9] if len(sys.argv) > 9 else "padded"
    H, HV, K, V, tokens = map(int, numbers)
    torch.manual_seed(0)
    if library == "transformers":
        live_with_transformers(model_of_transformers(preset, H, HV, K, V), tokens, whole)
    else:
        layer = layer_of_fla(preset, H, HV, K, V, life != "unbounded")
        live_with_fla(layer, tokens, whole, life == "packed")
    print(json.dumps(wyvern.prepared()))


if __name__ == "__main__":
    main()
