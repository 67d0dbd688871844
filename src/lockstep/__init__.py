"""lockstep: RL post-training for LoRA adapters on PyTorch FSDP. The trainer's ranks and the rollout engine stay in lockstep."""

__version__ = "0.1.0"
