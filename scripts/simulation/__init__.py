"""A run in virtual time: the production buffer, with actors and a learner that are modelled."""
