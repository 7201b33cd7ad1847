"""The configuration of a generation job, checked before anything starts."""

from dataclasses import fields
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine import Sampling
from pipeline.logs import LogFormat
from pipeline.rows.template import PromptTemplate
from pipeline.storage.settings import Place, StorageConfig, Utf8
from pipeline.storage.storage import Storage

DEFAULT_MODEL = "smollm2-135m-instruct"

Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")]
PromptText = Annotated[
    Utf8, Field(description="user text, with {text} and {column} fields; {{ and }} are plain braces")
]


class AnswerConfig(BaseModel):
    """How a text is made from a row: prompt, model, sampling."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text_column: Utf8 = Field("text", description="string column that {text} stands for in the prompt")
    id_column: Utf8 | None = Field(
        None, description="column that identifies a row, in the output too where rows are written"
    )

    system: Utf8 | None = Field(None, description="system text of the chat; default the model's own")
    prompt: PromptText = "{text}"
    prompt_format: Literal["chat", "raw", "messages"] = Field(
        "chat",
        description="use the model's chat template, or the text alone; messages: the text is a JSON list of a chat's "
        "messages, each with role and content",
    )
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="longest prompt; default what the model's context leaves beside max-new-tokens, which vLLM needs "
        "room for in its cache",
    )
    overlong: Literal["truncate", "reject"] = Field(
        "truncate",
        description="over-long prompts: cut {text}, which rows say by prompt_truncated, or make the row an error",
    )

    parse_control_tokens: bool = Field(
        False,
        description="let what looks like a control token of the model in a row's text, such as <|im_end|>, be one; "
        "default it stays text, and only the chat template and --prompt make control tokens",
    )

    model: Utf8 = Field(
        DEFAULT_MODEL,
        description=f"checkpoint directory, hub id (owner/name), GGUF file, or {DEFAULT_MODEL} (packaged)",
    )
    device: Device = Field("auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="precision of the weights")
    max_new_tokens: int = Field(128, ge=1, description="longest generation")
    min_new_tokens: int = Field(0, ge=0, description="shortest generation")
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens; 0 is off")
    top_p: float = Field(1.0, gt=0, le=1, description="sample among the likeliest tokens that make up this probability")
    min_p: float = Field(0.0, ge=0, lt=1, description="drop tokens less likely than this share of the likeliest")
    repetition_penalty: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="above 1 discourages tokens already in prompt or output"
    )
    stop: list[Utf8] = Field([], description="strings that end a generation")
    seed: int = Field(
        0,
        ge=-(2**63),
        lt=2**63,
        description="of the random streams; a row's stream depends on the seed and its place alone",
    )

    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        64, description="rows that decode together, in each replica; auto: as many as gain and fit the free memory"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}")
        if "" in self.stop:
            raise ValueError("stop strings must not be empty")
        self.sampling()  # which checks the rest
        return self

    def template(self) -> PromptTemplate:
        """What makes a prompt of a row. Raises JobError for a malformed one."""
        return PromptTemplate(self.prompt, self.system, self.prompt_format, self.overlong, self.parse_control_tokens)

    def sampling(self) -> Sampling:
        """The engine's view of how tokens are chosen."""
        given = self.model_dump(include={item.name for item in fields(Sampling)} & type(self).model_fields.keys())
        return Sampling(**given | {"stop": tuple(self.stop)})


class GenerationConfig(AnswerConfig):
    """At what depth a text is made, and by which engine."""

    engine: Literal["auto", "torch", "vllm"] = Field(
        "auto", description="what generates: our own engine on torch, or vLLM; auto: vLLM on GPUs that have it"
    )
    gpu_memory_share: float = Field(
        0.9, gt=0, le=1, description="of a GPU's memory that vLLM takes; where it runs on CPUs, of their memory"
    )
    quantization: str | None = Field(None, description="of vLLM's weights, such as fp8; default the checkpoint's own")
    cache_dtype: str = Field("auto", description="precision of vLLM's key/value cache, such as fp8")

    target_speedup: float | None = Field(
        None,
        ge=1.0,
        description="FLOP speed-up, such as 1.5: of the schedules in --schedule the one made for it, else the one that "
        "just reaches it, with the whole sample where they skip layers of prompts, in decoding elsewhere; without "
        "--schedule a plain SkipDecode schedule that does in decoding; default full depth",
    )
    schedule: Place | None = Field(
        None,
        description="schedule to run: path or URL of a schedule.json, of its directory, or of several to choose from",
    )

    @model_validator(mode="after")
    def _vllm_has_its_options(self) -> Self:
        never_vllm = self.engine == "torch" or (self.engine == "auto" and self.device == "cpu")
        if never_vllm and self.vllm_options:
            raise ValueError(f"{self.vllm_options[0]} is an option of vLLM alone: add --engine vllm, or leave it out")
        return self

    @property
    def vllm_options(self) -> list[str]:
        """Names of those given that our own engine has nothing for."""
        given = {"quantization": self.quantization is not None, "cache_dtype": self.cache_dtype != "auto"}
        return [name for name, is_given in given.items() if is_given]


class JobConfig(GenerationConfig, StorageConfig):
    """Where a job reads and writes, on which machines and at what price, when it stops, and what a look ahead is made
    from.
    """

    reserved: ClassVar[tuple[str, ...]] = ()  # columns that are added to the output afterwards

    plan: bool = Field(
        False, description="print what the run will take and cost, store it in the output as _plan.json, and end"
    )
    plan_rows: int = Field(320, ge=1, description="rows drawn at random for the plan and tokenised")
    plan_prompts: int = Field(
        0,
        ge=0,
        description="of these, prompts to answer here and now, for the plan's output lengths and its speed; several "
        "times over where they do not fill a batch",
    )
    plan_output_tokens: int | None = Field(
        None, ge=1, description="output tokens per row that the plan assumes; default measured, else max-new-tokens"
    )
    price_per_gpu_hour: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="what a GPU costs per hour, for the bill; without GPUs, what a replica costs",
    )

    input: Place = Field(
        min_length=1, description="Parquet file, directory or glob: a local path or any fsspec URL such as s3://"
    )
    output: Place = Field(description="directory to write to; an unfinished run found there is resumed")
    fresh: bool = Field(False, description="delete the run found in the output and start anew, instead of resuming it")
    incremental: bool = Field(
        False,
        description="do only what is new: files that earlier jobs with the same output and settings have not done, or "
        "that have changed since, whose old rows are replaced; end at once, well, while another such job is at work",
    )
    s3_anonymous_input: bool = Field(False, description="read a public input without credentials")
    keep_columns: list[Utf8] | None = Field(
        None, description="input columns copied to the output; default the id column, or all columns if none is named"
    )
    limit: int | None = Field(None, ge=1, lt=2**63, description="process only the first rows")

    rows_per_unit: int = Field(256, ge=1, description="rows of the output generated, written and committed as a whole")
    device: Device = Field("auto", description="auto, cpu or cuda: which GPU a replica has is Ray's to say")
    replicas: int | None = Field(None, ge=1, description="engines; default one per GPU, or one without GPUs")
    min_replicas: int | None = Field(
        None,
        ge=1,
        description="start with this many and add up to --replicas, which name too, as the cluster grows; default all "
        "at once",
    )
    gpus_per_replica: float | None = Field(
        None,
        ge=0,
        description="default 1 where the cluster has GPUs and device is not cpu, else 0; only vLLM has use for more",
    )
    threads_per_replica: int | None = Field(
        None, ge=1, description="CPU threads of a replica; default what its machine has for it"
    )
    ray_address: str | None = Field(
        None,
        description="cluster to use; 'local' starts an embedded one; default that of RAY_ADDRESS, else one that was "
        "started on this machine, else as 'local'",
    )
    log_format: LogFormat = Field(
        "text",
        description="of the lines on stderr: for people, or a JSON object each that names run, unit and replica; "
        "replicas' own lines are then in Ray's logs only",
    )
    unit_attempts: int = Field(3, ge=1, description="times a work unit is tried before it is recorded as failed")
    stall_minutes: float = Field(
        30.0, gt=0, description="stop when no batch, commit or replica start has been seen for so long; a rerun resumes"
    )
    stop_grace_s: float = Field(
        25.0, ge=0, description="after SIGTERM: seconds for units in flight to finish before they are abandoned"
    )

    audit_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of rows also generated at full depth and compared, each at two to six times the cost of "
        "a row and its prompt, such as 0.01",
    )
    min_audit_rouge: float | None = Field(
        None,
        gt=0,
        le=1,
        description="stop once audited outputs' ROUGE-L to full depth is surely below; a lower one resumes",
    )

    max_flops: float | None = Field(
        None,
        gt=0,
        description="stop once committed units have spent so many FLOPs, such as 1e18: prompts, decoding, shared "
        "prefix, padding and audits; in all sessions of the run, of an incremental one in this; a higher one resumes",
    )
    max_gpu_hours: float | None = Field(
        None,
        gt=0,
        description="stop once committed units have taken so many GPU-hours, without GPUs replica-hours, as in the "
        "bill; in all sessions of the run, of an incremental one in this; a higher one resumes",
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if ":" in self.device:
            raise ValueError(
                f"device {self.device!r} names one of several GPUs, and Ray gives each replica its own: cuda"
            )
        if (gpus := self.gpus_per_replica or 0.0) > 1 and gpus % 1:
            raise ValueError(f"gpus_per_replica {gpus:g} is neither a share of one GPU nor a whole number of them")
        if self.incremental and self.limit is not None:
            raise ValueError(f"limit {self.limit} cannot be combined with incremental, which does files as a whole")
        if self.min_audit_rouge is not None and not self.audit_fraction:
            raise ValueError("min_audit_rouge needs an audit_fraction above 0")
        if self.plan_output_tokens is not None and self.plan_output_tokens > self.max_new_tokens:
            raise ValueError(
                f"plan_output_tokens {self.plan_output_tokens} exceeds max_new_tokens {self.max_new_tokens}"
            )
        if self.min_replicas is not None and self.min_replicas > (self.replicas or self.min_replicas):
            raise ValueError(f"min_replicas {self.min_replicas} exceeds replicas {self.replicas}")
        return self

    @property
    def vllm_options(self) -> list[str]:
        """Names of those given that our own engine has nothing for: a second GPU would be paid for, and idle."""
        gpus = self.gpus_per_replica or 0.0
        return super().vllm_options + [f"gpus_per_replica {gpus:g}"] * (gpus > 1)

    def input_storage(self) -> Storage:
        """Raises JobError."""
        return Storage(self.input, self, self.s3_anonymous_input)

    def output_storage(self) -> Storage:
        """Raises JobError."""
        return Storage(self.output, self)

    def storage_without_input(self) -> Storage:
        """Where no file of the input may lie. Raises JobError."""
        return self.output_storage()
