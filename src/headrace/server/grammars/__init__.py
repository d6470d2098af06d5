"""Processes that compile and follow grammars, and the queue of requests that wait for one."""
