"""What follows a run while it goes on, or reads what it has left: trackers, gauges, samples, counts of faults."""
