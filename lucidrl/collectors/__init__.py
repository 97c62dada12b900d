"""Collectors: they gather experience with the current policy."""
