"""Text environments: asynchronous, batched, and asked under a deadline."""
