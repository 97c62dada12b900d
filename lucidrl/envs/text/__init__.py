"""Text environments: asynchronous, batched calls with a timeout."""
