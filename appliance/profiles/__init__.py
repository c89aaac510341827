"""Profiles: one YAML file is one way to run one model, for a machine of a kind.

Read in this order: ``schema`` (what a file may say), ``loader`` (text to profile), ``shelf`` (which profiles there
are), ``choice`` (profile to settings), ``fit`` (would it run here), ``routes`` (HTTP), ``cli`` (the command line).
"""
