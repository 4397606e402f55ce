"""Plots for outsiders: what is drawn is data of its own (`plot.Plot`), kept as JSON beside the picture.

Rules for every plot: the title says the finding; axes have units; panels share them; lines are labelled where they
end; each seed is a thin line or a dot; intervals are drawn from five seeds on; colours are safe for the colour-blind;
all is legible at 700 pixels. `python -m scripts.plots` draws the pictures again from the data.

| module | what it does |
|---|---|
| `plot` | the data of a plot, to and from JSON |
| `canvas` | size, title, note, colours, labels that do not overlap |
| `lines` | learning curves; a number against a key of the grid |
| `rows` | a number for each of several things, and the ratio of two |
| `timelines` | who works and who waits |
| `matrix` | cosines |
| `beside` | what was simulated, and a formula beside it |
| `drawing` | from data to a picture |
"""
