"""The runtime of all workers: processes on this machine or on Ray nodes, as lock-step groups or independent pools."""
