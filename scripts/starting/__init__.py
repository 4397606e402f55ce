"""What `scripts.train` does before a run starts: checks, estimates, devices, earlier runs."""
