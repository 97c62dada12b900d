"""Lucid RL: reinforcement-learning post-training you can see through.

Importing this package loads nothing heavy; torch and the rest are imported by the modules that use them.
"""

from typing import TYPE_CHECKING

from lucidrl.profiling.gate import set_profiling_enabled
from lucidrl.utils.imports import names_imported_at_use

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "DPOTrainer",
    "DistillTrainer",
    "GRPOTrainer",
    "PPOTrainer",
    "RewardModelTrainer",
    "SFTTrainer",
    "StopTraining",
    "TrainingResult",
    "__version__",
    "load_metrics",
    "set_profiling_enabled",
]

if TYPE_CHECKING:
    from lucidrl.report.run_data import load_metrics
    from lucidrl.trainers import (
        Callback,
        DistillTrainer,
        DPOTrainer,
        GRPOTrainer,
        PPOTrainer,
        RewardModelTrainer,
        SFTTrainer,
        StopTraining,
        TrainingResult,
    )
else:
    _AT_USE = (
        "Callback",
        "DPOTrainer",
        "DistillTrainer",
        "GRPOTrainer",
        "PPOTrainer",
        "RewardModelTrainer",
        "SFTTrainer",
        "StopTraining",
        "TrainingResult",
    )
    _HOMES = {**dict.fromkeys(_AT_USE, "lucidrl.trainers"), "load_metrics": "lucidrl.report.run_data"}
    __getattr__ = names_imported_at_use(__name__, _HOMES)
