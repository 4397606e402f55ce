"""Claims of the Delightful Policy Gradient papers, measured again on small models with the losses of `learners.losses`.

`digits`, `reversal` (`--terminal`), `single_arm`, `kondo`: one command each. Hundreds of learners train side by side
(`stacks`), so models and loops are those of this package.
"""
