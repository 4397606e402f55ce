"""Tools that look for faults: they break runs and inputs on purpose, and check that the guarantees hold.

| command | what it does |
|---|---|
| `chaos` | kills, stops, hangs and cuts off the processes of a run; fills its disk; pushes rubbish |
| `elastic` | lets actors join and leave a run |
| `fuzz` | feeds made messages and weight updates to what reads them |
| `mutants` | puts small faults into the core, and counts those that its tests notice |

`areal-like ledger RUN --verify` checks one recorded run.
"""
