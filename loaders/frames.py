"""Arrays as frames of ZeroMQ messages."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__package__, __file__)
