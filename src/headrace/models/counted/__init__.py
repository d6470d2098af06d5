"""Families that are counted but not served: their config.json read into a ModelSpec with a stack.

One file for each kind of mixer; a family is one function from Fields to a ModelSpec.
"""
