"""From a data set to prompts, and from samples to rewards and advantages.

The order of the flow: source -> tasks -> prompts -> order -> (rollout) -> rewards -> advantages -> packing.
"""
