"""The configuration: every key, its default, meaning and allowed range, and the one door through which it enters.

Vocabulary. A *config* is the `ml_collections.ConfigDict` that `configs/*.py` return and `--config.a.b=value` edits. A
`Config` is the frozen, validated dataclass that the rest of mod_jax reads. `from_config_dict` turns the first into the
second and is the only place that checks anything.

Each key declares what it takes to change it once a run has begun, as one of `CHANGES`. `free` keys alter where and how
a run is computed or watched, never what is learned, and say why. README's table of them is made from here.

A default never changes, and a new key's default is what the program did before it had the key. So a config means the
same in every version, and its fingerprint, taken over what differs from the default, stays when keys are added.
"""

import dataclasses
import difflib
import hashlib
import textwrap
from typing import Any

import ml_collections
from ml_collections import config_dict

from mod_jax.config_checks import MOST_BLOCKS, check_relations, checked, shown
from mod_jax.errors import ConfigError
from mod_jax.layout import BlockSpec, is_routed
from mod_jax.outputs import canonical

# What it takes to change a key of a run that has begun; each verb allows what those before it allow.
CHANGES = {
    "free": "nothing: the same command resumes the run",
    "corpus": "nothing, as long as the corpus keeps its digest",
    "length": "`--extend`, unless it gives the same number of steps",
    "weights": "`--init_from=WORKDIR`: a new run, from step 0, that begins with these weights and keeps the tokenizer",
    "never": "a new run: the weights have other shapes, or other meanings",
}


def _key(default, doc, *, low=None, above=None, high=None, choices=None, change="weights", why=""):
    """Declares one config key.

    Args:
      low, high: inclusive bounds.
      above: exclusive lower bound.
      change: what it takes to change it once a run has begun, one of `CHANGES`.
      why: of a free key: why nothing that is learned depends on it.
    """
    metadata = dict(doc=doc, low=low, above=above, high=high, choices=choices, change=change, why=why)
    return dataclasses.field(default=default, metadata=metadata)


def _free(default, doc, why, **bounds):
    return _key(default, doc, change="free", why=why, **bounds)


_ROUNDING = "the same sums in another order"
_WATCHING = "says when to look, not what to learn"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = _key(0, "rows of the embedding table; 0: the tokenizer's", low=0, high=2**31 - 1, change="never")
    width: int = _key(256, "D, size of the residual stream", low=1, high=2**20, change="never")
    depth: int = _key(8, "L, number of blocks", low=1, high=MOST_BLOCKS, change="never")
    num_heads: int = _key(4, "N, query heads", low=1, high=2**16, change="never")
    num_kv_heads: int = _key(0, "K, key/value heads; 0: num_heads", low=0, high=2**16, change="never")
    head_dim: int = _key(0, "H; 0: width / num_heads", low=0, high=2**20, change="never")
    mlp_dim: int = _key(0, "F, MLP hidden size; 0: 4 * width", low=0, high=2**24, change="never")
    activation: str = _key(
        "relu_squared", "MLP non-linearity", choices=("relu_squared", "gelu", "silu"), change="never"
    )
    gated_mlp: bool = _key(False, "MLP down(activation(gate(x)) * up(x)), with a third weight", change="never")
    layout: str = _key(
        "FR",
        "pattern of block kinds, cycled over depth: F full, E full with experts, A attention alone, M MLP alone; "
        "R (or f), e, a, m: these routed",
    )
    context: int = _free(
        0,
        "longest sequence when sampling; 0: data.seq_len",
        "read by sampling alone; positions are rotations, computed as they come",
        low=0,
        high=2**24,
    )
    rope_base: float = _key(10_000.0, "base of the rotary wavelengths", above=1.0)
    rope_factors: tuple[float, ...] = _key(
        (), "what each rotary frequency is divided by: head_dim / 2 numbers; (): 1", above=0.0
    )
    qkv_bias: bool = _key(False, "add a bias to queries, keys and values", change="never")
    qk_norm: bool = _key(True, "RMS-normalise queries and keys per head", change="never")
    norm_eps: float = _key(1e-6, "what every RMS norm adds to the mean square", above=0.0)
    embed_scale: bool = _key(
        True, "multiply embeddings by sqrt(width) where they enter the first block", change="never"
    )
    tie_embedding: bool = _key(False, "use the embedding table for the logits", change="never")
    dtype: str = _key(
        "float32", "compute dtype; parameters, router and loss stay float32", choices=("float32", "bfloat16")
    )
    remat: str = _free(
        "none", "what the backward pass recomputes", "recomputes the same numbers", choices=("none", "dots", "full")
    )
    scan: bool = _free(
        True,
        "scan over repetitions of the layout: compile time flat in depth, but 5-15 % slower on a CPU",
        "the same blocks, in a loop or one by one",
    )


@dataclasses.dataclass(frozen=True)
class RoutingConfig:
    capacity: float | tuple[float, ...] = _key(
        0.125, "fraction of tokens kept by a routed block; one number, or one per routed block", above=0.0, high=1.0
    )
    score: str = _key(
        "learned",
        "learned: a linear router. stochastic: Gaussian noise, gate 1 (the paper's control). "
        "position: a linear router that sees only the position. frozen: an untrained router, gate 1",
        choices=("learned", "stochastic", "position", "frozen"),
    )
    gate: str = _key(
        "raw",
        "weight on the update from the score r: raw r; sigmoid(r); tanh 1 + tanh(r); one 1, with the gradient of r; "
        "softmax over the row (not causal)",
        choices=("raw", "sigmoid", "tanh", "one", "softmax"),
    )
    skipped_keys: str = _key(
        "none",
        "what later tokens see of a token in a block that it bypasses. none: nothing (the paper). "
        "kept: its key and value, from the block's input",
        choices=("none", "kept"),
    )
    router_input: str = _key(
        "normed", "what router and predictor read: the RMS-normalised or the raw residual", choices=("normed", "raw")
    )
    router_init_scale: float = _key(0.1, "router init std, in units of width ** -0.5", above=0.0)
    topk_per: str = _key(
        "row", "top-k over the packed row, or by share within each of its documents", choices=("row", "document")
    )
    predictor: bool = _key(True, "train a predictor of top-k membership (causal selection `predictor`)")
    predictor_weight: float = _key(1.0, "coefficient of the predictor's cross-entropy", above=0.0)
    aux_weight: float = _key(
        0.0, "coefficient of the top-k loss on router scores (causal selection `router`); 0: off", low=0.0
    )
    cutoff_decay: float = _key(
        0.98, "decay per step of the average cut-off (causal selection `threshold`)", low=0.0, high=0.9999
    )


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    count: int = _key(8, "E, experts of a block E or e", low=1, high=2**16, change="never")
    chosen: int = _key(1, "A, experts per token (token choice)", low=1, high=2**10)
    hidden: int = _key(0, "F, hidden size of one expert; 0: model.mlp_dim", low=0, high=2**24, change="never")
    capacity: float = _key(
        1.25,
        "slots of all experts together, as a multiple of the claims (tokens times chosen) of a row",
        above=0.0,
        high=1e3,
    )
    noop: int = _key(
        0,
        "no-op experts beside them: a token that takes one keeps its residual (integrated MoDE)",
        low=0,
        high=2**16,
        change="never",
    )
    choice: str = _key(
        "token",
        "token: each token takes its likeliest experts. expert: each expert takes its likeliest tokens of the row",
        choices=("token", "expert"),
    )
    overflow: str = _key(
        "position",
        "who loses when an expert is full: position, the later tokens; paced, by a quota that grows along the row",
        choices=("position", "paced"),
    )
    balance_weight: float = _key(0.1, "coefficient of the load-balancing loss", low=0.0)
    z_weight: float = _key(1e-3, "coefficient of the squared log-normaliser of the expert router", low=0.0)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    source: str = _key(
        "python_stdlib",
        "python_stdlib | synthetic | tfds:NAME | text,jsonl,parquet:PATH | tokens:FOLDER[@WEIGHT],...",
        change="corpus",
    )
    shards: int = _key(
        0, "the first so many shards of a source tokens:FOLDER; 0: all", low=0, high=2**31 - 1, change="corpus"
    )
    text_key: str = _key("text", "field that holds the text, for tfds, jsonl and parquet sources", change="corpus")
    tokenizer: str = _key("bytes", "bytes | bpe:SIZE | sentencepiece:PATH | hf:FOLDER | gguf:FILE", change="corpus")
    seq_len: int = _key(256, "T, tokens per training row", low=2, high=2**24)
    eval_windows: int = _free(
        128, "held-out windows per evaluation", "evaluation learns nothing", low=1, high=2**31 - 1
    )
    workers: int = _free(
        0,
        "processes that prefetch batches; 0: in-process threads",
        "the stream is a function of seed and step alone",
        low=0,
        high=64,
    )
    cache_dir: str = _free(
        "", "where prepared corpora live; '': $MOD_JAX_CACHE or ~/.cache/mod_jax", "the digest says what lies there"
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float = _key(3e-3, "peak rate of AdamW", above=0.0)
    warmup_fraction: float = _key(0.05, "share of the run with rising rate", low=0.0, high=1.0)
    final_fraction: float = _key(0.05, "rate at the last step, as a share of the peak", low=0.0, high=1.0)
    b1: float = _key(0.9, "decay of the first moment", low=0.0, high=0.9999)
    b2: float = _key(0.95, "decay of the second moment", low=0.0, high=0.99999)
    eps: float = _key(1e-8, "AdamW epsilon", above=0.0)
    weight_decay: float = _key(0.1, "decoupled decay of the weight matrices (never norms, router, predictor)", low=0.0)
    clip_norm: float = _key(1.0, "largest global gradient norm", above=0.0)
    router_learning_rate_scale: float = _key(1.0, "rate of router and predictor, relative to learning_rate", above=0.0)
    train: str = _key(
        "all",
        "what is trained. routing: routers and predictors alone. lora: these, norms, biases, and low-rank additions to "
        "the matrices of blocks. The rest stays, without gradient or moments",
        choices=("all", "routing", "lora"),
    )
    lora_rank: int = _key(16, "R, rank of the additions", low=1, high=2**16)
    lora_alpha: float = _key(16.0, "the additions count lora_alpha / lora_rank times", above=0.0)
    router_weight_decay: float = _key(0.0, "decoupled decay of router and predictor matrices", low=0.0)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    batch_size: int = _key(8, "rows per step, all devices together", low=1, high=2**24)
    accumulation: int = _free(1, "micro-batches per step", _ROUNDING, low=1, high=2**24)
    steps: int = _key(
        0, "run length in steps; exactly one of steps, tokens, flops is > 0", low=0, high=2**31 - 1, change="length"
    )
    tokens: int = _key(0, "run length in training tokens", low=0, change="length")
    flops: float = _key(0.0, "run length as a training FLOP budget", low=0.0, change="length")
    z_loss: float = _key(0.0, "coefficient of the squared log-normaliser of the logits", low=0.0)
    teacher: str = _key(
        "", "workdir of a run whose next-token distribution is learned, all its tokens selected; '': none"
    )
    teacher_weight: float = _key(
        1.0, "share of the teacher's loss, its KL divergence; the rest is cross-entropy", above=0.0, high=1.0
    )
    teacher_dtype: str = _key(
        "float32", "dtype that the teacher is kept and computed in", choices=("float32", "bfloat16")
    )
    loss_chunk: int = _free(
        0, "tokens per device whose logits exist at a time; 0: 512 on a CPU, 2048 elsewhere", _ROUNDING, low=0
    )
    max_bad_steps: int = _free(
        10, "consecutive non-finite steps after which the run stops", "a bad step changes nothing learned", low=1
    )
    log_every: int = _free(10, "steps between log lines", _WATCHING, low=1)
    eval_every: int = _free(200, "steps between held-out evaluations; 0: only at the end", _WATCHING, low=0)
    save_every: int = _free(200, "steps between checkpoints; 0: only at the end", _WATCHING, low=0)
    keep: int = _free(2, "newest checkpoints kept, beside the best one", _WATCHING, low=1)
    tracker: str = _free(
        "none", "where else metrics go", _WATCHING, choices=("none", "tensorboard", "wandb", "trackio")
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int = _free(
        -1, "devices along the batch with replicated parameters; -1: all that are left", _ROUNDING, low=-1
    )
    fsdp: int = _free(1, "devices along the batch with sharded parameters; -1: all that are left", _ROUNDING, low=-1)
    tensor: int = _free(1, "devices along heads, MLP and vocabulary; -1: all that are left", _ROUNDING, low=-1)
    expert: int = _free(1, "devices along the batch and along experts; -1: all that are left", _ROUNDING, low=-1)


@dataclasses.dataclass(frozen=True)
class Config:
    """A validated configuration: every 0 that stands for "derive it" is resolved, except `model.vocab_size`."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    routing: RoutingConfig = dataclasses.field(default_factory=RoutingConfig)
    experts: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    seed: int = _key(0, "seed of initial parameters, data order and stochastic routing", low=0, high=2**31 - 1)

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """The stack, first block first."""
        kinds = [self.model.layout[i % len(self.model.layout)] for i in range(self.model.depth)]
        capacity = self.routing.capacity
        capacities = iter(capacity if isinstance(capacity, tuple) else (capacity,) * len(kinds))
        return tuple(BlockSpec(kind, next(capacities) if is_routed(kind) else 1.0) for kind in kinds)

    @property
    def num_routed(self) -> int:
        return len(self.routed_depths)

    @property
    def routed_depths(self) -> tuple[int, ...]:
        """Depth of each routed block, in order."""
        return tuple(i for i, block in enumerate(self.blocks) if block.routed)

    @property
    def capacity_L(self) -> tuple[float, ...]:
        """Capacity of each routed block, in order."""
        return tuple(block.capacity for block in self.blocks if block.routed)

    @property
    def expert_depths(self) -> tuple[int, ...]:
        """Depth of each block with experts, in order."""
        return tuple(i for i, block in enumerate(self.blocks) if block.has_experts)

    @property
    def experts_choose(self) -> bool:
        """Whether some block's experts choose their tokens: a rule that looks at the whole row."""
        return bool(self.expert_depths) and self.experts.choice == "expert"

    @property
    def causal_selections(self) -> tuple[str, ...]:
        """The causal selections that training under this config prepares (the paper's "Sampling").

        Without routed blocks there is nothing to select in depth. Then "all" is the forward pass in which no expert
        drops a token, and "threshold" the one in which experts take what exceeds their averaged cut-offs.
        """
        if self.num_routed and self.routing.gate == "softmax":
            return ()
        if not self.num_routed:
            return ("threshold",) if self.experts_choose else ("all",) if self.expert_depths else ()
        prepared = dict(router=self.routing.aux_weight > 0, predictor=self.routing.predictor, threshold=True)
        return tuple(name for name, ready in prepared.items() if ready)


_SECTIONS = {f.name: f.default_factory for f in dataclasses.fields(Config) if f.name != "seed"}


def _flat_fields() -> dict[str, dataclasses.Field]:
    """Every key, spelled as in `--config.<key>`, with its declaration."""
    fields = {"seed": next(f for f in dataclasses.fields(Config) if f.name == "seed")}
    for section, cls in _SECTIONS.items():
        fields |= {f"{section}.{f.name}": f for f in dataclasses.fields(cls)}
    return fields


FIELDS = _flat_fields()
LENGTH_KEYS = tuple(name for name, field in FIELDS.items() if field.metadata["change"] == "length")


def may_change(name: str, change: str) -> bool:
    """Whether `change`, one of `CHANGES`, lets this key differ once a run has begun."""
    order = list(CHANGES)
    return order.index(FIELDS[name].metadata["change"]) <= order.index(change)


def default_config() -> ml_collections.ConfigDict:
    """Returns the default config, for `configs/*.py` to edit.

    Values are references of type `object`, so that the command line parses any literal and all judging happens in
    `from_config_dict`, in one place and with one kind of message.
    """
    config: dict[str, Any] = {section: {} for section in _SECTIONS}
    for name, field in FIELDS.items():
        *section, leaf = name.split(".")
        target = config[section[0]] if section else config
        target[leaf] = config_dict.FieldReference(field.default, field_type=object)
    return ml_collections.ConfigDict(config)


def make_config(**changes: Any) -> Config:
    """Builds a validated Config from the defaults and changes: `make_config(**{"model.width": 64})`."""
    config = default_config()
    for name, value in changes.items():
        if name not in FIELDS:
            raise ConfigError(unknown_key(name))
        config.update_from_flattened_dict({name: value})
    return from_config_dict(config)


def from_config_dict(config: ml_collections.ConfigDict | dict) -> Config:
    """Checks every key and every relation between keys, and resolves derived sizes.

    Raises:
      ConfigError: naming the key, its value and what is allowed.
    """
    flat = _flatten(config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config)
    for name in flat:
        if name not in FIELDS:
            raise ConfigError(unknown_key(name))
    values = {name: checked(name, field, flat.get(name, field.default)) for name, field in FIELDS.items()}
    _resolve(values)
    check_relations(values, LENGTH_KEYS)
    sections = {
        section: cls(**{f.name: values[f"{section}.{f.name}"] for f in dataclasses.fields(cls)})
        for section, cls in _SECTIONS.items()
    }
    return Config(seed=values["seed"], **sections)


def asked_for(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Keys of a ConfigDict that are not at their default, for `make_config`."""
    flat = _flatten(config.to_dict())
    return {name: value for name, value in flat.items() if name not in FIELDS or value != FIELDS[name].default}


def to_flat_dict(config: Config) -> dict[str, Any]:
    """The config as {"section.key": value}, JSON-ready."""
    return {name: _get(config, name) for name in FIELDS}


def from_flat_dict(flat: dict[str, Any]) -> Config:
    """Inverse of `to_flat_dict`; also of its JSON form."""
    return from_config_dict(dict(flat))


def difference(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Keys on which two configs differ, as {key: (old value, new value)}."""
    return {name: (_get(old, name), _get(new, name)) for name in FIELDS if _get(old, name) != _get(new, name)}


def changed_from_default(config: Config) -> dict[str, Any]:
    """Keys that were set to something else than their default or, where the default is derived, than what it gives."""
    flat = to_flat_dict(config)
    defaults = {name: field.default for name, field in FIELDS.items()} | _derived(flat)
    return {name: value for name, value in flat.items() if value != defaults[name]}


def describe(config: Config) -> list[str]:
    """The whole config, a line or two per section."""
    lines = []
    for section, cls in _SECTIONS.items():
        values = " ".join(f"{f.name}={_get(config, f'{section}.{f.name}')}" for f in dataclasses.fields(cls))
        lines += textwrap.wrap(values, 110, initial_indent=f"{section:<10}", subsequent_indent=" " * 10)
    return [*lines, f"seed      {config.seed}"]


def fingerprint(config: Config) -> str:
    """Twelve hex digits, the same for two configs exactly if they say the same of what is learned.

    Taken over the keys that are not free and differ from their default. So a version with more keys gives the same.
    """
    learned = {name: value for name, value in changed_from_default(config).items() if not may_change(name, "free")}
    return hashlib.sha256(canonical(learned).encode()).hexdigest()[:12]


def change_table() -> list[str]:
    """A Markdown table: what it takes to change each key of a run that has begun."""
    rows = [f"| {takes} | {_keys_that_take(change)} |" for change, takes in CHANGES.items()]
    return ["| to change it takes | keys |", "|---|---|", *rows]


def _keys_that_take(change: str) -> str:
    names = [name for name, field in FIELDS.items() if field.metadata["change"] == change]
    sections = dict.fromkeys(name.split(".")[0] for name in names)
    groups = [[name for name in names if name.split(".")[0] == section] for section in sections]
    leaves = [", ".join(name.split(".")[-1] for name in group) for group in groups]
    parts = [
        group[0] if len(group) == 1 else f"{section}.{{{inside}}}"
        for section, group, inside in zip(sections, groups, leaves, strict=True)
    ]
    return ", ".join(f"`{part}`" for part in parts)


def _get(config: Config, name: str) -> Any:
    value = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    """{"section.key": value}. What lies deeper is named, but not looked into: it has no place in a config."""
    if not hasattr(tree, "items"):
        raise ConfigError(f"config = {shown(tree)}: must be a ConfigDict, with sections {', '.join(_SECTIONS)}")
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name.count(".") < 2 and (value or name in _SECTIONS):  # {} is a (wrong) value
            flat |= _flatten(value, f"{name}.")
        elif name in _SECTIONS:
            raise ConfigError(f"config.{name} = {shown(value)}: must be a section with keys of its own")
        else:
            flat[name] = value
    return flat


def unknown_key(name: str) -> str:
    """The message for a key that does not exist, with the nearest one that does."""
    name = name if len(name) <= 100 and name.isprintable() else shown(name)
    near = difflib.get_close_matches(name, FIELDS, n=1) or [
        k for k in FIELDS if k.split(".")[-1] == name.split(".")[-1]
    ]
    hint = f"; did you mean config.{near[0]}?" if near else f"; sections are {', '.join(_SECTIONS)}"
    return f"config.{name}: unknown key{hint}"


def _resolve(values: dict[str, Any]) -> None:
    """Replaces each 0 that stands for "derive it" by its value."""
    width, heads = values["model.width"], values["model.num_heads"]
    if not values["model.head_dim"] and width % heads:
        raise ConfigError(f"config.model.num_heads = {heads}: must divide model.width = {width}, or set model.head_dim")
    for name, value in _derived(values).items():
        values[name] = values[name] or value


def _derived(values: dict[str, Any]) -> dict[str, int]:
    """What 0 stands for, where it stands for something that other keys give."""
    width, heads = values["model.width"], values["model.num_heads"]
    return {
        "model.num_kv_heads": heads,
        "model.head_dim": width // heads,
        "model.mlp_dim": 4 * width,
        "model.context": values["data.seq_len"],
        "experts.hidden": values["model.mlp_dim"] or 4 * width,
    }
