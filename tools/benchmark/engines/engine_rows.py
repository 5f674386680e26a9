"""What is run: models, and for each a base row beside rows in which one option differs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from local_models import MODELS

ENGINE, WYVERN = "engine", "wyvern"  # the sides of a row: the engine alone, and with Wyvern


@dataclass(frozen=True)
class Settings:
    """How an engine is started. attention: the backend's name, "" for the engine's choice."""

    graphs: bool = True
    prefix_caching: bool = False
    gdn_prefill: str = "triton"  # vLLM's gdn_prefill_backend
    kda: str = "auto"  # vLLM's kda_prefill_backend and kda_decode_backend, which Kimi K3's layers have
    drafts: str = ""  # ngram or mtp
    ssm_dtype: str = "auto"
    tensor_parallel: int = 1
    processes: bool = False  # the engine's core in a process of its own, as a server has it
    cold: bool = False  # with caches of compiled kernels that are empty
    code: bool = False  # with the folder of --code
    invariant: bool = False  # vLLM's VLLM_BATCH_INVARIANT, SGLang's enable_deterministic_inference
    chunked: bool = True  # prefill in pieces
    batched_tokens: int = 16384
    block_size: int = 0  # tokens; 0: the engine's choice
    attention: str = ""
    max_model_len: int = 32768


@dataclass(frozen=True)
class Row:
    """One comparison. against: the option whose row has the engine's run, where this has none of its own."""

    model: str
    option: str
    settings: Settings
    sides: tuple[str, ...] = (ENGINE, WYVERN)
    against: str = "base"
    measures: tuple[str, ...] = ("logprobs", "speed")

    @property
    def name(self) -> str:
        return f"{self.model}/{self.option}"

    def describe(self) -> dict[str, object]:
        return {"row": self.name, "settings": asdict(self.settings)}


@dataclass(frozen=True)
class _Option:
    settings: dict[str, object] = field(default_factory=dict)
    models: str = ""  # only those whose name has one of these, separated by |
    sides: tuple[str, ...] = (ENGINE, WYVERN)
    against: str = "base"
    measures: tuple[str, ...] = ("logprobs", "speed")


_STATES = {"ssm_dtype": "float32", "max_model_len": 8192}
_BOUND = {"sides": (WYVERN,), "measures": ("invariance", "speed"), "against": "variant"}
_OPTIONS = {
    "base": _Option(),
    "eager": _Option({"graphs": False}),
    "prefix": _Option({"prefix_caching": True}),
    "flashinfer": _Option({"prefix_caching": True, "gdn_prefill": "flashinfer"}, "qwen", against="prefix"),
    "kda-triton": _Option({"kda": "triton"}, "kimi-k3"),
    "ngram": _Option({"drafts": "ngram"}),
    "mtp": _Option({"drafts": "mtp"}, "qwen"),
    "ssm-fp32": _Option({"ssm_dtype": "float32"}),
    "ssm-bf16": _Option({"ssm_dtype": "bfloat16"}),
    "processes": _Option({"processes": True}, sides=(WYVERN,)),
    "tp2": _Option({"tensor_parallel": 2}),
    "cold": _Option({"cold": True}, measures=()),
    "cold-code": _Option({"cold": True, "code": True}, sides=(WYVERN,), against="cold", measures=()),
    # Of invariance: whole prompts, prompts in pieces of 1024 tokens beside others, prompts whose first part
    # is cached, and, to show what the test sees, an engine that promises nothing.
    "invariant": _Option({"invariant": True, "chunked": False, **_STATES}, **_BOUND),
    "invariant-chunked": _Option({"invariant": True, "batched_tokens": 1024, **_STATES}, **_BOUND),
    "invariant-prefix": _Option(
        {"invariant": True, "prefix_caching": True, "block_size": 1152, **_STATES}, "qwen", **_BOUND
    ),
    "variant": _Option({"chunked": False, **_STATES}, measures=("invariance", "speed")),
}  # fmt: skip
_ATTENTION = {"kimi": "TRITON_MLA", "qwen": "TRITON_ATTN"}
SETS = {
    "options": [name for name in _OPTIONS if "variant" not in name],
    "invariance": [name for name in _OPTIONS if "variant" in name],
}


def rows(sets: list[str], engine: str) -> list[Row]:
    """Those of these sets, by models, the base row first."""
    found = []
    for model in MODELS:
        attention = next((name for part, name in _ATTENTION.items() if part in model), "")
        for option in (name for chosen in sets for name in SETS[chosen]):
            one = _OPTIONS[option]
            if engine == "sglang" and "qwen3-next" not in model:  # weights that transformers can write
                continue
            if one.models and not any(part in model for part in one.models.split("|")):
                continue
            given = {"attention": attention if engine == "vllm" else "", **one.settings}
            settings = Settings(**given)  # type: ignore[arg-type]
            found.append(Row(model, option, settings, one.sides, one.against, one.measures))
    return found
