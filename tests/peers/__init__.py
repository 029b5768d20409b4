"""Properties that the unit tests of peers state, with their concrete values, each with its source.

What can't hold here is a convention, and stands on docs/megatron.md.
"""
