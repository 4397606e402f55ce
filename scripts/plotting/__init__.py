"""Pictures of studies and of timelines: `plot` has their data, kept as JSON beside each picture; `drawing` draws."""
