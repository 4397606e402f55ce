"""Policy losses, one pure function each; the registry (`areal_like.config.registry`) lists them by name.

| module | losses | what limits a stale sample |
|---|---|---|
| `contract` | – | what every loss is given, returns and may ask for; the helpers they share |
| `corrections` | – | importance weights and rejection, beside any loss |
| `clipped` | ppo, decoupled_ppo (icepop), gspo, sapo | a clipped ratio |
| `weighted` | reinforce (is_pg, tis, cispo, topr, mis_po), vespo, vtrace | a weight on the score function |
| `trusted` | m2po, dppo | a mask around a trust region |
| `delightful` | dg, dg_kondo | a gate on the learner's own surprisal |
| `targets` | pmpo, tpo | likelihood instead of a ratio |

Names in brackets are the same loss with another correction.

Nothing is imported here, so that a config is checked without torch.
"""
