"""SGLang, in the process that run.py is. Weights are files, which transformers writes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_rows import Settings
from local_models import FIRST_WORD, draw

Tokens = list[int]

BIAS = 100.0  # a logit beside which all others are small


def environment(settings: Settings, wyvern: bool) -> dict[str, str]:
    found = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "WYVERN_SGLANG": "1" if wyvern else "0",
    }
    return found if wyvern else {**found, "SGLANG_PLUGINS": "none"}


def caches(folder: str) -> dict[str, str]:
    """The folders of compiled files, as environment variables."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "WYVERN_CACHE_DIR": f"{folder}/wyvern",
    }


def start(model: str, settings: Settings) -> SglangEngine:
    if not list(Path(model).glob("*.safetensors")):
        _write_weights(model)
    return SglangEngine(model, settings)


def _write_weights(folder: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = (Path(folder) / "config.json").read_text()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for name, parameter in model.named_parameters():
        draw(name, parameter, True)
    model.save_pretrained(folder)
    (Path(folder) / "config.json").write_text(config)  # as it was, not as transformers writes it
    torch.set_default_dtype(torch.float32)


class SglangEngine:
    def __init__(self, model: str, settings: Settings) -> None:
        import sglang

        if settings.drafts:
            raise ValueError(f"drafts are {settings.drafts}; SGLang is run without drafts here")
        self._engine = sglang.Engine(**_arguments(model, settings))

    def prepare(self) -> int:
        """The weights are read from files; 0."""
        return 0

    def prompt_logprobs(self, prompts: list[Tokens]) -> list[list[float]]:
        outputs = self._generate(prompts, [{"max_new_tokens": 1}] * len(prompts), logprob_start_len=0)
        return [[one[0] for one in output["meta_info"]["input_token_logprobs"][1:]] for output in outputs]

    def forced_logprobs(self, prompts: list[Tokens], answers: list[Tokens]) -> list[list[float]]:
        """A bias forces an answer's first token all along, and is in the log-probabilities; so the difference
        of those of two other tokens, which it leaves as it is, stands for the token's."""
        options = [
            {"max_new_tokens": len(answer), "logit_bias": {str(answer[0]): BIAS}} for answer in answers
        ]
        pair = [FIRST_WORD, FIRST_WORD + 1]
        outputs = self._generate(prompts, options, token_ids_logprob=[pair] * len(prompts))
        found = [output["meta_info"]["output_token_ids_logprobs"] for output in outputs]
        return [[at[0][0] - at[1][0] for at in one] for one in found]

    def generate(self, prompts: list[Tokens], count: int) -> None:
        self._engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        )

    def report(self) -> dict[str, object]:
        import wyvern.sglang

        told = wyvern.sglang.report()
        if not (told.served or told.declined):
            return {}
        ranks = [{"served": told.served, "declined": told.declined, "traced": told.traced}]
        return {"ranks": ranks, "text": str(told)}

    def close(self) -> None:
        self._engine.shutdown()

    def _generate(
        self, prompts: list[Tokens], options: list[dict[str, Any]], **asked: Any
    ) -> list[dict[str, Any]]:
        sampling = [{"temperature": 0, "ignore_eos": True, **one} for one in options]
        return self._engine.generate(
            input_ids=prompts, sampling_params=sampling, return_logprob=True, **asked
        )


def _arguments(model: str, settings: Settings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model_path": model,
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "skip_tokenizer_init": True,
        "disable_cuda_graph": not settings.graphs,
        "disable_radix_cache": not settings.prefix_caching,
        "chunked_prefill_size": settings.batched_tokens if settings.chunked else -1,
        "context_length": settings.max_model_len,
        "max_running_requests": 64,
        "mem_fraction_static": 0.4,
        "tp_size": settings.tensor_parallel,
        "enable_deterministic_inference": settings.invariant,
        "random_seed": 0,
        "log_level": "warning",
    }
    if settings.ssm_dtype != "auto":
        arguments["mamba_ssm_dtype"] = settings.ssm_dtype
    if settings.prefix_caching:
        arguments["mamba_radix_cache_strategy"] = "extra_buffer"
    return arguments
