"""Compile once, before step 0, in one place; after that, compiling is an error.

Read in this order:

* ``fingerprint``: what makes a compile cache valid on this machine.
* ``cache``: one folder per fingerprint: locked, checked, repaired, packed.
* ``warmup``: runs the real modules once, the leader first, the rest on its cache.
* ``forbid``: after the warm-up, whatever compiles or falls back to a dense path raises with the reason.
* ``guard``: who sets torch's "FX is tracing" flag. Usable alone: ``import paceline.compiling.guard as guard``.

Nothing is imported here: `guard` must load without the rest, `fingerprint` and `cache` without torch's compiler.
"""
