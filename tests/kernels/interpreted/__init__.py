"""Checks of the Triton kernels in Triton's interpreter, which a process chooses before it imports Triton:
`tests/kernels/test_triton_interpreted.py` runs them in a process of their own."""
