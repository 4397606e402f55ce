"""Claims of the Delightful Policy Gradient papers, measured again on small models with the losses of `learners.losses`.

`digits`, `reversal` (`--terminal`), `single_arm`: one command each. Hundreds of learners train together (`stacks`).
"""
