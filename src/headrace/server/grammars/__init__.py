"""Processes that compile and follow grammars, and who may have one."""
