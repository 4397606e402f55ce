"""The class of errors that a person has to mend: a wrong config, bad input, missing keys.

Raised where config or input is read. A process that ends with one is not started again, and nobody is advised to
resume: the same would happen again. Every other error of an actor is taken for an accident, and the actor is restarted.
"""

from __future__ import annotations


class UserError(ValueError):
    """Says what is wrong, where, and what to do about it."""
