"""Recipe file + `key.sub=value` overrides in, one frozen `Config` out. Checked here, and nowhere else again.

`load_config` is the only way in. Unknown keys are refused with the nearest known one; values of a wrong type say which
key, what was expected and what came. Each stage is handed its own section, never the whole tree.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lockstep.errors import ConfigError

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class RunConfig(Section):
    dir: str = Field("", description="run directory; empty means runs/<recipe's file name>")
    seed: NonNegativeInt = Field(0, description="seed of everything random: adapter init, data order, sampling, dropout")
    num_steps: PositiveInt = Field(100, description="optimizer steps to train")
    max_train_seconds: PositiveFloat | None = Field(
        None, description="stop cleanly once training has taken this long (seconds, evaluation not counted); none: no limit"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA where there is one")


class DistConfig(Section):
    timeout_s: PositiveFloat = Field(600.0, description="limit of one data collective (seconds)")
    agree_timeout_s: PositiveFloat = Field(60.0, description="how long ranks wait for each other at an agreement (seconds)")


class ModelConfig(Section):
    path: str = Field(
        description="folder of a transformers checkpoint, or package:NAME for a GGUF file in an installed Python package"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the frozen base, trainer and engine alike")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", description="transformers' attention kernel")
    gradient_checkpointing: bool = Field(False, description="recompute activations in backward: less memory, more time")


class LoraSection(Section):
    rank: PositiveInt = Field(16, description="rank r of the adapter")
    alpha: PositiveFloat = Field(32.0, description="scale numerator: the update is alpha/r * B @ A (alpha/sqrt(r) with use_rslora)")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="dropout on the adapter's input while training")
    targets: str | tuple[str, ...] = Field(
        "all-linear", description="all-linear (without the head), a regular expression, or a list of module name endings"
    )
    use_rslora: bool = Field(False, description="scale by alpha/sqrt(r)")
    init_from: str = Field("", description="PEFT folder to start from; empty starts a new adapter (A random, B zero)")


class ShardingConfig(Section):
    backend: Literal["fsdp2"] = Field("fsdp2", description="how parameters are sharded over the ranks")
    layer_classes: tuple[str, ...] = Field((), description="module classes that become units; empty: the model's own list")
    reshard_after_forward: bool = Field(
        True, description="drop gathered parameters after forward (least memory); false keeps them until backward (fewer gathers)"
    )


class DataSource(Section):
    """One data set: a named task, or a file of one's own."""

    task: str = Field("", description="named task: sums, or reasoning-gym:NAME; empty if path is given")
    task_args: Mapping[str, Any] = Field(default_factory=dict, description="arguments of the task, e.g. {low: 10, high: 99}")
    path: str = Field("", description="JSONL or Parquet file, or a folder saved by datasets; empty if task is given")
    split: str = Field("train", description="split to take, where path holds several")
    num_rows: PositiveInt | None = Field(None, description="rows to take (file) or to make (task; 1024 if none)")
    prompt_column: str = Field("prompt", description="column with the question: text, or a list of chat messages")
    answer_column: str = Field("answer", description="column with the reference answer; empty: the data has none")
    seed: NonNegativeInt = Field(0, description="seed of a named task's rows; different seeds need not be disjoint, see exclude")


class PromptConfig(Section):
    """How a row becomes token ids."""

    format: Literal["chat", "text"] = Field("chat", description="chat: through the tokenizer's chat template; text: as it is")
    template: str = Field("{prompt}", description="text put around the question; {prompt} stands for it")
    system: str | None = Field(None, description="system message; none leaves it to the chat template")
    max_tokens: PositiveInt = Field(1024, description="longest prompt allowed, in tokens")
    on_too_long: Literal["drop", "error"] = Field("drop", description="longer prompts: drop them and say how many, or refuse to start")


class DataConfig(Section):
    train: DataSource
    eval: DataSource | None = Field(None, description="held-out data; rows whose question is also in train are removed from train")
    prompt: PromptConfig = PromptConfig()
    shuffle: bool = Field(True, description="shuffle the training rows anew in every epoch (by run.seed)")


class RewardConfig(Section):
    name: str = Field(description="exact_match, last_number, format_number, math_verify, reasoning_gym, or module:function")
    weight: float = Field(1.0, description="factor in the total reward", allow_inf_nan=False)
    timeout_s: PositiveFloat = Field(30.0, description="limit for one batch of samples (seconds); beyond it the run stops with the sample shown")
    args: Mapping[str, Any] = Field(default_factory=dict, description="extra keyword arguments for the function")


class RolloutConfig(Section):
    engine: Literal["hf"] = Field("hf", description="what generates: hf is transformers in the trainer's process, with weights of its own")
    prompts_per_step: PositiveInt = Field(8, description="prompts in one step, over all ranks")
    group_size: PositiveInt = Field(8, description="samples per prompt")
    temperature: NonNegativeFloat = Field(1.0, description="logits are divided by it, in the engine and in the trainer; 0 is refused for training")
    top_p: Fraction = Field(1.0, description="nucleus sampling; the trainer masks alike when it is below 1")
    top_k: NonNegativeInt = Field(0, description="keep the k most likely tokens; 0 keeps all")
    max_new_tokens: PositiveInt = Field(64, description="longest completion, in tokens")
    stop_token_ids: tuple[int, ...] = Field((), description="token ids that end a completion, beside the tokenizer's and the checkpoint's EOS")
    batch_tokens: PositiveInt = Field(65536, description="tokens of key-value cache that one generation batch may fill")


class TrainConfig(Section):
    algorithm: Literal["grpo", "dr_grpo", "rloo"] = Field("grpo", description="how rewards become advantages")
    lr: PositiveFloat = Field(1e-4, description="AdamW learning rate")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW moment decay rates")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW decoupled weight decay")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after warm-up, down to 0 at run.num_steps")
    warmup_steps: NonNegativeInt = Field(0, description="steps of linear warm-up")
    max_grad_norm: PositiveFloat = Field(1.0, description="clip the global gradient norm to this")
    clip_low: NonNegativeFloat = Field(0.2, description="PPO ratio clipped below 1 - clip_low")
    clip_high: NonNegativeFloat = Field(0.28, description="PPO ratio clipped above 1 + clip_high")
    kl_coef: NonNegativeFloat = Field(0.0, description="weight of the k3 KL to the reference policy in the loss; 0 skips the reference pass")
    drop_zero_std: bool = Field(True, description="leave groups whose rewards are all equal out of the update (they carry no gradient)")
    mask_truncated: bool = Field(False, description="leave completions cut at max_new_tokens out of the loss")
    packing: Literal["padded", "packed", "shared_prefix"] = Field(
        "shared_prefix",
        description="padded: one row per sample; packed: samples behind each other; shared_prefix: a group's prompt is computed once",
    )
    micro_batch_tokens: PositiveInt = Field(8192, description="tokens of one forward and backward pass, per rank")


class SyncConfig(Section):
    mode: Literal["adapter", "merged"] = Field("adapter", description="what travels to the engine after each step: the LoRA tensors, or merged weights")
    bucket_mb: PositiveFloat = Field(64.0, description="size of one bucket (MiB); bounds the export's memory")


class EvalConfig(Section):
    before: bool = Field(True, description="score the held-out data before training")
    after: bool = Field(True, description="score the held-out data after training")
    every_steps: NonNegativeInt = Field(0, description="score it every so many steps too; 0: never")
    max_new_tokens: PositiveInt = Field(24, description="longest completion when scoring (greedy)")
    correct: str = Field("last_number", description="reward that says whether an answer is right (accuracy counts values above 0.5)")
    format: str = Field("", description="reward that says whether the form is as asked (format_rate); empty: not measured")
    before_templates: tuple[str, ...] = Field(
        (), description="other prompt templates tried before training; the best of all is the reported `before`"
    )


class CheckpointConfig(Section):
    every_steps: NonNegativeInt = Field(10, description="save every so many steps; 0: only at the end and when stopped")
    keep: PositiveInt = Field(2, description="complete checkpoints to keep; older ones are deleted")


class ObserveConfig(Section):
    tensorboard: bool = Field(True, description="write TensorBoard event files")
    samples_per_step: NonNegativeInt = Field(8, description="samples written to samples/ at each step")


class Config(Section):
    run: RunConfig = RunConfig()
    dist: DistConfig = DistConfig()
    model: ModelConfig
    lora: LoraSection = LoraSection()
    sharding: ShardingConfig = ShardingConfig()
    data: DataConfig
    reward: tuple[RewardConfig, ...] = Field(min_length=1, description="reward functions; the total is their weighted sum")
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        if self.rollout.temperature == 0:
            raise ValueError("rollout.temperature is 0: greedy samples of one prompt are all equal and teach nothing; use 1.0")
        if self.train.algorithm in ("grpo", "dr_grpo", "rloo") and self.rollout.group_size < 2:
            raise ValueError(f"rollout.group_size is 1: {self.train.algorithm} compares the samples of a group; use 2 or more")
        for where, source in (("data.train", self.data.train), ("data.eval", self.data.eval)):
            if source is not None and bool(source.task) == bool(source.path):
                given = "both" if source.task else "neither"
                raise ValueError(f"{where}: give either `task` or `path`; {given} came")
        if "{prompt}" not in self.data.prompt.template:
            raise ValueError(f"data.prompt.template must contain {{prompt}}; it is {self.data.prompt.template!r}")
        return self


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML recipe, put `key.sub=value` overrides (values are YAML) on top, check everything.

    Raises `ConfigError` naming the key, what was expected and what came.
    """
    path = Path(recipe)
    if not path.is_file():
        raise ConfigError(f"recipe {str(recipe)!r} does not exist (looked in {Path.cwd()}); give the path of a YAML file")
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections such as `model:` and `data:`; it holds {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    tree.setdefault("run", {})
    if isinstance(tree["run"], dict) and not tree["run"].get("dir"):
        tree["run"]["dir"] = str(Path("runs") / path.stem)
    return build_config(tree, source=str(path))


def build_config(tree: Mapping[str, Any], *, source: str = "config") -> Config:
    """Check a nested mapping. Raises `ConfigError` with every fault found, a line each."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_say(item) for item in error.errors()]
        raise ConfigError(f"{source}: " + ("\n  ".join(["", *lines]) if len(lines) > 1 else lines[0])) from error


def dump_config(config: Config) -> str:
    """The resolved config as YAML; `load_config` reads it back to an equal value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def describe_options() -> list[tuple[str, str, str, str]]:
    """(dotted key, type, default, meaning) of every option, in the order of the tree."""
    return list(_walk(Config, ""))


def _walk(section: type[BaseModel], prefix: str):
    for name, info in section.model_fields.items():
        inner = _section_of(info.annotation)
        if inner is not None:
            key = f"{prefix}{name}[]" if "tuple" in str(info.annotation) else f"{prefix}{name}"
            yield from _walk(inner, key + ".")
            continue
        default = "required" if info.is_required() else yaml.safe_dump(_plain(info.get_default(call_default_factory=True)), default_flow_style=True)
        yield f"{prefix}{name}", _type_name(info.annotation), default.removesuffix("...\n").strip(), info.description or ""


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not getattr(annotation, "__args__", ()):
        return annotation.__name__
    text = str(annotation).replace("typing.", "").replace("NoneType", "None").replace("collections.abc.", "")
    if text.startswith("Annotated["):
        return _type_name(annotation.__origin__)
    if text.startswith("Literal["):
        return " | ".join(str(choice) for choice in annotation.__args__)
    args = [_type_name(arg) if arg is not ... else "..." for arg in getattr(annotation, "__args__", ())]
    if " | " in text or text.startswith(("Optional", "Union")):
        return " | ".join(args)
    return f"list of {args[0]}" if text.startswith("tuple") and "..." in args else text


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, raw = override.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form key.sub=value, e.g. train.lr=1e-4")
    try:
        value = yaml.safe_load(raw) if raw else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: {raw!r} is not a YAML value: {error}") from error
    node: Any = tree
    for part in parts[:-1]:
        node = _step(node, part, override)
    if isinstance(node, list):
        node[_index(node, parts[-1], override)] = value
    else:
        node[parts[-1]] = value


def _step(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, override)]
    inner = node.get(part)
    if inner is None:
        inner = node[part] = {}
    if not isinstance(inner, dict | list):
        raise ConfigError(f"override {override!r}: {part!r} is the value {inner!r} in the recipe, not a section")
    return inner


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"override {override!r}: {part!r} must be an index of a list with {len(node)} entries (0 is the first)")
    return int(part)


def _say(item: Any) -> str:
    loc = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {loc!r}; {_nearest(loc)}"
    if item["type"] == "missing":
        return f"{loc!r} is required and missing"
    if item["type"] == "value_error":
        return (f"{loc}: " if loc else "") + item["msg"].removeprefix("Value error, ")
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{loc}: {message}; {item['input']!r} came"


def _nearest(loc: str) -> str:
    known = [key for key, *_ in describe_options()]
    sections = sorted({key.rsplit(".", depth)[0] for key in known for depth in range(1, key.count(".") + 1)})
    generic = ".".join("" if part.isdigit() else part for part in loc.split(".")).replace("..", "[].")
    parent, _, last = generic.rpartition(".")
    siblings = [key for key in (*known, *sections) if key.rpartition(".")[0] == parent]
    by_name = {key.rpartition(".")[2]: key for key in siblings}
    near = difflib.get_close_matches(last, by_name, n=1, cutoff=0.5)
    if near:
        return f"did you mean {by_name[near[0]]!r}?"
    near = difflib.get_close_matches(generic, [*known, *sections], n=1, cutoff=0.3)
    return f"the nearest known key is {near[0]!r}" if near else f"known here: {', '.join(sorted(by_name))}"
