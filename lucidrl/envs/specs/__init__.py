"""Specs: shape, dtype and allowed values of the entries of an environment.

A leaf spec describes one tensor, a `Composite` a TensorDict. A shape includes the env's batch size.
"""

from lucidrl.envs.specs.composite import Composite
from lucidrl.envs.specs.leaves import Binary, Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot, Unbounded
from lucidrl.envs.specs.spec import Spec

__all__ = [
    "Binary",
    "Bounded",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "OneHot",
    "Spec",
    "Unbounded",
]
