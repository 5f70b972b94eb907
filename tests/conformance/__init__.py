"""PyTorch's own distributed test suite, run against a c10d backend on CPU tensors.

The suite is imported from the installed torch (``torch.testing._internal.distributed.distributed_test``); nothing of it
is copied. See README.md in this folder for how to run it and for what is patched.
"""
