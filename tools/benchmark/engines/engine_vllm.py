"""vLLM, in the process that run.py is."""

from __future__ import annotations

import os
import sys
from typing import Any

from engine_rows import Settings
from local_models import draw

Tokens = list[int]


def environment(settings: Settings, wyvern: bool) -> dict[str, str]:
    found = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions go to workers
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if settings.processes else "0",
        "VLLM_KIMI_K3_GEMM_AR": "0",  # for tensor parallelism, by CuTe DSL
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "WYVERN_VLLM": "1" if wyvern else "0",
    }
    if not wyvern:
        found["VLLM_PLUGINS"] = "none"
    if settings.invariant:
        found["VLLM_BATCH_INVARIANT"] = "1"
    return found


def caches(folder: str) -> dict[str, str]:
    """The folders of compiled files, as environment variables."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "VLLM_CACHE_ROOT": f"{folder}/vllm",
        "WYVERN_CACHE_DIR": f"{folder}/wyvern",
    }


def start(model: str, settings: Settings) -> VllmEngine:
    return VllmEngine(model, settings)


def _draw(model: Any) -> int:
    adds_one = "kimi" not in type(model).__module__
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.dtype.is_floating_point:
            draw(name, parameter, adds_one)
    for module in model.modules():  # copies that Kimi K3's layers make as they load, for their fused decode
        if (taps := getattr(module, "decode_conv1d_weight", None)) is not None:
            taps.copy_(module.conv1d.weight.data.view(3, taps.shape[2], taps.shape[1]).transpose(1, 2))
        if (scales := getattr(module, "decode_norm_weight", None)) is not None:
            scales.copy_(module.o_norm.weight.data)
    return sum(parameter.numel() for parameter in parameters.values())


def _report(_: Any) -> dict[str, object] | None:
    wyvern = sys.modules.get("wyvern.vllm")
    if wyvern is None or not wyvern.is_enabled():
        return None
    told = wyvern.report(own=True)
    return {"served": told.served, "declined": told.declined, "traced": told.traced}


class VllmEngine:
    def __init__(self, model: str, settings: Settings) -> None:
        from vllm import LLM

        self._settings = settings
        self._llm = LLM(**_arguments(model, settings))

    def prepare(self) -> int:
        """Draws the weights; how many there are, in all ranks together."""
        counts = self._llm.apply_model(_draw)
        self._llm.reset_prefix_cache()
        return sum(counts)

    def prompt_logprobs(self, prompts: list[Tokens]) -> list[list[float]]:
        outputs = self._generate(prompts, [{"max_tokens": 1, "prompt_logprobs": 0}] * len(prompts))
        return [
            [
                at[token].logprob
                for token, at in zip(one.prompt_token_ids, one.prompt_logprobs, strict=True)
                if at
            ]
            for one in outputs
        ]

    def forced_logprobs(self, prompts: list[Tokens], answers: list[Tokens]) -> list[list[float]]:
        if self._settings.drafts:  # beside which vLLM replays no trace
            answers = [answer[:1] * len(answer) for answer in answers]
        options = [
            {"max_tokens": len(answer), "logprobs": 0, "allowed_token_ids": answer[:1]}
            if self._settings.drafts
            else {"max_tokens": len(answer), "logprobs": 0, "trace_decode_token_ids": answer}
            for answer in answers
        ]
        outputs = self._generate(prompts, options)
        for one, answer in zip(outputs, answers, strict=True):
            if list(one.outputs[0].token_ids) != answer:
                raise RuntimeError(f"vLLM generated {one.outputs[0].token_ids}, not the answer {answer}")
        return [
            [at[token].logprob for token, at in zip(answer, one.outputs[0].logprobs, strict=True)]
            for one, answer in zip(outputs, answers, strict=True)
        ]

    def generate(self, prompts: list[Tokens], count: int) -> None:
        self._generate(prompts, [{"max_tokens": count}] * len(prompts))

    def report(self) -> dict[str, object]:
        ranks = self._llm.apply_model(_report)
        if None in ranks:
            return {}
        import wyvern.vllm

        return {"ranks": ranks, "text": str(wyvern.vllm.report())}

    def close(self) -> None:
        """Nothing: the process ends."""

    def _generate(self, prompts: list[Tokens], options: list[dict[str, Any]]) -> list[Any]:
        from vllm import SamplingParams

        sampling = [
            SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **one) for one in options
        ]
        return self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )


def _arguments(model: str, settings: Settings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": 64,
        "max_num_batched_tokens": settings.batched_tokens,
        # Without measuring memory, so that engines can start side by side.
        "kv_cache_memory_bytes": int(os.environ.get("ENGINES_KV_GIB", "8")) << 30,
        "gpu_memory_utilization": 0.4,
        "enable_prefix_caching": settings.prefix_caching,
        "enable_chunked_prefill": settings.chunked,
        "enforce_eager": not settings.graphs,
        "tensor_parallel_size": settings.tensor_parallel,
        "mamba_ssm_cache_dtype": settings.ssm_dtype,
    }
    if settings.attention:
        arguments["attention_config"] = {"backend": settings.attention}
    if settings.block_size:
        arguments["block_size"] = settings.block_size
    if "kimi" not in model:
        arguments["additional_config"] = {"gdn_prefill_backend": settings.gdn_prefill}
    elif settings.kda != "auto":
        arguments["additional_config"] = {
            "kda_prefill_backend": settings.kda, "kda_decode_backend": settings.kda,
        }  # fmt: skip
    if settings.drafts == "mtp":
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 2}
    elif settings.drafts == "ngram":
        arguments["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
        }  # fmt: skip
    else:
        arguments["enable_trace_replay"] = True
    return arguments
