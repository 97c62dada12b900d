"""What a run shows afterwards: its merged timeline."""
