"""Short names of the dtypes that tests are repeated for, and tensors of bounds."""

import torch

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def int32(values):
    return torch.tensor(values, dtype=torch.int32)
