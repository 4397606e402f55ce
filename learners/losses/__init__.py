"""Policy losses, one pure function each; the registry (`areal_like.config.registry`) lists them by name. `contract` is
what every loss is given and returns, `corrections` are importance weights and rejection beside any loss. `clipped`
losses clip a ratio, `weighted` ones weigh the score function, `trusted` ones mask around a trust region, `delightful`
ones gate by surprisal, `weighted` use likelihood instead of a ratio. Nothing is imported here, so that a config is
checked without torch."""
