"""Training with Lightning: the module, carried states, metrics, callbacks, runs and sweeps."""
