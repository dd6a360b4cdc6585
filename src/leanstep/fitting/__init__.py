"""The whole pipeline in one call, and the closed loop behind it."""
