"""The collectors of Lucid RL."""

from __future__ import annotations

from collection.documented_subjects import Documented

SUBJECTS = Documented("lucidrl").subjects
