"""Composite: the spec of a TensorDict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from lucidrl.envs.arrays import Key, path_of
from lucidrl.envs.specs.spec import Device, Shape, Spec, as_shape
from lucidrl.errors import ConfigError


class Composite(MutableMapping[Key, Any]):
    """Specs by name; a spec may be a Composite itself, and a tuple of names is the path to a nested spec.

        Composite({"position": Unbounded((3,)), "hand": {"grip": Binary(2)}}).leaves()
        # {"position": ..., ("hand", "grip"): ...}

    Args:
        specs: specs by name; a plain mapping becomes a Composite.
        shape: leading dims of all entries, which is the batch size of the TensorDict.
        named: more specs, as keyword arguments.
    """

    def __init__(self, specs: Mapping[str, Any] | None = None, *, shape: Shape = (), **named: Any) -> None:
        self.shape = torch.Size(shape)
        self._entries: dict[str, Spec | Composite] = {}
        for name, spec in {**(specs or {}), **named}.items():
            self[name] = spec

    def leaves(self) -> dict[Key, Spec]:
        """All leaf specs, by name or path."""
        found: dict[Key, Spec] = {}
        for name, spec in self._entries.items():
            if isinstance(spec, Composite):
                found |= {(name, *path_of(key)): leaf for key, leaf in spec.leaves().items()}
            else:
                found[name] = spec
        return found

    def rand(self) -> TensorDict:
        """Random values of all entries, seeded by `torch.manual_seed`."""
        return self._tensordict(Spec.rand)

    def zero(self) -> TensorDict:
        """Zeros for all entries."""
        return self._tensordict(Spec.zero)

    def is_in(self, tensordict: TensorDictBase) -> bool:
        """Whether all entries exist and have allowed values; entries without a spec are ignored."""
        values = [(spec, tensordict.get(key, None)) for key, spec in self.leaves().items()]
        return all(isinstance(value, torch.Tensor) and spec.is_in(value) for spec, value in values)

    def expand(self, *shape: int | Shape) -> Composite:
        """The same specs with more leading dims; `shape` is the new shape of the Composite."""
        new_shape = as_shape(shape)
        added = new_shape[: len(new_shape) - len(self.shape)]
        if (*added, *self.shape) != tuple(new_shape):
            raise ConfigError(
                f"cannot expand shape {list(self.shape)} to {list(new_shape)}; the new shape must end with the old one"
            )
        return self._mapped(lambda spec: spec.expand((*added, *spec.shape)), new_shape)

    def to(self, device: Device) -> Composite:
        """The same specs on `device`."""
        return self._mapped(lambda spec: spec.to(device), self.shape)

    def clone(self) -> Composite:
        """A copy that shares the leaf specs."""
        return self._mapped(lambda spec: spec.clone() if isinstance(spec, Composite) else spec, self.shape)

    def __getitem__(self, key: Key) -> Any:
        name, *rest = path_of(key)
        if name not in self._entries or (rest and not isinstance(self._entries[name], Composite)):
            raise KeyError(f"no spec for {key!r}; the specs are {', '.join(map(repr, self.leaves())) or 'none'}")
        return self._entries[name][tuple(rest)] if rest else self._entries[name]  # type: ignore[index]

    def __setitem__(self, key: Key, spec: Any) -> None:
        name, *rest = path_of(key)
        if rest:
            nested = self._entries.setdefault(name, Composite(shape=self.shape))
            if not isinstance(nested, Composite):
                raise ConfigError(
                    f"{key!r} is below {name!r}, which is {nested}, not a Composite; delete {name!r} first"
                )
            nested[tuple(rest)] = spec
            return
        if isinstance(spec, Mapping) and not isinstance(spec, Composite):
            spec = Composite(spec, shape=self.shape)
        if not isinstance(spec, Spec | Composite):
            raise ConfigError(f"{name!r} is a {type(spec).__name__}; give a spec, or a mapping of specs")
        if spec.shape[: len(self.shape)] != self.shape:
            shape = list(self.shape)
            raise ConfigError(f"{name!r} has shape {list(spec.shape)}; expand it to the Composite's shape={shape}")
        self._entries[name] = spec

    def __delitem__(self, key: Key) -> None:
        *parents, name = path_of(key)
        del (self[tuple(parents)] if parents else self)._entries[name]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Composite) and self.shape == other.shape and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        entries = ", ".join(f"{name}: {spec}" for name, spec in self._entries.items())
        return f"Composite({{{entries}}}, shape={list(self.shape)})"

    def _mapped(self, function: Callable[[Any], Any], shape: Shape) -> Composite:
        return Composite({name: function(spec) for name, spec in self._entries.items()}, shape=shape)

    def _tensordict(self, value_of: Callable[[Spec], torch.Tensor]) -> TensorDict:
        values = {
            name: value_of(spec) if isinstance(spec, Spec) else spec._tensordict(value_of)
            for name, spec in self._entries.items()
        }
        return TensorDict(values, batch_size=self.shape)
