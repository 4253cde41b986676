"""Promises of every operator, checked the same way by the tests and by `python -m jaxops check`.

An operator declares itself in `specs/<operator>.py`; `capabilities` has one function a capability.
"""
