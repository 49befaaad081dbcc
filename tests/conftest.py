import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hypothesis import settings

settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")
torch.set_num_threads(1)
