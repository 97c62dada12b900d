"""Training from Python: one trainer per command, such as `GRPOTrainer`.

A trainer starts the same run as its command: the same settings, checks, run folder, display and checkpoints.
"""

from lucidrl.recipes.arguments import DPOOptions, GRPOOptions, PreferenceOptions, RunOptions, SFTOptions
from lucidrl.recipes.callbacks import Callback, StopTraining, TrainingResult
from lucidrl.trainers.base import LanguageTrainer, TextTrainer, Trainer
from lucidrl.trainers.control import PPOTrainer
from lucidrl.trainers.language import DistillTrainer, DPOTrainer, GRPOTrainer, RewardModelTrainer, SFTTrainer

__all__ = [
    "Callback",
    "DPOOptions",
    "DPOTrainer",
    "DistillTrainer",
    "GRPOOptions",
    "GRPOTrainer",
    "LanguageTrainer",
    "PPOTrainer",
    "PreferenceOptions",
    "RewardModelTrainer",
    "RunOptions",
    "SFTOptions",
    "SFTTrainer",
    "StopTraining",
    "TextTrainer",
    "Trainer",
    "TrainingResult",
]
