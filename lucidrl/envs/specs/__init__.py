"""What the entries of an environment may hold: shapes, dtypes, and which values.

Leaf specs describe one tensor each, a `Composite` a TensorDict of them. A shape includes the env's batch size.
"""

from lucidrl.envs.specs.choices import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from lucidrl.envs.specs.composite import Composite
from lucidrl.envs.specs.numbers import Bounded, Unbounded
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
