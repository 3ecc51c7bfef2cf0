"""Keeping a log: sealing, retention, compaction, the Delta view, and removing what is not needed.

Needed for speed and space, never for correctness: each step is decided from the state, done beside
the log, and made true by one commit that is dropped if what it was decided from has changed.
"""
