"""The runtime of all workers: processes of this machine or of Ray nodes, as lock-step groups or independent pools."""
