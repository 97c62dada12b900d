"""Policies and critics for control tasks: small networks on observations of numbers."""
