"""Configuration, logging and other helpers that know nothing of training."""
