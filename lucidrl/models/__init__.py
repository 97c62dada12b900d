"""Models: loading, log-probabilities, generation and the policy workers."""
