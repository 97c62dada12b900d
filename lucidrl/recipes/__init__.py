"""Recipes: whole runs, from configuration to wired parts."""
