"""Operations and their backends; importing the package registers all that there are."""

from engine.kernels.cpp import attention, layers, linear, quantise

__all__ = ["attention", "layers", "linear", "quantise"]
