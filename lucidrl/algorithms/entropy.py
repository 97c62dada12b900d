"""Adapt the coefficient of the entropy bonus, so that the entropy of the policy stays at a target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lucidrl.algorithms.config import EntropyControlConfig


class EntropyController:
    """Adaptive entropy control (He et al., Skywork Open Reasoner 1, 2025).

    After a step with entropy e, the kept coefficient c becomes

        c + step_size if e < target, c - step_size if e > target, within 0 and max_coefficient.

    The next step uses c if e <= target, otherwise 0: a policy that explores enough gets no bonus.

    Example:
        >>> controller = EntropyController(EntropyControlConfig(target=0.5, step_size=0.01), initial=0.0)
        >>> controller.observe(0.4)
        >>> controller.coefficient
        0.01
    """

    def __init__(self, config: EntropyControlConfig, initial: float) -> None:
        """`initial`: the coefficient of the first step; without a target, that of all steps."""
        self._config = config
        self._kept = self.coefficient = initial

    @property
    def is_on(self) -> bool:
        return self._config.target is not None

    def observe(self, entropy: float) -> None:
        """Adapt the coefficient to the entropy of the last step; NaN, of a step without tokens, changes nothing."""
        target = self._config.target
        if target is None or math.isnan(entropy):
            return
        change = self._config.step_size * ((entropy < target) - (entropy > target))
        self._kept = min(max(self._kept + change, 0.0), self._config.max_coefficient)
        self.coefficient = self._kept if entropy <= target else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values; empty without a target."""
        return {"kept": self._kept, "coefficient": self.coefficient} if self.is_on else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; a run that had no target before begins with its settings."""
        if self.is_on and state:
            self._kept, self.coefficient = state["kept"], state["coefficient"]
