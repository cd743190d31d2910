"""Facts about an FX graph. Changes nothing, calls no CUDA."""
