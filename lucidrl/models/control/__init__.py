"""Policies and critics for control tasks: small networks on numeric observations."""
