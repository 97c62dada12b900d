"""Recipes: whole runs, from settings to a trained model in a run folder."""
