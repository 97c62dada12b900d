"""Configuration, logging and other helpers that do not depend on training."""
