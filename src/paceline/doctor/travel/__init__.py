"""The files that travel: gathered facts come from here, wherever "here" is.

Each imports the standard library, `luggage` and `common` alone, and works on Python 3.8 and later, since the Python at
the other end is whichever is there. A traveller has one entry, ``main(argument: dict) -> dict``.
"""
