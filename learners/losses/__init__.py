"""Policy losses, one pure function each; the registry (`areal_like.config.registry`) lists them by name. `contract` is
what every loss is given and returns, `corrections` are importance weights and rejection beside any loss. `clipped`
losses clip a ratio, `bounded` ones bound it otherwise, `weighted` ones weigh the score function or a likelihood,
`delightful` ones gate by surprisal. Nothing is imported here, so that a config is checked without torch."""
