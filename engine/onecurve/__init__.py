"""The engine's face: what `src/models`, `src/data` and a user's own files import; `__init__.pyi` has the list.

A name is imported when it is first used: `train.py --help` imports this package too, and should not take seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
