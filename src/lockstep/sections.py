"""Every option of a recipe: its section, name, type, default and meaning, and the checks that tie options together.

A stage is handed its own section, never the whole tree. What reads a recipe into these values is config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from lockstep.sections_base import (
    Float,
    Fraction,
    LoraSection,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from lockstep.sections_critic import CriticConfig, check_critic
from lockstep.sections_environment import EnvironmentConfig, check_environment
from lockstep.sections_teacher import TeacherConfig
from lockstep.sections_train import TrainConfig


class RunConfig(Section):
    dir: str = Field(default="", description="run directory; empty means runs/<recipe's file name>")
    seed: NonNegativeInt = Field(
        default=0, description="seed of everything random: adapter init, data order, sampling, dropout"
    )
    num_steps: PositiveInt = Field(default=100, description="train steps: a rollout, an update and a sync each")
    max_train_seconds: PositiveFloat | None = Field(
        default=None,
        description="stop cleanly once the steps have taken this long (seconds; evaluation and checkpoints not counted); none: no limit",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto takes CUDA where there is one")


class DistConfig(Section):
    timeout_s: PositiveFloat = Field(
        default=600.0,
        description="limit of a data collective, and of waiting for the rollouts, rewards and files of other ranks (seconds)",
    )
    agree_timeout_s: PositiveFloat = Field(
        default=60.0, description="how long ranks wait for each other at an agreement (seconds)"
    )


class ModelConfig(Section):
    path: str = Field(
        description="folder of a transformers checkpoint, or package:NAME for a GGUF file in an installed package"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="dtype of the frozen base, trainer and engine alike; float16 scales the loss (docs/numerics.md)",
    )
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        default="sdpa",
        description="transformers' attention kernel; flex_attention trains on CUDA only, and the embedded engine then uses sdpa",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="less memory, more time: recompute activations in backward",
    )


class ShardingConfig(Section):
    backend: Literal["fsdp2", "fsdp1"] = Field(
        default="fsdp2",
        description="PyTorch's fully_shard, or its older FullyShardedDataParallel (on several ranks); a run may resume on the other one",
    )
    layer_classes: tuple[str, ...] = Field(
        default=(), description="module classes that become units; empty: the model's own list"
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="drop gathered parameters after forward (least memory); false: keep them until the last backward of an update",
    )


class DataSource(Section):
    """One data set: a named task, or a file of one's own."""

    task: str = Field(default="", description="named task: sums, or reasoning-gym:NAME; empty if path is given")
    task_args: Mapping[str, Any] = Field(
        default_factory=dict, description="arguments of the task, e.g. {low: 10, high: 99}"
    )
    path: str = Field(
        default="",
        description="JSONL or Parquet file, or a folder saved by datasets; empty if task is given",
    )
    split: str = Field(default="train", description="split to take, where path holds several")
    num_rows: PositiveInt | None = Field(
        default=None,
        description="rows to take (file) or to make (task; 1024 if none)",
    )
    prompt_column: str = Field(
        default="prompt",
        description="column with the question: text, or a list of chat messages",
    )
    answer_column: str = Field(
        default="answer",
        description="column with the reference answer; empty: the data has none",
    )
    seed: NonNegativeInt = Field(default=0, description="seed of a named task's rows")


class PromptConfig(Section):
    """How a row becomes token ids."""

    format: Literal["chat", "text"] = Field(
        default="chat", description="chat: through the tokenizer's chat template; text: as it is"
    )
    template: str = Field(default="{prompt}", description="text put around the question; {prompt} stands for it")
    system: str | None = Field(default=None, description="system message; none leaves it to the chat template")
    max_tokens: PositiveInt = Field(default=1024, description="longest prompt allowed, in tokens")
    on_too_long: Literal["drop", "error"] = Field(
        default="drop", description="longer prompts: drop them and say how many, or refuse to start"
    )
    special_tokens: Literal["text", "token"] = Field(
        default="text",
        description="what a special token (<|im_end|>) becomes that a row or an environment's message spells out, in format chat: "
        "ordinary text, so that it cannot close a turn, or that token",
    )


class DataConfig(Section):
    train: DataSource
    eval: DataSource | None = Field(
        default=None, description="held-out data; rows whose question is also in train are removed from train"
    )
    prompt: PromptConfig = PromptConfig()
    shuffle: bool = Field(default=True, description="shuffle the training rows anew in every epoch (by run.seed)")


class RewardConfig(Section):
    name: str = Field(
        description="exact_match, last_number, format_number, format_regex (args: pattern), math_verify, reasoning_gym, "
        "environment (what the environment gave), or module:function"
    )
    weight: Float = Field(default=1.0, description="factor in the total reward; negative values punish")
    timeout_s: PositiveFloat = Field(
        default=30.0,
        description="limit for one batch of samples (seconds); beyond it the run stops and shows the sample",
    )
    args: Mapping[str, Any] = Field(default_factory=dict, description="extra keyword arguments for the function")
    sees: Literal["all", "reply"] = Field(
        default="all",
        description="of a sample with several turns (see environment): all of it, observations included, or the policy's last reply",
    )


class RolloutConfig(Section):
    engine: Literal["hf", "vllm", "sglang"] = Field(
        default="hf",
        description="what generates: hf is transformers in the trainer's process; vllm and sglang are servers (see engine)",
    )
    prompts_per_step: PositiveInt = Field(default=8, description="prompts in one step, over all ranks")
    group_size: PositiveInt = Field(default=8, description="samples per prompt")
    temperature: NonNegativeFloat = Field(
        default=1.0, description="logits are divided by it, in the engine and in the trainer; 0 is refused for training"
    )
    top_p: Fraction = Field(default=1.0, description="nucleus sampling; the trainer masks alike when it is below 1")
    top_k: NonNegativeInt = Field(default=0, description="keep the k most likely tokens; 0 keeps all")
    max_new_tokens: PositiveInt = Field(default=64, description="longest completion, in tokens")
    stop_token_ids: tuple[NonNegativeInt, ...] = Field(
        default=(), description="token ids that end a completion, beside the tokenizer's and the checkpoint's EOS"
    )
    batch_tokens: PositiveInt = Field(
        default=65536,
        description="tokens of key-value cache that one generation batch may fill",
    )


class EngineConfig(Section):
    """Servers that generate (rollout.engine vllm or sglang): started by lockstep, or running already."""

    url: tuple[str, ...] = Field(
        default=(), description="servers that run already, e.g. [http://127.0.0.1:8000]; empty: lockstep starts them"
    )
    python: str = Field(
        default="",
        description="Python of the environment that the engine is installed in; empty: the one of `make vllm-env`",
    )
    replicas: PositiveInt = Field(default=1, description="servers to start; prompts are dealt out to them")
    host: str = Field(
        default="127.0.0.1", description="address that a started server listens on; anything but loopback needs a token"
    )
    token_env: str = Field(
        default="LOCKSTEP_ENGINE_TOKEN", description="environment variable with the server's token, where it has one"
    )
    start_timeout_s: PositiveFloat = Field(default=900.0, description="until a started server answers (seconds)")
    request_timeout_s: PositiveFloat = Field(
        default=600.0, description="limit of one request: a batch of samples, a drain, an update (seconds)"
    )
    max_restarts: NonNegativeInt = Field(
        default=2, description="how often a server that died is started again in a run; then the run stops"
    )
    on_update: Literal["drain", "pause"] = Field(
        default="drain",
        description="requests under way when an update begins: wait for them, or abort them and sample them anew afterwards",
    )
    dtype: Literal["model", "float32", "bfloat16", "float16"] = Field(
        default="model",
        description="what the engine holds its weights in, hf included; model: model.dtype. Another one: updates are rounded to it once",
    )
    args: tuple[str, ...] = Field(default=(), description="more arguments of the server's command line")


class CanaryConfig(Section):
    """After an update the engine generates a fixed probe and the trainer scores it: does it serve what the trainer has?"""

    enabled: bool = Field(default=True, description="check; a failure stops the run with a diagnosis")
    every_steps: PositiveInt = Field(default=1, description="check after every so many updates")
    num_prompts: PositiveInt = Field(default=1, description="prompts of the probe")
    num_samples: PositiveInt = Field(default=4, description="samples per prompt of the probe")
    num_tokens: PositiveInt = Field(default=16, description="tokens per sample of the probe")
    tolerance: PositiveFloat | None = Field(
        default=None,
        description="root mean square difference of log-probabilities allowed (nats); none: calibrated when the engine first serves",
    )


class SyncConfig(Section):
    mode: Literal["adapter", "merged", "auto"] = Field(
        default="adapter",
        description="what travels to the engine after each step: the LoRA tensors, or merged weights; auto chooses, and says why",
    )
    transport: Literal["auto", "shm", "disk", "collective"] = Field(
        default="auto",
        description="how it travels to a server: the host's shared memory, files that both see, or a process group across hosts; "
        "auto: shm on one host, else collective",
    )
    host: str = Field(
        default="127.0.0.1",
        description="address of the trainer's rank 0 that the server can reach, for transport collective across hosts",
    )
    bucket_mb: PositiveFloat = Field(default=64.0, description="size of one bucket (MiB); bounds the export's memory")


class EvalConfig(Section):
    before: bool = Field(default=True, description="score the held-out data before training")
    after: bool = Field(default=True, description="score the held-out data after training")
    every_steps: NonNegativeInt = Field(default=0, description="score it every so many steps too; 0: never")
    max_new_tokens: PositiveInt = Field(default=24, description="longest completion when scoring (greedy)")
    before_templates: tuple[str, ...] = Field(
        default=(), description="other prompt templates tried before training; the best of all is the reported `before`"
    )
    correct: RewardConfig = Field(
        default=RewardConfig(name="last_number"),
        description="reward that says whether an answer is right: accuracy counts values above 0.5",
    )
    format: RewardConfig | None = Field(
        default=None, description="reward that says whether the form is as asked (format_rate); none: not measured"
    )

    @field_validator("correct", "format", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class CheckpointConfig(Section):
    every_steps: NonNegativeInt = Field(
        default=10,
        description="save every so many steps; 0: only at the end and when stopped",
    )
    keep: PositiveInt = Field(default=2, description="complete checkpoints to keep; older ones are deleted")


class ObserveConfig(Section):
    tensorboard: bool = Field(default=True, description="write TensorBoard event files")
    samples_per_step: NonNegativeInt = Field(
        default=8, description="samples written to samples/ at each step: the first of rank 0"
    )


class Config(Section):
    run: RunConfig = RunConfig()
    dist: DistConfig = DistConfig()
    model: ModelConfig
    lora: LoraSection = LoraSection()
    sharding: ShardingConfig = ShardingConfig()
    data: DataConfig
    reward: tuple[RewardConfig, ...] = Field(
        min_length=1, description="reward functions; the total is their weighted sum"
    )
    environment: EnvironmentConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    canary: CanaryConfig = CanaryConfig()
    train: TrainConfig = TrainConfig()
    critic: CriticConfig | None = None
    teacher: TeacherConfig | None = None
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        _check_samples(self)
        check_critic(
            self.critic,
            algorithm=self.train.algorithm,
            dtype=self.model.dtype,
            num_steps=self.run.num_steps,
            prompts_per_step=self.rollout.prompts_per_step,
        )
        rewards = {f"reward.{number}": each.name for number, each in enumerate(self.reward)}
        check_environment(
            self.environment,
            rewards={**rewards, "eval.correct": self.eval.correct.name},
            prompt_format=self.data.prompt.format,
            wait_s=self.dist.timeout_s,
        )
        _check_teacher(self)
        _check_data(self)
        return self


def _check_samples(config: Config) -> None:
    """Are there samples to learn from, and enough of them to compare?"""
    if config.rollout.temperature == 0:
        raise ValueError(
            "rollout.temperature is 0: greedy samples of one prompt are all equal and teach nothing; use 1.0"
        )
    if config.rollout.top_k == 1:
        raise ValueError(
            "rollout.top_k is 1: samples of one prompt are all equal and teach nothing; use 0 (all tokens), or more"
        )
    if config.train.algorithm not in ("reinforce_pp", "gae", "distill") and config.rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size is 1: {config.train.algorithm} compares the samples of a group; use 2 or more"
        )
    if config.train.algorithm == "reinforce_pp" and config.rollout.group_size * config.rollout.prompts_per_step < 2:
        raise ValueError(
            "a step has one sample (rollout.prompts_per_step and rollout.group_size are 1), and reinforce_pp compares the samples "
            "of a step; use 2 or more"
        )
    if config.train.mini_batches > config.rollout.prompts_per_step:
        raise ValueError(
            f"train.mini_batches={config.train.mini_batches} cannot share rollout.prompts_per_step="
            f"{config.rollout.prompts_per_step} prompts: a prompt's samples stay together; use at most as many"
        )


def _check_data(config: Config) -> None:
    for where, source in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if source is not None and bool(source.task) == bool(source.path):
            given = "both" if source.task else "neither"
            raise ValueError(f"{where}: give either `task` or `path`; {given} came")
    templates = {"data.prompt.template": config.data.prompt.template}
    templates |= {f"eval.before_templates.{i}": text for i, text in enumerate(config.eval.before_templates)}
    for where, text in templates.items():
        if "{prompt}" not in text:
            raise ValueError(f"{where} must contain {{prompt}}, which stands for the question; it is {text!r}")
    if config.eval.every_steps and config.data.eval is None:
        raise ValueError(
            f"eval.every_steps is {config.eval.every_steps}, and there is no held-out data to score; give data.eval, or leave "
            "every_steps out"
        )


def _check_teacher(config: Config) -> None:
    train = config.train
    if train.algorithm != "distill":
        return
    if config.teacher is None:
        raise ValueError(
            "train.algorithm: distill learns from a teacher alone; give the section teacher, as in `teacher: {path: FOLDER}`"
        )
    if train.kl_in == "reward" and train.kl_coef:
        raise ValueError(
            "train.algorithm: distill has no advantages, so a KL in the reward has no effect; use kl_in: loss, or leave kl_coef out"
        )
