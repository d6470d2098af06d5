"""How quantized checkpoints lay out their tensors: AWQ, GPTQ, FP8 and INT8."""
