"""A model and a policy in, the clean names of the modules that become units out. Pure: nothing is changed, meta is fine.

*PEFT layer*: the module that PEFT puts in a layer's place (LoRA layer, modules_to_save, trainable tokens). It is one thing
here: the layer that it wraps, and its adapter's leaves, are never units of their own unless a user's glob says so.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from lockstep.errors import ModelError
from lockstep.logs import ON_EVERY_RANK
from lockstep.names import clean_name

log = logging.getLogger(__name__)

DEFAULT_MIN_PARAMS = 1_000_000

# They have no forward, so no hook of theirs ever runs: FSDP cannot gather for them.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# What every PEFT layer calls the module that it took the place of.
_WRAPPED_BY_PEFT = frozenset({"base_layer", "original_module", "token_adapter"})


@dataclass(frozen=True, slots=True)
class LayerClasses:
    """One unit per module of these classes (empty: the model's own `_no_split_modules`, sub-models included), and one each
    for an input embedding and an output head that share no weight."""

    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _as_tuple(self.names))


@dataclass(frozen=True, slots=True)
class MinParams:
    """One unit per lowest module that has at least so many parameters: never nested, never inside a PEFT layer."""

    num_params: int = DEFAULT_MIN_PARAMS

    def __post_init__(self) -> None:
        if self.num_params < 1:
            raise ValueError(f"MinParams: at least 1 parameter is expected, {self.num_params} came")


@dataclass(frozen=True, slots=True)
class Modules:
    """One unit per module whose clean name matches one of these globs; the only policy that may nest units.

    `*` stays within one part of a dotted name, so that `model.layers.*` is the layers and nothing inside them; `**` stands
    for any number of parts: `**.mlp`.
    """

    globs: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "globs", _as_tuple(self.globs))
        if not self.globs:
            raise ValueError(
                "Modules: at least one glob is expected; without units of its own a model is one unit, the root"
            )


def _as_tuple(names: str | Iterable[str]) -> tuple[str, ...]:
    """One name may stand for a list of one; its letters are not names."""
    return (names,) if isinstance(names, str) else tuple(names)


Policy = LayerClasses | MinParams | Modules


@dataclass(slots=True)
class _Node:
    module: nn.Module
    """The outermost one of the name: an activation-checkpoint or compile wrapper, if there is one."""
    classes: set[str] = field(default_factory=set)
    """Class names of it and of what it wraps."""


class ModuleTree:
    """The modules of a model under their clean names, in the model's order; wrappers are seen through."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.nodes: dict[str, _Node] = {}
        for live, module in model.named_modules(remove_duplicate=False):
            self.nodes.setdefault(clean_name(live), _Node(module)).classes.add(type(module).__name__)
        self._names: dict[int, list[str]] = {}
        for name, node in self.nodes.items():
            self._names.setdefault(id(node.module), []).append(name)
        self._shared: list[list[str]] = _shared_parameters(model)
        self._peft_layers = {
            name.rpartition(".")[0] for name in self.nodes if name.rpartition(".")[2] in _WRAPPED_BY_PEFT
        }
        self._total = sum(param.numel() for param in model.parameters())

    def names_of(self, module: nn.Module) -> list[str]:
        """Every clean name that a module has; none if it is below a wrapper, or not in the model."""
        return self._names.get(id(module), [])

    def outermost_peft_layer(self, name: str) -> str:
        """The name itself, or that of the outermost PEFT layer that it is in."""
        return next((prefix for prefix in prefixes(name) if prefix in self._peft_layers), name)

    def num_params(self, name: str) -> int:
        return sum(param.numel() for param in self.nodes[name].module.parameters())

    def can_be_unit(self, name: str) -> bool:
        """Not the root, not a container, and not all of the model: PEFT calls the model that it holds past its hooks."""
        return (
            bool(name) and not isinstance(self.nodes[name].module, _CONTAINERS) and self.num_params(name) < self._total
        )

    def shared_beyond(self, name: str) -> list[str]:
        """Names, inside and outside the module, of the parameters that it shares with the rest of the model."""
        own = self.names_of(self.nodes[name].module)

        def is_inside(tensor: str) -> bool:
            return any(tensor.startswith(f"{prefix}.") for prefix in own)

        crossing = [names for names in self._shared if len({is_inside(each) for each in names}) == 2]
        return [each for names in crossing for each in names]


def prefixes(name: str) -> list[str]:
    """`a`, `a.b`, `a.b.c` of `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def choose_units(tree: ModuleTree, policy: Policy) -> list[str]:
    """Clean names of the modules that become units, in the model's order.

    A module that shares a parameter with the rest of the model is none: FSDP takes a tied parameter in one unit only, which
    must be one that holds all of its users (accelerate PR #4171). Raises `ModelError` for a glob without a match.
    """
    match policy:
        case LayerClasses(names):
            chosen = _by_class(tree, names)
        case MinParams(num_params):
            chosen = _by_size(tree, num_params)
        case Modules(globs):
            chosen = _by_glob(tree, globs)
        case _:
            raise TypeError(f"a policy is LayerClasses(), MinParams(n) or Modules(globs); {policy!r} came")
    apart = [name for name in chosen if not tree.shared_beyond(name)]
    joined = [name for name in chosen if name not in set(apart)]
    if joined and not isinstance(policy, MinParams):
        log.warning(
            "%d modules, the first %r, share %s with modules outside them and stay in the unit around them",
            len(joined),
            joined[0],
            tree.shared_beyond(joined[0])[:4],
            extra=ON_EVERY_RANK,
        )
    order = {name: index for index, name in enumerate(tree.nodes)}
    return sorted(apart, key=order.__getitem__)


def _by_class(tree: ModuleTree, names: Sequence[str]) -> list[str]:
    wanted = set(names) or _no_split_classes(tree.model)
    found = [name for name, node in tree.nodes.items() if wanted & node.classes and tree.can_be_unit(name)]
    if not found:
        which = f"no module of class {sorted(wanted)} in the model" if wanted else "the model names no layer classes"
        log.warning("%s; taking units of at least %d parameters", which, DEFAULT_MIN_PARAMS, extra=ON_EVERY_RANK)
        return _by_size(tree, DEFAULT_MIN_PARAMS)
    missing = missing_classes(tree, names)
    if missing:
        log.warning(
            "classes %s are not in the model; units are made of %s",
            missing,
            sorted(wanted - set(missing)),
            extra=ON_EVERY_RANK,
        )
    layers = _outermost([tree.outermost_peft_layer(name) for name in found])
    return layers + [name for name in _untied_embeddings(tree) if not _is_related(name, layers)]


def missing_classes(tree: ModuleTree, names: Sequence[str] = ()) -> list[str]:
    """Of the layer classes named (empty: the model's own list), those that the model does not contain."""
    present = {cls for node in tree.nodes.values() for cls in node.classes}
    return sorted((set(names) or _no_split_classes(tree.model)) - present)


def _no_split_classes(model: nn.Module) -> set[str]:
    """Of the model and its sub-models. transformers has lists, sets and None there, and models of one's own a string."""
    found: set[str] = set()
    for module in model.modules():
        names = getattr(module, "_no_split_modules", None) or ()
        found |= {names} if isinstance(names, str) else set(names)
    return {name for name in found if name}


def _untied_embeddings(tree: ModuleTree) -> list[str]:
    """Input embeddings and output heads, by role: PEFT may have put something of any type in their place (verl PR #5516).

    Tied ones are left where they are, in the unit around both.
    """
    models = [module for module in tree.model.modules() if isinstance(module, PreTrainedModel)]
    names: dict[str, None] = {}
    for model in models:
        head = model.get_output_embeddings()
        if head is None and model is not models[0]:
            continue  # a tower: what it embeds are patches or frames, in a small layer
        for module in (_input_embedding(model), head):
            places = tree.names_of(module) if module is not None else []
            names.update(dict.fromkeys(map(tree.outermost_peft_layer, places[:1])))
    return [name for name in names if tree.can_be_unit(name) and not tree.shared_beyond(name)]


def _input_embedding(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None  # a composite: its language model, which is asked as well, knows


def _by_size(tree: ModuleTree, num_params: int) -> list[str]:
    able = [
        name
        for name in tree.nodes
        if tree.can_be_unit(name) and tree.outermost_peft_layer(name) == name and tree.num_params(name) >= num_params
    ]
    above = {prefix for name in able for prefix in prefixes(name) if prefix != name}
    return [name for name in able if name not in above]


def _by_glob(tree: ModuleTree, globs: Sequence[str]) -> list[str]:
    names = [name for name in tree.nodes if name]
    chosen: set[str] = set()
    for glob in globs:
        matches = [name for name in names if _matches(name.split("."), glob.split("."))]
        if not matches:
            near = difflib.get_close_matches(glob, names, n=4, cutoff=0.3) or names[:4]
            raise ModelError(f"sharding: glob {glob!r} matches no module; names there are, for example, {near}")
        if all(isinstance(tree.nodes[name].module, _CONTAINERS) for name in matches):
            raise ModelError(
                f"sharding: glob {glob!r} matches only {matches[:3]}, which hold modules and have no forward; "
                f"expected modules that are called, such as {matches[0] + '.*'!r}"
            )
        chosen |= {name for name in matches if tree.can_be_unit(name)}
    return [name for name in names if name in chosen]


def _matches(parts: Sequence[str], globs: Sequence[str]) -> bool:
    if not globs:
        return not parts
    if globs[0] == "**":
        return any(_matches(parts[skip:], globs[1:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], globs[0]) and _matches(parts[1:], globs[1:])


def _outermost(names: Sequence[str]) -> list[str]:
    """Drop a name below another one: nested units gather in different orders on different ranks (verl PR #6512)."""
    kept = set(names)
    return list(dict.fromkeys(name for name in names if not kept & set(prefixes(name)[:-1])))


def _is_related(name: str, others: Iterable[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") or each.startswith(f"{name}.") for each in others)


def _shared_parameters(model: nn.Module) -> list[list[str]]:
    """Clean names of every parameter that has more than one."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(clean_name(name))
    return [each for each in names.values() if len(each) > 1]
