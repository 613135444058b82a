"""Reads every state that can break a launch: near, in a running process, or far away through any chain of shells.

Facts are gathered where the process is, by the few standard-library files of `travel`; they are judged here, by pure
functions from facts to findings.
"""
