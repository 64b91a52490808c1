"""Faults on every role while the quickstart trains: what is lost, how long it takes to recover.

`plan` draws what happens when, `faults` does it, `victims` finds the processes, `watch` sees how
the run fares, `suite` puts them together and judges.
"""
