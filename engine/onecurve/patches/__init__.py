"""Every private name of another library that this one relies on, under a public name, with the reason.

A file for each library, or each part of one. No other file of onecurve uses such a name
(`tests/engine/patches/test_patches.py` looks), so a new version of a library is examined here. When a library changes,
`tests/engine/test_canaries.py` or `tests/engine/patches/` fails.
"""
