"""The run configuration: one typed tree, every default here once, with its unit.

Read from YAML, then changed by dotted overrides from the command line (`train.epochs=2`).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from app.errors import UserError, first_line
from app.redact import find_secrets

_Beta = Annotated[float, Field(ge=0, lt=1)]


ColumnName = Literal[
    "messages", "prompt", "response", "system", "tools", "reasoning", "domain", "turns", "input"
]  # fmt: skip


def _base_url(url: str) -> str:
    if not url.startswith(("http://", "https://")) or not url.rstrip("/").endswith("/v1"):
        raise ValueError(f"{url!r} is no base URL; give http(s)://HOST:PORT/v1")
    return url


def _own_kinds(resources: dict[str, float]) -> dict[str, float]:
    for name, amount in resources.items():
        if name in ("CPU", "GPU", "memory", "object_store_memory"):
            raise ValueError(f"other keys size {name}; give names that nodes were started with (ray start --resources)")
        if amount <= 0 or (amount > 1 and amount != int(amount)):
            raise ValueError(f"the amount of {name} is {amount:g}; give a number above 0, a whole one above 1")
    return resources


_OwnResources = Annotated[dict[str, float], AfterValidator(_own_kinds)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class TargetConfig(Section):
    model: str = Field("smollm2-135m", description="a folder, a hub id, or a packaged target (smollm2-135m)")
    revision: str | None = Field(None, description="hub revision")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")
    chat_template: str | None = Field(None, description="file that replaces the tokenizer's chat template")
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to the chat template")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="numeric type the engine runs in")


class SamplingConfig(Section):
    """A source's own sampling; what is not given is generate's."""

    temperature: float | None = Field(None, ge=0, le=1e3, description="generate's, for this source; 0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, description="0 is off")
    max_new_tokens: int | None = Field(None, gt=0, description="tokens of one answer")
    seed: int | None = Field(None, ge=0, lt=2**31, description="of sampling; each request adds its own")

    @property
    def given(self) -> dict[str, Any]:
        """The values that were set."""
        return self.model_dump(exclude_none=True)


class SourceConfig(Section):
    name: str | None = Field(None, description="label in reports; default: the file's or dataset's name")
    path: str | None = Field(None, min_length=1, description="file or glob, any fsspec URL; or give `dataset`")
    dataset: str | None = Field(None, description="Hugging Face dataset id, owner/name")
    subset: str | None = Field(None, description="of the dataset: its configuration; default: the only one")
    split: str = Field("train", description="of the dataset")
    revision: str | None = Field(None, description="of the dataset: branch, tag or commit")
    format: Literal["auto", "jsonl", "json", "parquet", "csv", "text", "log", "zip"] = Field(
        "auto", description="auto: by the file's name, then by its first bytes"
    )
    columns: dict[ColumnName, str] = Field(
        default_factory=dict,
        description="our field (messages, prompt, response, system, tools, ...) -> the file's column, dots go inside;"
        " needed only where the shape is not recognised",
    )
    use: Literal["regenerate", "as_is"] = Field(
        "regenerate", description="let the target answer anew, or take the conversation as it is"
    )
    domain: str | None = Field(None, description="domain of rows that name none; default: the source's name")
    limit: int | None = Field(None, gt=0, description="rows to read from the start, for a trial")
    count: int | None = Field(None, gt=0, description="conversations to draw from the usable ones")
    share: float | None = Field(None, gt=0, le=1, description="share of the usable conversations to draw")
    seed: int = Field(0, description="of the draw")
    sampling: SamplingConfig = SamplingConfig()
    system_prompt: str | None = Field(None, description="added to conversations that open without one")
    private: bool | Literal["never"] = Field(
        False,
        description="true: no report or log shows this source's text; false: of rows of logs and exports none does,"
        " with `columns` too; never: all may be shown",
    )
    max_reject_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description="share of rows that may be rejected (repeats not counted) before the run stops",
    )

    @model_validator(mode="after")
    def _one_location(self) -> SourceConfig:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("give a source either `path` or `dataset`")
        if self.count is not None and self.share is not None:
            raise ValueError("give a source either `count` or `share`")
        if self.use == "as_is" and self.sampling.given:
            raise ValueError("`sampling` is for sources that the target answers anew, and this one is used as_is")
        return self

    @property
    def location(self) -> str:
        """Where it is, for messages; still with what a URL may hide."""
        return self.path if self.path is not None else f"hf://datasets/{self.dataset}"

    def hides(self, by_itself: bool) -> bool:
        """Whether a row's text stays out of reports and logs; `by_itself`: it is of a log or an export."""
        return self.private is True or (by_itself and self.private != "never")

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        if self.dataset is not None:
            return self.dataset.rsplit("/", 1)[-1]
        stem = (self.path or "").partition("?")[0].rstrip("/").rsplit("/", 1)[-1]
        for ending in (".gz", ".zst", ".jsonl", ".json", ".parquet", ".csv", ".txt", ".zip"):
            stem = stem.removesuffix(ending)
        return stem


class IngestConfig(Section):
    on_source_error: Literal["stop", "skip"] = Field(
        "stop", description="what a source that cannot be read does to the run; skipped ones are named in every report"
    )
    over: Literal["drop", "cut_at_turn", "cut_end"] = Field(
        "cut_end",
        description="conversations taken as they are that exceed generate.max_length: rejected, cut after the last turn"
        " that fits, or cut at the limit (the beginning of an answer, where reasoning starts, is kept)",
    )
    min_supervised: int = Field(2, ge=2, description="supervised tokens a conversation taken as it is must keep")
    near_duplicates: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Jaccard similarity of word 5-grams from which a conversation is a repeat; null: off",
    )
    redact: list[Literal["email", "phone", "key", "card"]] = Field(
        default_factory=list, description="kinds of personal data replaced before anything is written"
    )
    benchmark_sets: list[str] = Field(
        default_factory=list, description="files of benchmark prompts; training rows that hold one are counted"
    )
    allow_mixed_thinking: bool = Field(
        False, description="rows may differ in the template's enable_thinking (or thinking) argument"
    )
    workers: int | None = Field(None, gt=0, description="processes that tokenise; default: all cores")
    drop_overlap: bool = Field(False, description="reject rows that hold a prompt of benchmark_sets")


class GenerateConfig(Section):
    engine: str = Field("vllm", description="vllm, or module:Class of an engine of your own")
    max_length: int = Field(2048, gt=8, description="tokens of prompt and answer together")
    max_new_tokens: int = Field(512, gt=0, description="tokens of one answer")
    length_stopped: Literal["keep", "drop"] = Field(
        "keep", description="answers stopped by max_new_tokens; kept ones get no invented end token"
    )
    thinking_only: Literal["keep", "drop"] = Field("drop", description="answers that never leave their thinking")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 is off")
    seed: int = Field(0, description="sampling seed; each request adds its own")
    replicas: int | Literal["auto"] = Field(
        "auto", description="engines side by side; auto: as many as the GPUs hold, and more as nodes join"
    )
    tensor_parallel: int | Literal["auto"] = Field(
        "auto", description="GPUs per engine; auto: as few as hold weights and KV cache"
    )
    resources: _OwnResources = Field(
        default_factory=dict,
        description="resources of your own that an engine asks for beside its GPUs: {H200: 1} keeps engines on nodes"
        " that were started with it",
    )
    max_num_seqs: int = Field(64, gt=0, description="requests decoded at once per engine")
    parts_in_flight: Literal["auto"] | Annotated[int, Field(gt=0)] = Field(
        "auto",
        description="parts an engine works on at once, so that it never drains; auto: rows for two batches, at least 2",
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs and no compile (always on without GPUs)")
    engine_process: bool | None = Field(
        None,
        description="an engine on one GPU runs in a process of its own, away from the threads that write parts;"
        " default: on GPUs where /dev/shm has room for states under way",
    )
    kv_cache_gib: float = Field(2.0, gt=0, description="GiB of KV cache, CPU engines only")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    engine_args: dict[str, Any] = Field(default_factory=dict, description="passed to vLLM as they are")
    max_error_share: float = Field(0.05, ge=0, le=1, description="share of rows that may fail before the run stops")
    max_attempts: int = Field(
        4,
        gt=0,
        description="times a part may end its engine's process before the run stops, beside the halvings that find the"
        " row which does it",
    )
    retry_failed: bool = Field(
        False, description="make parts again in which rows failed: for faults that pass, a time-out say"
    )
    recapture: bool = Field(False, description="make parts again whose states were cleaned; give it for one run")
    row_timeout_s: float = Field(1800, gt=0, description="seconds one request may take before its row is rejected")
    stall_minutes: float = Field(
        15,
        ge=0,
        description="minutes an engine with work may show no sign of life before its process is ended and another makes"
        " its parts; four times as many to start, and to read or write a part; 0: off",
    )
    max_hours: float | None = Field(
        None, gt=0, description="hours after which no part is begun any more; the run goes on with what is there"
    )
    max_tokens: int | None = Field(None, gt=0, description="answer tokens of the run, likewise")
    endpoints: list[str] = Field(
        default_factory=list,
        description="base URLs, ending in /v1, of servers of the target that make the answers; the engine then only"
        " captures their states (docs/servers.md)",
    )
    endpoint_model: str | None = Field(None, description="name the servers know the target by; default: as they list")
    endpoint_api: Literal["completions", "chat"] = Field(
        "completions", description="completions sends token ids; chat is for servers that have nothing else"
    )
    endpoint_concurrency: int = Field(
        64, gt=0, description="most requests at once per endpoint and replica; fewer while a server is slow or busy"
    )
    endpoint_timeout_s: float = Field(600, gt=0, description="seconds after which a request is sent again")
    endpoint_patience_s: float = Field(
        600, gt=0, description="seconds without an answer of any endpoint before the stage stops"
    )

    @field_validator("endpoints")
    @classmethod
    def _base_urls(cls, urls: list[str]) -> list[str]:
        return [_base_url(url) for url in urls]

    @field_validator("replicas", "tensor_parallel", "parts_in_flight", mode="before")
    @classmethod
    def _whole_or_auto(cls, value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not whole and value != "auto":
            raise ValueError("give a whole number above 0, or auto")
        return value


class CaptureConfig(Section):
    mode: Literal["auxiliary", "extract"] = Field(
        "auxiliary", description="the model's auxiliary outputs, or vLLM's extract method"
    )
    layers: list[int] | None = Field(None, description="three ids k, state after k layers; default {2, n//2, n-3}")
    mask: Literal["auto", "engine", "generation_tags", "prefix", "all"] = Field(
        "auto",
        description="where supervised tokens come from; auto: the engine's boundary for regenerated rows,"
        " else generation tags, else append-only prefix rendering; all must be asked for by name",
    )
    max_empty_mask_share: float = Field(
        0.01, ge=0, le=1, description="share of rows with nothing supervised before the run refuses to start"
    )
    max_bad_rows_per_part: int = Field(
        0, ge=0, description="rows of a part whose states fail the checks before the run stops"
    )
    spot_check: bool = Field(
        True, description="one sample of every part is computed again alone, and its states must be the same"
    )
    codec: Literal["bf16", "fp8", "int8", "int4"] = Field(
        "fp8",
        description="how states are stored: bf16 (as target.dtype has them), fp8 (e4m3, a scale per token and state),"
        " int8, int4 (a scale per 64 channels)",
    )
    compression: Literal["none", "zstd", "planes"] = Field(
        "none", description="of the stored states, lossless: zstd, or planes (the bytes of bf16 apart, then zstd)"
    )

    @model_validator(mode="after")
    def _compression_fits(self) -> CaptureConfig:
        if self.compression == "planes" and self.codec != "bf16":
            raise ValueError(f"compression planes splits the bytes of a value and codec {self.codec} has one; use zstd")
        return self


class QualityConfig(Section):
    min_tokens: int = Field(
        3, ge=0, description="tokens, the end token included, below which an answer is empty; two teach one prediction"
    )
    loop_repeats: int = Field(4, ge=2, description="times a tail of at least 16 tokens repeats before it is a loop")
    min_answers: int = Field(20, ge=1, description="answers of a source below which its shares stop nothing")
    max_empty: float | None = Field(
        0.2, ge=0, le=1, description="share of a source's answers that may be empty before the run stops; null: off"
    )
    max_cut: float | None = Field(
        None, ge=0, le=1, description="share stopped by generate.max_new_tokens; null: only a warning"
    )
    max_loop: float | None = Field(0.5, ge=0, le=1, description="share whose tail repeats itself; null: off")
    max_language: float | None = Field(
        0.5, ge=0, le=1, description="share in another script than the prompt's, where both are clear; null: off"
    )
    max_leftover: float | None = Field(
        0.05, ge=0, le=1, description="share with think, tool or role markers where none belong; null: off"
    )
    max_refusal: float | None = Field(
        0.5, ge=0, le=1, description="share that opens with words of refusal, English and Chinese; null: off"
    )
    max_thinking_only: float | None = Field(
        None, ge=0, le=1, description="share that never leaves its thinking; null: only a warning"
    )
    max_rejected: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share that generate rejected for any other reason; null: only a warning (see"
        " generate.max_error_share)",
    )


class VocabConfig(Section):
    size: int | None = Field(32000, gt=0, description="draft vocabulary Vd; null or >= V: the target's own")


class TrainConfig(Section):
    workers: int = Field(1, gt=0, description="Ray Train workers")
    use_gpu: bool | None = Field(None, description="default: GPUs when the cluster has them")
    cpus_per_worker: int = Field(2, gt=0, description="CPU threads per worker, CPU training only")
    resources: _OwnResources = Field(
        default_factory=dict, description="resources of your own that a worker asks for, as generate.resources"
    )
    epochs: float = Field(3, gt=0)
    start_after: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of the conversations whose answers training begins with, while the others are still being"
        " made; it needs GPUs of its own beside the engines'. Each window of parts that follows is as large;"
        " null: all of them",
    )
    learning_rate: float = Field(1e-4, gt=0)
    min_learning_rate_ratio: float = Field(0.0, ge=0, le=1, description="rate at the end over the peak")
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.02, ge=0, lt=1, description="share of the steps")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    grad_clip: float = Field(0.5, gt=0, description="global norm")
    unroll_steps: int = Field(7, gt=0, le=16, description="K")
    step_decay: float = Field(0.8, gt=0, le=1, description="w, weight of unroll step k is w^k")
    loss: Literal["kl", "lk", "cross_entropy"] = Field(
        "kl",
        description="kl: forward KL to the teacher; lk: the acceptance rate itself; cross_entropy: the emitted token",
    )
    lk_form: Literal["hybrid", "log_alpha"] = Field(
        "hybrid",
        description="of loss lk: KL that gives way to 1 - acceptance as acceptance grows, or -log acceptance",
    )
    lk_eta: float = Field(3.0, ge=0, description="of lk_form hybrid: KL's weight is exp(-eta * mean acceptance)")
    temperature: float = Field(1.0, gt=0, description="divides the logits of teacher and draft in the loss")
    out_of_vocab: Literal["renormalise", "drop"] = Field(
        "renormalise",
        description="teacher mass outside the draft vocabulary: spread, or drop rows whose top is outside",
    )
    shard: bool = Field(
        False,
        description="weights, gradients and moments spread over the workers (FSDP2), not whole on each: for drafts that"
        " are large for a GPU",
    )
    optimizer_state: Literal["fp32", "8bit"] = Field(
        "fp32", description="AdamW's two moments; 8bit: a byte each, in blocks with a scale"
    )
    tokens_per_step: int = Field(8192, gt=0, description="tokens per optimiser step over all workers")
    max_document: int | None = Field(
        None, ge=4, description="tokens at which a longer document is cut; default: the draft's max_position_embeddings"
    )
    activation_gib: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="GiB a worker may hold for its backward pass: documents share a pass as far as it allows, and of"
        " one too large alone unroll steps are computed twice; auto: what weights, moments and inputs leave of memory",
    )
    embedding_device: Literal["gpu", "cpu"] = Field(
        "gpu", description="where the frozen embedding lies; cpu: a pass brings the rows it reads"
    )
    validation_share: float = Field(0.05, ge=0, lt=1, description="share of conversations held out for validation")
    validate_every_epochs: float = Field(1.0, gt=0)
    checkpoint_every_s: float = Field(300, gt=0, description="seconds between checkpoints")
    stall_minutes: float = Field(
        20,
        ge=0,
        description="minutes without a step of a worker before the stage ends with an error that says where its workers"
        " stand; 0: off",
    )
    keep_checkpoints: int = Field(2, gt=0)
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    num_attention_heads: int | None = Field(None, description="default: the target's")
    num_key_value_heads: int | None = Field(None, description="default: the target's; at most 8 where it has MLA")
    head_dim: int | None = Field(None, description="default: the target's; the size of its values where it has MLA")
    intermediate_size: int | None = Field(None, description="default: the target's dense width, never its experts'")
    fc_norm: bool = Field(False, description="EAGLE-3.1: one RMSNorm for each auxiliary state, before fc")
    norm_output: bool = Field(False, description="EAGLE-3.1: the next step reads the state after the final norm")
    norm_before_fc: bool = Field(False, description="one RMSNorm over the three auxiliary states together, before fc")
    norm_before_residual: bool = Field(False, description="the residual is the normed state; SGLang cannot serve it")
    seed: int = 0
    max_bad_steps: int = Field(
        5, ge=0, description="steps whose loss or gradient is no number and that are skipped before training stops"
    )
    min_teacher_agreement: float = Field(
        0.9, ge=0, le=1, description="share of greedy tokens that the stored states must give before step 1; 0: off"
    )
    trackers: list[Literal["tensorboard", "mlflow", "wandb"]] = Field(
        default_factory=list, description="where the numbers of metrics.jsonl go too; the package must be installed"
    )
    init_from: str | None = Field(
        None,
        min_length=1,
        description="start from this draft: a run folder, or a folder with config.json and safetensors, ours or"
        " published; its vocabulary map is kept",
    )
    new_vocabulary: bool = Field(
        False, description="with init_from: choose the vocabulary anew; rows of tokens in both maps are kept"
    )

    @model_validator(mode="after")
    def _whole_first_epoch(self) -> TrainConfig:
        if self.start_after is not None and self.epochs < 1:
            raise ValueError(
                f"train.start_after needs an epoch that sees every answer, and train.epochs is {self.epochs:g}; set"
                " epochs to 1 or more, or leave start_after out"
            )
        return self

    @field_validator("activation_gib", mode="before")
    @classmethod
    def _gib_or_auto(cls, value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not number and value != "auto":
            raise ValueError("give GiB above 0, or auto")
        return value


class EvaluateConfig(Section):
    holdout: int = Field(
        64,
        ge=0,
        description="conversations kept from training, captured for the offline estimate, then benchmarked",
    )
    holdout_seed: int = 0
    num_draft_tokens: int = Field(3, gt=0, description="k of the acceptance walk; bench uses the same")
    bootstrap: int = Field(1000, gt=0, description="resamples of the 95 % interval")


class ExportConfig(Section):
    checkpoint: Literal["best", "last"] = Field("last", description="best: by validation acceptance length")
    embed_tokens: bool = Field(True, description="write the target's embedding, bit-exact; vLLM shares it if absent")
    format: Literal["flat", "speculators"] = Field(
        "flat", description="speculators: that layout too, for vLLM alone, in export/speculators"
    )


class BenchConfig(Section):
    max_new_tokens: int | None = Field(None, gt=0, description="default: generate.max_new_tokens")
    draft_tokens: int | list[int] | None = Field(
        None,
        description="k, or several for a sweep, of our engine; default: evaluate.num_draft_tokens, the headline's too",
    )
    concurrency: int | list[int] = Field(
        8, description="requests at once, or several for a sweep; the first is the headline's"
    )
    repeats: int = Field(1, gt=0, description="measured passes over the prompts, after a warm-up that is not counted")
    temperature: float = Field(
        0.0, ge=0, description="above 0 outputs are sampled, and compared by a test of their distribution"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="of sampling and of resampling")
    test_prompts: int = Field(16, gt=0, description="of that test: prompts")
    test_samples: int = Field(32, gt=1, description="of that test: answers to each prompt, with and without the draft")
    test_tokens: int = Field(8, gt=0, description="of that test: tokens compared, from the first")
    domain_pass: bool = Field(
        True, description="one more pass, domain by domain, for acceptance by domain from the counters alone"
    )
    sets: list[str] = Field(
        default_factory=list,
        description="files of benchmark prompts (MT-bench, GSM8K, HumanEval), measured beside the held-out prompts",
    )
    set_rows: int = Field(80, gt=0, description="conversations of each set, from its start")
    server: str | None = Field(
        None, description="base URL, ending in /v1, of a running server with the draft, measured in place of our engine"
    )
    baseline_server: str | None = Field(None, description="likewise of one of the same target without a draft")
    server_model: str | None = Field(None, description="name the servers know the target by; default: as they list")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="passed to vLLM as they are")

    @field_validator("draft_tokens", "concurrency", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any, info: ValidationInfo) -> Any:
        several = value if isinstance(value, list) else [value]
        if value is None and info.field_name == "draft_tokens":
            return value
        if not several or any(not isinstance(v, int) or isinstance(v, bool) or v < 1 for v in several):
            raise ValueError("give a whole number above 0, or a list of them")
        if len(set(several)) < len(several):
            raise ValueError("a number stands there twice")
        return value

    @field_validator("server", "baseline_server")
    @classmethod
    def _server_url(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url is not None and info.field_name == "baseline_server" and info.data.get("server") is None:
            raise ValueError("it needs bench.server, the server with the draft")
        return url if url is None else _base_url(url)

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """As given, the headline's first."""
        return tuple(self.concurrency) if isinstance(self.concurrency, list) else (self.concurrency,)

    def drafting(self, default: int) -> tuple[int, ...]:
        """The numbers of draft tokens, the headline's first: `default` where it is among them.

        A running server drafts as it was started: then it is one number, and what the server counts is told.
        """
        if self.server is not None:
            return (default,)
        given = self.draft_tokens if isinstance(self.draft_tokens, list) else [self.draft_tokens or default]
        return tuple(sorted(given, key=lambda k: k != default))


class DoctorConfig(Section):
    before: list[Literal["train", "bench", "report"]] = Field(
        default_factory=lambda: ["train", "bench", "report"],  # type: ignore[arg-type]
        description="stages before which the doctor runs by itself; empty: only as `draftmill doctor`",
    )
    stop: bool = Field(True, description="a failed check stops train or bench before it starts; false: it only warns")
    recompute_gib: float = Field(
        4.0, ge=0, description="GiB of target weights up to which a few samples are computed again on the CPU"
    )


class RayConfig(Section):
    address: str | None = Field(
        None,
        description="null: the cluster of RAY_ADDRESS or of the submitted job, else a local one; local; or host:port",
    )
    num_cpus: int | None = Field(None, gt=0, description="CPUs of a local cluster; default: all")
    object_store_gib: float = Field(0.5, gt=0, description="GiB, local cluster only; states never pass through it")
    dashboard: bool = Field(True, description="local cluster only")
    engine_cpus: float = Field(1, gt=0, description="CPUs reserved per engine")

    @field_validator("address")
    @classmethod
    def _no_dashboard(cls, value: str | None) -> str | None:
        if value is not None and value.startswith(("http://", "https://")):
            raise ValueError(
                "that is a dashboard, which `draftmill submit --address` talks to; give HOST:6379 (the address that"
                " `ray start --head` printed), or local"
            )
        return value


class StorageConfig(Section):
    rows_per_part: int = Field(64, gt=0, description="rows of one part: the unit of work and of resume")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="fsspec options of the run folder, endpoint_url say; never put keys here",
    )
    lease_timeout_s: float = Field(60, gt=0, description="seconds after which a silent driver on another host is dead")
    verify: Literal["checksum", "size"] = Field(
        "checksum",
        description="how committed parts are verified on resume; size: parts wait for the disk, since after a power"
        " failure a file of the right size may hold nothing",
    )
    keep_states: Literal["always", "until_trained", "until_done"] = Field(
        "always",
        description="until_trained: a part's states go once the draft is trained, those of held-out conversations once"
        " it is evaluated; until_done: all of them after the report. Training anew then needs generate.recapture",
    )


class Config(Section):
    run_dir: str = Field("runs/default", description="run folder: local path or fsspec URL")
    target: TargetConfig = TargetConfig()
    sources: list[SourceConfig] = Field(min_length=1)
    ingest: IngestConfig = IngestConfig()
    generate: GenerateConfig = GenerateConfig()
    capture: CaptureConfig = CaptureConfig()
    quality: QualityConfig = QualityConfig()
    vocab: VocabConfig = VocabConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()
    bench: BenchConfig = BenchConfig()
    doctor: DoctorConfig = DoctorConfig()
    ray: RayConfig = RayConfig()
    storage: StorageConfig = StorageConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.ingest.drop_overlap and not self.ingest.benchmark_sets:
            raise ValueError("ingest.drop_overlap needs ingest.benchmark_sets, the files of the prompts to drop")
        labels = [s.label for s in self.sources]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"sources share the name {twice[0]!r}; give each its own `name`")
        if self.generate.max_new_tokens >= self.generate.max_length:
            raise ValueError(
                f"generate.max_new_tokens ({self.generate.max_new_tokens}) leaves no room for a prompt in"
                f" generate.max_length ({self.generate.max_length}); lower the one or raise the other"
            )
        for number, source in enumerate(self.sources):
            if (limit := source.sampling.max_new_tokens or 0) >= self.generate.max_length:
                raise ValueError(
                    f"sources.{number}.sampling.max_new_tokens ({limit}) leaves no room for a prompt in"
                    f" generate.max_length ({self.generate.max_length}); lower the one or raise the other"
                )
        return self

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_config(path: str | None, overrides: list[str]) -> Config:
    """Read the YAML file at `path` and apply `section.key=value` overrides.

    Raises:
        UserError: the file or a value is wrong; the sentence names the key and, for a typo, the one meant.
    """
    data: Any = {}
    if path is not None:
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise UserError(f"configuration {path} cannot be read: {error.strerror or error}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            where = getattr(error, "problem_mark", None)
            line = f" line {where.line + 1}" if where is not None else ""
            raise UserError(f"configuration {path}{line} is not valid YAML: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise UserError(f"configuration {path} must be a mapping of sections, not {type(data).__name__}")
    return parse_config(apply_overrides(data, overrides), path or "the command line")


def apply_overrides(data: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Plain data with `section.key=value` overrides set in it.

    Raises:
        UserError: an override is not of that form or points nowhere.
    """
    for override in overrides:
        _apply_override(data, override)
    return data


def parse_config(data: dict[str, Any], where: str) -> Config:
    """Validate plain data as a Config.

    Raises:
        UserError: as `load_config`.
    """
    for key in find_secrets(data):
        raise UserError(
            f"{where}: {key} looks like a secret; the run folder stores the configuration,"
            " so pass credentials by environment variables instead"
        )
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(_explain(e) for e in error.errors()[:5])) from error


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not of the form section.key=value")
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML ({first_line(error)})") from error
    if isinstance(value, str):
        value = _number(value)
    node: Any = data
    parts = key.split(".")
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise UserError(f"override {override!r}: {'.'.join(parts[:depth])} has {len(node)} entries, from 0")
            if last:
                node[int(part)] = value
            else:
                node = node[int(part)]
        elif not isinstance(node, dict):
            raise UserError(f"override {override!r}: {'.'.join(parts[:depth])} is a value, not a section")
        elif last:
            node[part] = value
        else:
            if node.get(part) is None:
                node[part] = {}
            node = node[part]


def _number(text: str) -> Any:
    """YAML 1.1 reads 1e-4 as a string; people mean a number."""
    try:
        return float(text) if "e" in text.lower() and text[0] in "+-.0123456789" else text
    except ValueError:
        return text


def _explain(error: Any) -> str:
    location = [str(p) for p in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*location[:-1], close[0]])!r}?" if close else f"known keys: {', '.join(known)}"
        return f"unknown key {key!r}; {hint}"
    if error["type"] == "missing":
        return f"{key!r} is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    if not key:
        return message
    return f"{key} = {error['input']!r}: {message[0].lower()}{message[1:]}"


def _fields_at(location: list[str]) -> list[str]:
    model: Any = Config
    for part in location:
        if part.isdigit():
            continue
        annotation = model.model_fields[part].annotation
        inner = [a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
        model = inner[0] if inner else annotation
    return list(model.model_fields)
