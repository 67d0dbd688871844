"""Prompts, a sampling distribution and weights in; samples with their log-probabilities and policy version out."""
