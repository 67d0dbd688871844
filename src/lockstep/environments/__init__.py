"""Environments: the other side of a conversation with the policy. To write one, import these names from here."""

from lockstep.environments.base import Environment, Message, Reply, Turn

__all__ = ["Environment", "Message", "Reply", "Turn"]
