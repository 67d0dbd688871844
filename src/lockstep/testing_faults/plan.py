"""A seed and a number in; one fault of a weight update, and what must come of it, out. Pure.

A scenario is named by (seed, number): the same pair is the same fault on every rank and on every machine.

Glossary: *place* who is hurt: a trainer rank, a bucket between export and transport, a packet on the wire, the engine · *point* when:
a name that the injectors of `inject.py` and `engine.py` pass by · *act* what happens there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Transport = Literal["inproc", "shm", "disk", "collective"]
Kind = Literal["adapter", "merged"]
Outcome = Literal["served", "restarted", "refused", "ended"]
"""What a sync with a fault comes to. served: as if nothing had been; restarted: served, by an engine that was started again; refused:
a named error on every rank, and the next sync works; ended: a named error on every rank that is left, and new ranks go on."""

LATEST = 3
"""Faults in buckets and packets strike one of the first four (0 .. 3): every update of the harness has more."""

EVERY_RANK = ("plan", "agreed", "sending", "canary")
"""Points that every rank passes: before it agrees on the plan, after it, while elements travel, when the canary scores."""
PUSHING = ("begin", "bucket", "commit", "committed", "probe")
"""Points that a rank passes which pushes: before each call of the engine, after the commit, before the canary's probe."""
OF_ENGINE = ("begin", "bucket", "commit", "in commit", "committed", "generate")
"""Points in the engine's process; "in commit": the new weights are in place, and not checked yet."""
BUCKET_ACTS = ("lose", "repeat", "reorder", "truncate", "drop", "flip")
PACKET_ACTS = {
    "inproc": (),
    "shm": ("lose", "repeat", "truncate", "flip"),
    "disk": ("lose", "truncate", "flip"),
    "collective": ("lose", "repeat", "truncate", "flip"),
}
ENGINE_ACTS = ("kill", "raise", "late", "hang")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is synced with what."""

    transport: Transport
    kind: Kind
    folder: str
    """A model as `session.make_fault_model` writes it."""
    num_ranks: int = 1
    timeout_s: float = 2.0
    """How long the trainer waits for one answer of the engine."""

    @property
    def is_shared(self) -> bool:
        """One engine in a process of its own; else one in each rank."""
        return self.transport != "inproc"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong in one sync."""

    place: Literal["trainer", "bucket", "packet", "engine"]
    act: str
    point: str
    rank: int = 0
    """Which trainer rank is hurt, or whose buckets."""
    at: int = 0
    """At which passage of the point, from 0."""
    seed: int = 0
    """For what the act draws: which tensor, which bit."""

    @property
    def name(self) -> str:
        """Without what differs between two of a kind."""
        return f"{self.place}: {self.act} at {self.point}"

    @property
    def outcome(self) -> Outcome:
        """What must come of it."""
        match self.place, self.act:
            case "trainer", "kill" | "exit" | "freeze":
                return "ended"
            case "trainer", "raise":
                return "ended" if self.point in ("sending", "canary") else "refused"
            case "trainer", _:
                return "served"
            case "bucket", act:
                return "served" if act == "reorder" else "refused"
            case "engine", "kill" | "hang":
                return "restarted"
            case "engine", "late":
                return "served"
        return "refused"


def fault_of(setup: Setup, seed: int, number: int) -> Fault:
    """Scenario `number` of `seed`: a fault that the ranks survive."""
    draw = random.Random(f"{seed}:{number}:{setup.transport}:{setup.kind}:{setup.num_ranks}")
    places = ["trainer", "bucket"] + (["packet", "engine", "engine"] if setup.is_shared else [])
    place = draw.choice(places)
    at, bits = draw.randint(0, LATEST), draw.getrandbits(31)
    pushing = draw.randrange(1 if setup.is_shared else setup.num_ranks)
    if place == "bucket":
        return Fault("bucket", draw.choice(BUCKET_ACTS), "bucket", pushing, at, bits)
    if place == "packet":
        return Fault("packet", draw.choice(PACKET_ACTS[setup.transport]), "packet", 0, at, bits)
    if place == "engine":
        act, point = draw.choices(ENGINE_ACTS, weights=(4, 8, 4, 1))[0], draw.choice(OF_ENGINE)
        return Fault("engine", act, point, 0, at if point == "bucket" else 0, bits)
    act = draw.choice(("raise", "stall"))
    point = draw.choice(
        [each for each in (*EVERY_RANK, *PUSHING) if act == "stall" or each not in ("sending", "canary")]
    )
    rank = pushing if point in PUSHING else draw.randrange(setup.num_ranks)
    return Fault("trainer", act, point, rank, at if point in ("bucket", "sending") else 0, bits)


def deadly_faults(setup: Setup) -> list[Fault]:
    """Every fault that ends the run: each point on each rank that passes it, killed, left, frozen, or out of step."""
    found = []
    for rank in range(setup.num_ranks):
        pushes = rank == 0 or not setup.is_shared
        for point in (*EVERY_RANK, *PUSHING):
            if point in PUSHING and not pushes:
                continue
            at = 1 if point in ("bucket", "sending") else 0
            acts = ["kill", "exit", "freeze"] + (["raise"] if point in ("sending", "canary") else [])
            found += [Fault("trainer", act, point, rank, at) for act in acts]
    return found
