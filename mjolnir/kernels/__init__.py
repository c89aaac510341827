"""T5's device kernels, in Triton. Each file holds one kernel; launchers and buffers are in ``runner.py``."""
