"""A worker extension that leaves vLLM's packing of weights on: what a server without lockstep's own extension does."""

import vllm._custom_ops as ops

from lockstep.rollout.vllm_worker import LockstepWorker as LockstepWorker

ops._supports_onednn = True
