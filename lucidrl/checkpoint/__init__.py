"""Checkpoints that commit by rename, are verified before they are read, and never contain a pickle."""
